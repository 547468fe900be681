"""Contexts in which a token's logits depend only on the tokens before it.

Usually they also depend on the number of tokens in the call, because llama.cpp selects its kernels by it. A
seed then gives another text when other tokens are drafted. In calls of certain sizes, filled up with dummy
tokens, all outputs are computed alike. Which sizes these are depends on the processor and on the model's
types, and is found by trying.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.errors import InvalidRequest, ModelError
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.sequence import LlamaSequence

# The maximum number of tokens per call. Apple's BLAS is used from 32 tokens on; attention differs from 64 on.
_MOST = 24
_MULTIPLE = 8  # to fill calls up to
_CALLS = (1, 2, 3, 5, 8, 5)  # sizes of the trial's calls, which put tokens at various places in a call
_N = sum(_CALLS)
# Texts of the trial for a mixture of experts: tokens are computed together if they select the same expert,
# which rarely makes a difference (measured on Q4_K_M: for one token in twelve).
_EXPERT_TEXTS = 6


def open_reproducible_sequences(
    model: Model, n_parallel: int, *, n_ctx: int, max_branches: int = 1, **options: Any
) -> Sequence[LlamaSequence]:
    """Create contexts in which a token's logits depend only on the tokens before it.

    Each sequence is a llama.cpp context of its own: in a shared cache, llama.cpp's attention would add up in
    another order. Several therefore take as long as one after another.

    The trial takes about as long as reading a prompt of 100 tokens (mixtures of experts: 600).

    Args:
        options: of `ContextOptions`; `max_tokens` and `max_logits` are not used, as they are chosen here.

    Raises:
        InvalidRequest: layers are on a GPU, or trees need other kernels.
        ModelError: no size of calls works for this model.
        SpecLocalError: see `LlamaContext`.
    """
    if model.is_on_gpu:
        raise InvalidRequest("reproducible output is supported on the CPU only: add `device=cpu`")
    options = {name: value for name, value in options.items() if name not in ("max_tokens", "max_logits")}
    for pad_to, max_tokens in _sizes():
        # With llama.cpp's kernels, attention differs for a single token after 512 others, which is more than
        # the trial has. Padding does not determine the number of tokens that select an expert.
        # Nor do a recurrent model's calls with dummy tokens: llama.cpp divides them by sequence.
        if (pad_to == 1 and not kernels.status().instruction_set) or (
            pad_to > 1 and (model.n_experts or model.is_recurrent)
        ):
            continue
        create = partial(
            open_sequence, model, pad_to=pad_to, max_tokens=max_tokens, max_branches=max_branches, **options
        )
        trial = create(n_ctx=4 * _N)
        try:
            texts = np.random.default_rng(0).integers(
                0, trial.limits.n_vocab, (_EXPERT_TEXTS if model.n_experts else 1, _N)
            )
            if not all(_same_logits(trial, text.tolist()) for text in texts):
                continue
            if trial.limits.max_branches > 1 and not _same_in_tree(trial, texts[0].tolist()):
                raise InvalidRequest(
                    f"reproducible trees are not possible with a {trial.cache_type} cache and specdec's "
                    "kernels: add `kernels=off`, `cache_type=f16` or `shape=chain`"
                )
        finally:
            trial.close()
        return [create(n_ctx=n_ctx) for _ in range(n_parallel)]
    if model.is_recurrent:  # sequences that cannot roll back, for which nothing is drafted
        return [open_sequence(model, n_ctx=n_ctx, unified=False, **options) for _ in range(n_parallel)]
    raise ModelError(
        f"the output of {model.path.name} cannot be made reproducible on this machine: use Q4_K_M, Q6_K or "
        "Q8_0 weights, with specdec's CPU kernels (see specdec doctor)"
    )


def _sizes() -> list[tuple[int, int]]:
    """Return multiples to fill calls up to, and the maximum number of tokens per call; the cheapest first.

    Calls that are not filled up are no larger than specdec's kernels compute for all of the model's types.
    """
    limits = {most for most in kernels.status().limits.values() if _MULTIPLE <= most < _MOST}
    return [*((1, most) for most in sorted({_MOST, *limits}, reverse=True)), (_MULTIPLE, _MOST)]


def _same_logits(sequence: LlamaSequence, text: list[int]) -> bool:
    """Return whether calls of the largest size and of various sizes give the same logits."""
    calls = [0, *accumulate(_CALLS)]
    return _same(_logits(sequence, text, calls), _logits(sequence, text, _largest_calls(sequence, 0)))


def _same_in_tree(sequence: LlamaSequence, text: list[int]) -> bool:
    """Return whether a path through a tree, and the tokens after it, have the same logits as a chain.

    The path's nodes have 1, 2, 0, 1, 2, 0 … siblings.
    """
    expected = _logits(sequence, text, _largest_calls(sequence, 0))
    sequence.truncate(0)
    tokens: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    while len(tokens) < sequence.limits.max_tokens:
        n_free = (
            min(
                sequence.limits.max_tokens - len(tokens),
                sequence.limits.max_branches + len(path) - len(tokens),
            )
            - 1
        )
        n_siblings = min((len(path) + 1) % 3, n_free)
        parents += [path[-1] if path else -1] * (n_siblings + 1)
        tokens += [*text[_N - n_siblings :][:n_siblings], text[len(path)]]
        path.append(len(tokens) - 1)
    found = [run(sequence.call(tokens, parents))[path].copy()]
    sequence.commit(path)
    if len(path) < _N:
        found.append(_logits(sequence, text, _largest_calls(sequence, len(path))))
    return _same(np.concatenate(found), expected)


def _largest_calls(sequence: LlamaSequence, start: int) -> list[int]:
    return [*range(start, _N, sequence.limits.max_tokens), _N]


def _logits(sequence: LlamaSequence, text: list[int], ends: list[int]) -> NDArray[np.float32]:
    """Return the logits after each token from ends[0] on, from calls that end at the other lengths."""
    sequence.truncate(ends[0])
    return np.concatenate([run(sequence.call(text[a:b])).copy() for a, b in pairwise(ends)])


def _same(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Return whether the bits are the same."""
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
