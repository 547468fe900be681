"""The interface to a model: what the engine and the proposers call.

A context evaluates; its rows, one for each running request, share its calls (see `spec_local.core.calls`).
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call, Logits, run
from spec_local.errors import InvalidRequest

States = NDArray[np.float32]

Rollback = Literal["any", "bounded", "fork", "none"]
"""The ways in which a model can roll back.

any: the last ones, as many as wanted.
bounded: up to `LanguageModel.max_rollback` of the last call's tokens, but not all of them; else as fork.
fork: only all tokens after a checkpoint; those among them that are kept must be evaluated again.
none: only all tokens.
"""


class Context(Protocol):
    """A ``llama_context``: weights, a KV cache, and calls that its rows share."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per call, of all rows together."""

    @property
    def max_logits(self) -> int:
        """Maximum number of rows of logits that one call returns, for all rows of the model together."""

    def decode(self, calls: Sequence[Call[Any]]) -> Sequence[Logits]:
        """Make one call for some of the rows.

        Args:
            calls: at most one for each row.

        Returns:
            for each of `calls`, float32 (n_logits, n_vocab): views that the next call overwrites.

        Raises:
            InvalidRequest: the calls together have too many tokens or rows of logits; nothing has changed.
            ContextOverflow, BackendError: the call failed; the trees of these rows are dropped, and their
                histories unchanged (a recurrent model's may be lost).
        """


