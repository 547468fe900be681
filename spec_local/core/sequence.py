"""The interface of a model: what the engine and the proposers know of it.

A `ModelSequence` is one token sequence of a model, the main model's or the draft's: a history in its cache,
and a tree of draft tokens on top. The sequences of a context, one for each answer that runs at the same
time, share its calls (see `spec_local.core.calls`). The main model's is a `MainSequence`. A `Head` is a small
drafter that reads the main model's hidden states.
"""

import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call, Logits

States = NDArray[np.float32]

Rollback = Literal["any", "bounded", "fork", "none"]
"""The ways in which a model can roll back.

any: the last tokens, as many as wanted.
bounded: up to `Limits.max_rollback` of the last call's tokens, but not all of them; else as fork.
fork: only all tokens after a checkpoint; those among them that are kept must be evaluated again.
none: only all tokens.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What a sequence can do. A record does not change; the one that a sequence has may be replaced.

    n_vocab: size of the vocabulary, and number of columns of all logits.
    n_ctx: maximum number of tokens in the cache, including the tree.
    max_tokens: maximum number of tokens per call.
    max_logits: maximum number of tokens per call whose logits are returned.
    max_branches: maximum number of leaves in the tree; 1: chains only.
    rollback: what `commit` and `truncate` can keep.
    max_rollback: maximum number of the last call's tokens that can be dropped without evaluating others
        again.
    max_draft: maximum number of draft tokens after the history.
    drafts_blocks: True for a head whose call for the first draft token of a step also returns the logits for
        all later ones. Its time grows with the number of tokens that are announced (see
        `ModelSequence.call`).
    draft_tokens: the tokens that have logits in the last call, ascending; None: all. Others are undefined
        or −∞.
    """

    n_vocab: int
    n_ctx: int
    max_tokens: int
    max_logits: int
    max_branches: int = 1
    rollback: Rollback = "any"
    max_rollback: int = sys.maxsize
    max_draft: int = sys.maxsize
    drafts_blocks: bool = False
    draft_tokens: NDArray[np.intp] | None = None


