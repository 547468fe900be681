"""The one interface that main, draft and the fake model speak.

The decoding loop and the proposers know this module and never ask what is behind it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class LanguageModel(Protocol):
    """A text, cached by a model that can grow it by a tree of guesses, keep one path of it, and roll it back.

    The nodes of the tree are numbered in the order in which they came since the text last changed; the parent
    of those that follow the text's last token is −1.
    """

    @property
    def n_vocab(self) -> int:
        """Columns of every logits array."""

    @property
    def n_ctx(self) -> int:
        """Most tokens that the cache holds, those of the tree included."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that one call takes."""

    @property
    def max_logits(self) -> int:
        """Most rows of logits that one call returns."""

    @property
    def max_branches(self) -> int:
        """Most leaves of a tree; 1: chains only."""

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the text, in order, without the tree. Do not change it."""

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Append tokens to the text in ONE call of the model; a tree on top is forgotten.

        Args:
            tokens: 1 to `max_tokens` ids.
            n_logits: how many of the last tokens want logits (0 for prefill).

        Returns:
            float32 (n_logits, n_vocab): row i scores the token that follows
            ``tokens[len(tokens) - n_logits + i]``. A view: the next call overwrites it.

        Raises:
            ContextOverflow: the cache has no room for them.
            BackendError: the model failed; the text is what it was (a recurrent model's may be gone).
        """

    def decode_tree(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """Add nodes to the tree in ONE call of the model.

        Args:
            tokens: 1 to `max_tokens` ids.
            parents: of each: −1, a node that is there already, or an earlier one of this call.
            n_logits: how many of the last nodes want logits; None: all.

        Returns:
            float32 (n_logits, n_vocab): row i scores the token that follows node i (of those that want any)
            and its ancestors. A view: the next call overwrites it.

        Raises:
            InvalidRequest: no such parent, or more branches than `max_branches`; nothing has changed.
            ContextOverflow, BackendError: as above; the tree is forgotten.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Append a path of the tree, nodes from the root down, to the text; forget all others."""

    def truncate(self, length: int) -> None:
        """Roll the text back to its first `length` tokens, and forget the tree."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:  # the usual case, at C speed
        return n
    return next((i for i in range(n) if a[i] != b[i]), n)  # a tuple equals no list


def prefill(model: LanguageModel, tokens: Sequence[int]) -> Iterator[int]:
    """Make the cache hold exactly `tokens`, reusing the prefix that is there already.

    Works in chunks, so that the caller may stop between two of them, and yields the number of
    tokens evaluated after each.
    """
    model.truncate(common_prefix(model.cached, tokens))
    while len(model.cached) < len(tokens):
        start = len(model.cached)
        chunk = tokens[start : start + model.max_tokens]
        model.evaluate(chunk, 0)
        yield len(chunk)
