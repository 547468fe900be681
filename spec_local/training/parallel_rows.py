"""Rows for training data: many texts that grow by one token in each call, which reads the weights once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import Calls, run_together
from spec_local.errors import SpecLocalError
from spec_local.llama.context import Context, open_rows
from spec_local.llama.model import Model

_MAX_PROMPT_TOKENS = 512  # maximum number of prompt tokens per call


def open_parallel_rows(model: Model, n: int, n_ctx: int, threads: int | None) -> Sequence[Context]:
    """Create a llama.cpp context for `n` texts of up to `n_ctx` tokens; see `open_rows` for the errors."""
    return open_rows(
        model,
        n,
        n_ctx=n_ctx,
        max_tokens=max(_MAX_PROMPT_TOKENS, n),
        max_logits=n,
        threads=threads,
        unified=False,
    )


def next_logits(rows: Sequence[Context], tokens: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Append tokens to rows of one context.

    Args:
        rows: in ascending order.
        tokens: one or more for each row.

    Returns:
        float32 (len(rows), n_vocab): the logits after the last token of each.

    Raises:
        InvalidRequest: no tokens, or one outside the vocabulary.
        ContextOverflow: a text would be longer than its context.
        BackendError: llama.cpp failed.
    """
    early = [_append(row, new[:-1]) for row, new in zip(rows, tokens, strict=True) if len(new) > 1]
    for result in run_together(early):
        if isinstance(result, SpecLocalError):
            raise result
    calls = [row.call(new[-1:], [-1], 1) for row, new in zip(rows, tokens, strict=True)]
    logits = rows[0].shared.decode(calls)
    for row in rows:
        row.commit([0])
    return np.concatenate(logits)


def _append(row: Context, tokens: Sequence[int]) -> Calls[None]:
    for start in range(0, len(tokens), row.max_tokens):
        yield from row.evaluate_calls(tokens[start : start + row.max_tokens], 0)