class ModelSequence(Protocol):
    """One token sequence of a model: a history in its cache, with a tree of draft tokens on top.

    Nodes of the tree are numbered in the order in which they were added since the history last changed.
    Nodes that follow the last token of the history have parent −1.
    """

    @property
    def limits(self) -> Limits:
        """What it can do."""

    @property
    def cached(self) -> Sequence[int]:
        """The tokens of the history, without the tree. Do not change it."""

    def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Awaitable[Logits]:
        """Evaluate tokens, in calls that other sequences may share. ``run(x.call(…))`` does so alone.

        Args:
            tokens: 1 to `Limits.max_tokens` ids.
            parents: the tokens become nodes of the tree; these are their parents: −1, an existing node, or an
                earlier one of this call. None: the tokens are appended to the history, and the tree is
                dropped.
            n_logits: return logits for this many of the last tokens; None: all. 0 for prefill.
            positions: of each token, larger than its parent's; None: the one after its parent's. The position
                of a token is a number of its own, and not that of the tokens before it: what has no token
                may take positions, too. An implementation keeps that of each token of the history. Lengths
                are numbers of tokens.
            n_draft: up to this many tokens, at most `Limits.max_draft`, will be drafted after the history,
                which only a head that drafts blocks needs to know; None: the most.

        Returns:
            float32 (n_logits, n_vocab): the i-th logits score the token after the i-th of these tokens. A
            view: the next call overwrites it.

        Raises:
            InvalidRequest: a parent does not exist, there are more than `Limits.max_branches` leaves, or
                positions are given that this model cannot have; nothing has changed.
            ContextOverflow: the cache is too small.
            BackendError: the call failed. The tree is dropped, and the history is unchanged (a recurrent
                model's may be lost).
        """

    def commit(self, path: Sequence[int]) -> States | None:
        """Append a path of the tree, as nodes from the root down, to the history, and drop the others.

        If the others cannot be dropped alone (see `Rollback`), the history ends at a checkpoint, or is empty.

        Returns:
            float32 (len(path), width): hidden states of the path's tokens, for a `Head`; a copy. None: the
            model keeps none, or not all of them are of the last call.
        """

    def truncate(self, length: int) -> None:
        """Roll the history back to its first `length` tokens, and drop the tree.

        If that is not possible (see `Rollback`), it ends at an earlier checkpoint, or is empty.

        Raises:
            ModelError: `Limits.rollback` is none, and `length` is neither 0 nor that of the history.
        """

    def reuse(self, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
        """Make the history a prefix of `tokens`: the longest that a sequence or a prompt cache has.

        Args:
            text: further tokens of the prompt, which may then have logits: see `Limits.draft_tokens`.

        Returns:
            number of the first tokens of `tokens` that are known: of a head, those whose states it need not
            receive; of others, those of the history.
        """

    def checkpoint(self) -> bool:
        """Keep the state of the history, to roll back to it from any later one; it must have no tree.

        Nothing is done if the model can roll back to any length. Otherwise, the last checkpoint is replaced.

        Returns:
            whether it can; False after a rollback by `Limits.max_rollback`, until the next call.
        """

    def stops(self, tokens: Sequence[int]) -> Sequence[int]:
        """Lengths of this history, after `reuse`, at which to call `keep` while the rest is evaluated.

        Ascending; other prompts are likely to diverge from this one there. A model that can roll back to any
        length needs none.
        """

    def keep(self) -> None:
        """Keep the state of the history for later calls of `reuse`; it must have no tree."""


class Context(Protocol):
    """A ``llama_context``: weights, a KV cache, and calls that its sequences share."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens per call, of all sequences together."""

    @property
    def max_logits(self) -> int:
        """Maximum number of tokens per call whose logits are returned, of all sequences together."""

    def decode(self, calls: Sequence[Call[Any]]) -> Sequence[Logits]:
        """Make one call for some of the sequences.

        Args:
            calls: at most one for each sequence.

        Returns:
            for each of `calls`, float32 (n_logits, n_vocab): views that the next call overwrites.

        Raises:
            InvalidRequest: the calls together have too many tokens or logits; nothing has changed.
            ContextOverflow, BackendError: the call failed; the trees of these sequences are dropped, and
                their histories unchanged (a recurrent model's may be lost).
        """


class MainSequence(ModelSequence, Protocol):
    """A sequence whose calls the engine itself puts together with those of others."""

    @property
    def context(self) -> Context:
        """The context that this sequence shares with others."""

    def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Call[Any]:
        """See `ModelSequence.call`. The call is valid until this sequence changes.

        It is awaited, or given to `Context.decode`, which only adds nodes to the tree.
        """


@runtime_checkable
class Head(ModelSequence, Protocol):
    """A small drafter: a prefix of the main model's history, whose hidden states it reads, and draft tokens.

    Some heads predict the next token from a pair: a token, and the main model's state of the token before it.
    While drafting, the state of a draft token does not exist yet; the head's own output takes its place. Once
    the main model has evaluated the tokens, the pairs are evaluated again with its states. Other heads read
    the states of all tokens of the history, and predict a block of tokens after the last one in one call.
    """

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens that the main model has added to its history, and their states.

        Args:
            start: number of tokens before them, at most as many as were received or known to `reuse`. Tokens
                that were received earlier are skipped if they are the same.
            states: float32 (len(tokens), width).

        Raises:
            InvalidRequest: the states of tokens before them are missing.
        """

    async def read(self) -> None:
        """Evaluate the tokens that were received, once there are enough of them for a call."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two token sequences share."""
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


async def prefill(model: ModelSequence, tokens: Sequence[int], text: Sequence[int] = ()) -> int:
    """Make the cache contain exactly `tokens`, reusing the longest prefix that is already cached.

    The caller may stop after any of the calls.

    Args:
        text: see `ModelSequence.reuse`.

    Returns:
        number of tokens evaluated.
    """
    model.reuse(tokens, text)
    n_cached, most = len(model.cached), model.limits.max_tokens
    for end in [*model.stops(tokens), len(tokens)]:
        while (start := len(model.cached)) < end:
            await model.call(tokens[start : min(end, start + most)], n_logits=0)
        if end < len(tokens):
            model.keep()
    return len(tokens) - n_cached
