"""Rows for training data: many texts that grow by one token in each call, which reads the weights once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local import bfloat16
from spec_local.core.calls import together
from spec_local.llama.devices import Offload
from spec_local.llama.fitting import free_bytes
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.llama.sequence import LlamaSequence

_MAX_PROMPT_TOKENS = 512  # maximum number of prompt tokens per call


def texts_that_fit(model: Model, n_ctx: int, most: int, offload: Offload) -> int:
    """Return how many texts of `n_ctx` tokens fit, with the model, into half of the free memory there."""
    n, room = most, 0.5 * free_bytes(offload) - model.size
    while n > 1 and model.kv_bytes(n * n_ctx) > room:
        n //= 2
    return n


def open_parallel_rows(
    model: Model, n: int, n_ctx: int, threads: int | None, hidden: HiddenStates | None = None
) -> Sequence[LlamaSequence]:
    """Create a llama.cpp context for `n` texts of up to `n_ctx` tokens; see `open_sequences` for the errors.

    hidden: the states that `next_outputs` returns; None: none.
    """
    return open_sequences(
        model,
        n,
        n_ctx=n_ctx,
        max_tokens=max(_MAX_PROMPT_TOKENS, n),
        max_logits=n,
        threads=threads,
        unified=False,
        hidden=hidden,
    )


def next_outputs(
    rows: Sequence[LlamaSequence],
    tokens: Sequence[Sequence[int]],
    *,
    with_states: bool,
    logits: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], Sequence[NDArray[np.uint16]]]:
    """Append tokens to rows of one context.

    Args:
        rows: in ascending order.
        tokens: one or more for each row.
        with_states: return the states; the rows must have been opened for this.
        logits: the array to return; None: a new one, which takes the system a while to provide.

    Returns:
        float32 (len(rows), n_vocab): the logits after the last token of each.
        bfloat16 (see `bfloat16`) (len(tokens[i]), width) for each row: the hidden states of its new tokens;
        empty without states.

    Raises:
        InvalidRequest: no tokens, or one outside the vocabulary.
        ContextOverflow: a text would be longer than its context.
        BackendError: llama.cpp failed.
    """
    states: list[list[NDArray[np.uint16]]] = [[] for _ in rows]
    early = [
        _append(row, new[:-1], found if with_states else None)
        for row, new, found in zip(rows, tokens, states, strict=True)
        if len(new) > 1
    ]
    for result in together(early):
        if isinstance(result, Exception):
            raise result
    calls = [row.call(new[-1:], [-1], 1) for row, new in zip(rows, tokens, strict=True)]
    logits = np.concatenate(rows[0].context.decode(calls), out=logits)
    if with_states:
        last = bfloat16.encode(rows[0].context.states(range(len(rows))))
        for i, found in enumerate(states):
            found.append(last[i : i + 1])
    for row in rows:
        row.commit([0])
    joined = [found[0] if len(found) == 1 else np.concatenate(found) for found in states if found]
    return logits, joined


async def _append(row: LlamaSequence, tokens: Sequence[int], states: list[NDArray[np.uint16]] | None) -> None:
    for start in range(0, len(tokens), row.limits.max_tokens):
        part = tokens[start : start + row.limits.max_tokens]
        await row.call(part, n_logits=0)
        if states is not None:
            states.append(bfloat16.encode(row.states(range(len(part)))))
