"""The one interface that main, draft and the fake model speak.

The decoding loop and the proposers know this module and never ask what is behind it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class LanguageModel(Protocol):
    """One sequence of tokens, cached by a model that can extend it and roll it back."""

    @property
    def n_vocab(self) -> int:
        """Columns of every logits array."""

    @property
    def n_ctx(self) -> int:
        """Most tokens that the cache holds."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that one `evaluate` takes."""

    @property
    def max_logits(self) -> int:
        """Most rows of logits that one `evaluate` returns."""

    @property
    def cached(self) -> Sequence[int]:
        """The tokens in the cache, in order. Do not change it."""

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Append tokens to the cache in ONE call of the model.

        Args:
            tokens: 1 to `max_tokens` ids.
            n_logits: how many of the last tokens want logits (0 for prefill).

        Returns:
            float32 (n_logits, n_vocab): row i scores the token that follows
            ``tokens[len(tokens) - n_logits + i]``. A view: the next `evaluate` overwrites it.

        Raises:
            ContextOverflow: the cache has no room for them.
            BackendError: the model failed; the cache holds what it held before, or a prefix of more (a
                recurrent model's may hold nothing).
        """

    def trim(self, length: int) -> None:
        """Roll the cache back to its first `length` tokens."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:  # the usual case, at C speed
        return n
    return next(i for i in range(n) if a[i] != b[i])


def prefill(model: LanguageModel, tokens: Sequence[int]) -> Iterator[int]:
    """Make the cache hold exactly `tokens`, reusing the prefix that is there already.

    Works in chunks, so that the caller may stop between two of them, and yields the number of
    tokens evaluated after each.
    """
    model.trim(common_prefix(model.cached, tokens))
    while len(model.cached) < len(tokens):
        start = len(model.cached)
        chunk = tokens[start : start + model.max_tokens]
        model.evaluate(chunk, 0)
        yield len(chunk)
