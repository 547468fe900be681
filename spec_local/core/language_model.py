"""The interface to a model: what the decoding loop and the proposers call."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class LanguageModel(Protocol):
    """A model and its KV cache: a history, with a tree of draft tokens on top.

    Nodes of the tree are numbered in the order in which they were added since the history last changed.
    Nodes that follow the last token of the history have parent −1.
    """

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary, and number of columns of every logits array."""

    @property
    def n_ctx(self) -> int:
        """Maximum number of tokens in the cache, including the tree."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per call."""

    @property
    def max_logits(self) -> int:
        """Maximum number of rows of logits that one call returns."""

    @property
    def max_branches(self) -> int:
        """Maximum number of leaves in the tree; 1: chains only."""

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the history, without the tree. Do not change it."""

    def evaluate(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """Append tokens to the history in one call, and drop the tree.

        Args:
            tokens: 1 to `max_tokens` ids.
            n_logits: return logits for this many of the last tokens (0 for prefill).

        Returns:
            float32 (n_logits, n_vocab): row i scores the token that follows
            ``tokens[len(tokens) - n_logits + i]``. A view: the next call overwrites it.

        Raises:
            ContextOverflow: the cache is too small.
            BackendError: the call failed; the history is unchanged (a recurrent model's may be lost).
        """

    def decode_tree(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """Add nodes to the tree in one call.

        Args:
            tokens: 1 to `max_tokens` ids.
            parents: parent of each node: −1, an existing node, or an earlier one of this call.
            n_logits: return logits for this many of the last nodes; None: all.

        Returns:
            float32 (n_logits, n_vocab): row i scores the token after the i-th of these nodes. A view: the
            next call overwrites it.

        Raises:
            InvalidRequest: a parent does not exist, or there are more than `max_branches` leaves; nothing
                has changed.
            ContextOverflow, BackendError: as above; the tree is dropped.
        """

    def commit(self, path: Sequence[int]) -> None:
        """Append a path of the tree, as nodes from the root down, to the history, and drop the others."""

    def truncate(self, length: int) -> None:
        """Roll the history back to its first `length` tokens, and drop the tree."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:  # the usual case, which is fast
        return n
    return next((i for i in range(n) if a[i] != b[i]), n)  # a list never equals a tuple


def prefill(model: LanguageModel, tokens: Sequence[int]) -> Iterator[int]:
    """Make the cache contain exactly `tokens`, reusing the prefix that is already cached.

    Yields the number of tokens evaluated in each call; the caller may stop after any of them.
    """
    model.truncate(common_prefix(model.cached, tokens))
    while len(model.cached) < len(tokens):
        start = len(model.cached)
        chunk = tokens[start : start + model.max_tokens]
        model.evaluate(chunk, 0)
        yield len(chunk)