class LanguageModel(Protocol):
    """A model and its KV cache: a history, with a tree of draft tokens on top.

    Nodes of the tree are numbered in the order in which they were added since the history last changed.
    Nodes that follow the last token of the history have parent −1.
    """

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary, and number of columns of every logits array."""

    @property
    def draft_tokens(self) -> NDArray[np.intp] | None:
        """The tokens that have logits in the last call, ascending; None: all. Others are undefined or −∞."""

    def expect(self, tokens: Sequence[int]) -> None:
        """Note tokens of a text that is not read, which may then have logits, too: see `draft_tokens`."""

    @property
    def n_ctx(self) -> int:
        """Maximum number of tokens of this row in the cache, including the tree."""

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
    def rollback(self) -> Rollback:
        """The way in which it can roll back: what `commit` and `truncate` keep."""

    @property
    def max_rollback(self) -> int:
        """Maximum number of the last call's tokens that can be dropped without evaluating others again."""

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the history, without the tree. Do not change it."""

    def checkpoint(self) -> bool:
        """Keep the state of the history, to roll back to it from any later one; it must have no tree.

        Nothing is done if the model can roll back to any length. Otherwise, the last checkpoint is replaced.

        Returns:
            whether it can; False after a rollback by `max_rollback`, until the next call.
        """

    def stops(self, tokens: Sequence[int]) -> Sequence[int]:
        """Lengths of this history, after `reuse`, at which to call `keep` while the rest is evaluated.

        They are where other texts are likely to part from it, ascending. A model that can roll back to any
        length needs none.
        """

    def keep(self) -> None:
        """Keep the state of the history for later calls of `reuse`; it must have no tree."""

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

    async def evaluate_async(self, tokens: Sequence[int], n_logits: int) -> Logits:
        """`evaluate`, in calls that other rows may share."""

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

    async def decode_tree_async(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """`decode_tree`, in calls that other rows may share."""

    def commit(self, path: Sequence[int]) -> None:
        """Append a path of the tree, as nodes from the root down, to the history, and drop the others.

        If the others cannot be dropped alone (see `rollback`), the history ends at a checkpoint, or is empty.
        """

    def truncate(self, length: int) -> None:
        """Roll the history back to its first `length` tokens, and drop the tree.

        If that is not possible (see `rollback`), it ends at an earlier checkpoint, or is empty.

        Raises:
            ModelError: `rollback` is none, and `length` is neither 0 nor that of the history.
        """

    def reuse(self, tokens: Sequence[int]) -> None:
        """Make the history a prefix of `tokens`: the longest that a row or a prompt cache has."""


class Row(LanguageModel, Protocol):
    """One row of a model: a history of its own, and calls that it shares with the model's other rows."""

    @property
    def context(self) -> Context:
        """The context that this row shares with others."""

    def call(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call[Any]:
        """Prepare a call that adds nodes to the tree; valid until this row changes.

        Args:
            tokens, parents, n_logits: see `decode_tree`.

        Raises:
            InvalidRequest: see `decode_tree`.
            ContextOverflow: the cache is too small.
        """

    def states(self, nodes: Sequence[int]) -> States:
        """Hidden states of tokens of this row's part of the last call, for drafters that read them.

        Args:
            nodes: numbers of the tokens, from the first one of the part.

        Returns:
            float32 (len(nodes), width): a copy.

        Raises:
            InvalidRequest: this model keeps no hidden states.
        """


class RowMethods:
    """The methods of a `Row` that follow from others, and those of one that can always roll back."""

    @property
    def draft_tokens(self) -> NDArray[np.intp] | None:
        """See `LanguageModel.draft_tokens`: all."""
        return None

    def expect(self, tokens: Sequence[int]) -> None:
        """See `LanguageModel.expect`."""

    @property
    def max_rollback(self: LanguageModel) -> int:
        """See `LanguageModel.max_rollback`."""
        return self.n_ctx

    def evaluate(self: LanguageModel, tokens: Sequence[int], n_logits: int) -> Logits:
        """See `LanguageModel.evaluate`."""
        return run(self.evaluate_async(tokens, n_logits))

    async def evaluate_async(self: Row, tokens: Sequence[int], n_logits: int) -> Logits:
        """See `LanguageModel.evaluate`."""
        self.commit(())
        logits = await self.call(tokens, range(-1, len(tokens) - 1), n_logits)
        self.commit(range(len(tokens)))
        return logits

    def checkpoint(self: LanguageModel) -> bool:
        """See `LanguageModel.checkpoint`; this one needs none."""
        return True

    def stops(self: LanguageModel, tokens: Sequence[int]) -> Sequence[int]:
        """See `LanguageModel.stops`; this one needs none."""
        return ()

    def keep(self: LanguageModel) -> None:
        """See `LanguageModel.keep`; this one needs none."""

    def decode_tree(
        self: LanguageModel, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """See `LanguageModel.decode_tree`."""
        return run(self.decode_tree_async(tokens, parents, n_logits))

    async def decode_tree_async(
        self: Row, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Logits:
        """See `LanguageModel.decode_tree`."""
        return await self.call(tokens, parents, len(tokens) if n_logits is None else n_logits)

    def states(self: LanguageModel, nodes: Sequence[int]) -> States:
        """See `Row.states`; this one keeps none."""
        raise InvalidRequest("this model keeps no hidden states: use another drafter")

    def reuse(self: LanguageModel, tokens: Sequence[int]) -> None:
        """See `LanguageModel.reuse`; this one knows of no other rows."""
        self.truncate(common_prefix(self.cached, tokens))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    if a == b:  # the usual case, which is fast
        return n
    a, b = list(a), list(b)  # a list never equals a tuple
    # Bisect: comparing slices is much faster than comparing tokens one by one.
    n_equal, differing = 0, n + 1
    while differing - n_equal > 1:
        middle = (n_equal + differing) // 2
        if a[n_equal:middle] == b[n_equal:middle]:
            n_equal = middle
        else:
            differing = middle
    return n_equal


async def prefill(model: LanguageModel, tokens: Sequence[int]) -> int:
    """Make the cache contain exactly `tokens`, reusing the longest prefix that is already cached.

    The caller may stop after any of the calls.

    Returns:
        number of tokens evaluated.
    """
    model.reuse(tokens)
    n_cached = len(model.cached)
    for end in [*model.stops(tokens), len(tokens)]:
        while (start := len(model.cached)) < end:
            await model.evaluate_async(tokens[start : min(end, start + model.max_tokens)], 0)
        if end < len(tokens):
            model.keep()
    return len(tokens) - n_cached
