"""Rows of heads that draft one token per call: EAGLE-3, and layers for multi-token prediction (MTP).

Entry i of a head's cache is a pair: token i, and the state of token i − 1. This is how llama.cpp drafts with
heads (common/speculative.cpp), except that the accepted tokens of a step are evaluated in the same call as
the first draft token of the next one.

In place of a draft token's state, the head reads its own output for that token, so a tree takes a call for
each of its levels. Every branch has its own sequence: see `spec_local.llama.branches`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import (
    Call,
    Calls,
    Logits,
    States,
    common_prefix,
)
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama.batch import Batch
from spec_local.llama.branches import Branches
from spec_local.llama.llama_head import LlamaHead
from spec_local.llama.received_states import ReceivedStates, State
from spec_local.llama.shared_head import SharedHead

_MAX_UNREAD = 32  # tokens whose states are kept until they are evaluated in one call
_MAX_REREAD = 8  # tokens evaluated in the call of the first draft token, if the head returns all logits


class HeadRow(LlamaHead):
    """One row of a head: a `Row` and a `Head`. Created by `spec_local.llama.eagle` or `spec_local.llama.mtp`.

    Args:
        shared, index: see `LlamaHead`.
    """

    shared: SharedHead

    def __init__(self, shared: SharedHead, index: int) -> None:
        super().__init__(shared, index)
        self.max_logits, self.max_branches = shared.max_logits, shared.max_branches
        self._sequence = index * shared.max_branches  # the first of this row's sequence ids
        guard = shared.first_guard + index if shared.has_guard else None
        self._tree = Branches(shared, self._sequence, shared.max_branches, guard)
        self._n_true = 0  # the first entries of the cache, evaluated with the main model's states
        self._received = ReceivedStates()
        # The head's outputs, which take the place of unknown states: of tokens of the history by position, of
        # the tree by node.
        self._own: dict[int, State] = {}
        self._outputs: dict[int, State] = {}

    @property
    def received(self) -> ReceivedStates:
        """The states that it has received and may still need."""
        return self._received

    @property
    def n_received(self) -> int:
        """See `Head.n_received`."""
        return len(self._received.tokens)

    # Evaluating

    def call(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call:
        """Prepare a call: see `Row.call`. A token with a child in the same call must have a known state."""
        _ = self.handle
        n, start = len(tokens), len(self._cached) + len(self._tree)
        if not 1 <= n <= self.max_tokens or not 0 <= n_logits <= min(n, self.max_logits):
            raise InvalidRequest(f"{n} tokens and {n_logits} rows of logits in one call of a head")
        if self.shared.returns_all and n_logits not in (0, n):
            raise InvalidRequest("this head returns logits for all tokens of a call, or for none")
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise InvalidRequest(f"a token is outside the vocabulary: give 0 to {self.n_vocab - 1}")
        if start + n > self.n_ctx:
            raise ContextOverflow(
                f"the context of {self.n_ctx} tokens is full: start a new conversation or give a larger --ctx"
            )
        self._check_tree(tokens, parents)
        if self._n_ready(tokens, parents) < n:
            raise InvalidRequest("a head evaluates draft tokens level by level: give one level per call")
        return Call(self, tokens, parents, n_logits)

    def _check_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        if len(tokens) != len(parents):
            raise InvalidRequest(
                f"{len(tokens)} tokens with {len(parents)} parents: give one parent per token"
            )
        n_branches = self._tree.count(parents)
        if n_branches > self.max_branches:
            raise InvalidRequest(f"a tree with {n_branches} branches: give at most {self.max_branches}")

    def _n_ready(self, tokens: Sequence[int], parents: Sequence[int]) -> int:
        """How many of these nodes, from the first one, can be evaluated in one call."""
        nodes, n_before = self._tree.nodes, len(self._tree)
        positions: list[int] = []
        for parent in parents:
            position = len(self._cached)
            if parent >= n_before:  # it is in the same call
                token, before = tokens[parent - n_before], positions[parent - n_before]
                if not self._assumes_states and self._known(token, before) is None:
                    break
                position = before + 1
            elif parent >= 0:
                position = nodes[parent].position + 1
            positions.append(position)
        return len(positions)

    def fill_batch(self, batch: Batch, start: int, call: Call, n_logits: int) -> None:
        """Add the tokens of a call to the tree and to a batch.

        Args:
            start: number of entries that the batch already has.
            n_logits: number of the last tokens whose logits are computed.
        """
        self._tree.add(batch, start, call, n_logits, len(self._cached))
        for i, parent in enumerate(call.parents, start):
            batch.vectors[i] = self._state(parent)

    def _known(self, token: int, position: int) -> State | None:
        """The main model's state of a token, if it is known."""
        return self._received.of(token, position)

    def _state(self, node: int) -> State:
        """The state of a node's token, or the output in its place; −1: of the last token of the history."""
        if node >= 0:
            known = self._tree.nodes[node]
            state, own = self._known(known.token, known.position), self._outputs.get(node)
        elif self._cached:
            position = len(self._cached) - 1
            state, own = self._known(self._cached[-1], position), self._own.get(position)
        else:
            state = own = None
        if state is None:
            state = own
        return self.shared.zeros if state is None else state

    def on_evaluated(self, outputs: NDArray[np.float32]) -> None:
        """Note that the last nodes of the tree have been evaluated.

        Args:
            outputs: the head's, float32 (number of these nodes, width); overwritten by the next call.
        """
        first = len(self._tree) - len(outputs)
        inner = {node.parent for node in self._tree.nodes[first:]}  # their states were known
        for node, output in enumerate(outputs, first):
            if node not in inner:
                self._outputs[node] = output.copy()

    def evaluate_calls(self, tokens: Sequence[int], n_logits: int) -> Calls[Logits]:
        """Append tokens to the history: see `LanguageModel.evaluate`.

        Tokens whose states are known are evaluated in one call, the others one by one.
        """
        self.commit(())
        logits = yield from self._extend(tokens, range(-1, len(tokens) - 1), n_logits)
        self.commit(range(len(tokens)))
        return logits

    def decode_tree_calls(
        self, tokens: Sequence[int], parents: Sequence[int], n_logits: int | None = None
    ) -> Calls[Logits]:
        """Add nodes to the tree, in a call for each of their levels: see `LanguageModel.decode_tree`."""
        self._check_tree(tokens, parents)
        return (yield from self._extend(tokens, parents, len(tokens) if n_logits is None else n_logits))

    def _extend(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Calls[Logits]:
        parts: list[Logits] = []
        done = 0
        if self.shared.skips_first and not self._cached and not self._tree and n_logits < len(tokens):
            self._tree.add_unevaluated(tokens[0])  # no state precedes it, so there is no pair
            done = 1
        while done < len(tokens):
            n, wanted = self._next_part(tokens[done:], parents[done:], n_logits)
            n_rows = n if wanted and self.shared.returns_all else wanted
            logits = yield self.call(tokens[done : done + n], parents[done : done + n], n_rows)
            done += n
            if wanted:  # a view, which the next call overwrites
                found = logits[n_rows - wanted :]
                parts.append(found if done == len(tokens) else found.copy())
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.n_vocab), np.float32)

    def _next_part(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> tuple[int, int]:
        """How many of the next nodes to evaluate in one call, and how many logits to keep."""
        n = min(self.max_tokens, self._n_ready(tokens, parents))
        wanted = min(n, max(0, n_logits - (len(tokens) - n)))
        n_rows = n if self.shared.returns_all else wanted
        if not wanted or n_rows <= (_MAX_REREAD if wanted < n_rows else self.max_logits):
            return n, wanted
        return (n - wanted, 0) if wanted < n else (self.max_logits, self.max_logits)

    # Changing the history

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the other nodes: see `LanguageModel.commit`."""
        _ = self.handle
        self._tree.check_path(path)
        nodes, outputs, n_before = self._tree.nodes, self._outputs, len(self._cached)
        try:
            self._tree.take(path, n_before)
            for node in path:
                position, token = len(self._cached), nodes[node].token
                if position == self._n_true and self._is_true(position, token):
                    self._n_true += 1
                if node in outputs:
                    self._own[position] = outputs[node]
                self._cached.append(token)
            if len(path) < len(nodes):
                self._cut(len(self._cached))
            self._tree.guard(n_before, len(self._cached))
        except BaseException:  # from a signal handler
            self.resync()
            raise
        self._forget(len(self._cached))
        start = self._n_true - 2  # one more than the next pair needs: the last one may be dropped
        self._received.forget(start)
        self._own = {position: output for position, output in self._own.items() if position >= start}

    def _is_true(self, position: int, token: int) -> bool:
        """Whether the pair at a position is that of the main model's history."""
        tokens = self._received.tokens
        is_next = position == len(tokens)  # its own state is not known, nor needed
        has_state = position == 0 or position - 1 in self._received
        return has_state and (is_next or tokens[position : position + 1] == [token])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and discard the tree: see `LanguageModel.truncate`."""
        _ = self.handle
        if not 0 <= length <= len(self._cached):
            raise InvalidRequest(f"cannot truncate {len(self._cached)} tokens to {length}")
        if length < len(self._cached) or self._tree:
            self._cut(length)
        self._follow(length)

    def _follow(self, length: int) -> None:
        """Note that the cache has been reduced to `length` tokens."""
        if length < self._n_true:
            self._n_true = length
            self._received.truncate(self._received.n_usable(length, self._received.tokens))

    def _cut(self, length: int) -> None:
        """Reduce the cache to `length` tokens, and drop the tree."""
        removed = done = False
        try:
            removed = self.shared.remove(self._sequence, length)
            self._tree.free()
            self._tree.guard(length, length)
            done = removed
        finally:
            if not done:
                self.resync()
        if not removed:
            raise BackendError("llama.cpp could not discard the last tokens: please report it")
        self._forget(length)

    def _forget(self, length: int) -> None:
        """Forget the tree, and the tokens from a position on."""
        self._tree.clear()
        self._outputs.clear()
        del self._cached[length:]
        self._own = {position: output for position, output in self._own.items() if position < length}

    def reuse(self, tokens: Sequence[int]) -> None:
        """Make the history a prefix of `tokens`, as long as `n_received` can be: see `LanguageModel.reuse`.

        Entries of another row are shared, not copied.
        """
        tokens = list(tokens)
        best = max(self.shared.rows, key=lambda row: (row.known(tokens), row is self))
        n_received, n_pairs = best.known(tokens)
        if best is not self:
            self._cut(0)
            # The first token has no pair: its entry, if there is one, is only a placeholder.
            if (start := int(self.shared.skips_first)) < n_pairs:
                self.shared.copy(best._sequence, self._sequence, start, n_pairs)
            self._tree.guard(0, n_pairs)
            self._cached, self._received = tokens[:n_pairs], best._received.copy()
        else:
            self._cut(n_pairs)
        self._n_true = n_pairs
        self._received.truncate(n_received)
        self._received.keep(len(tokens) - 1)  # for another answer to the same prompt

    def known(self, tokens: Sequence[int]) -> tuple[int, int]:
        """What `reuse` of this row would give: `n_received`, and the length of the history."""
        n_pairs = common_prefix(self._cached[: self._n_true], tokens)
        return self._received.n_usable(n_pairs, tokens), n_pairs

    def receive(self, start: int, tokens: Sequence[int], states: States) -> None:
        """Receive tokens of the main model's history: see `Head.receive`."""
        received = self._received
        tokens = list(tokens[: self.n_ctx - start])
        n_known = received.n_known(start, tokens)
        if n_known == len(tokens):  # a recurrent model has evaluated them again
            return
        n = start + n_known
        is_cached = self._cached[n : n + 1] == tokens[n_known : n_known + 1]
        self._n_true = min(self._n_true, n + is_cached)
        received.truncate(n)
        received.append(tokens[n_known:], states[n_known : len(tokens)], are_raw=self.shared.encodes)
        self._cut(self._n_true)  # the rest was evaluated with the head's own output

    def read_calls(self) -> Calls[None]:
        """Evaluate the tokens that were received: see `Head.read_calls`."""
        tokens = self._received.tokens
        if len(tokens) - len(self._cached) < min(_MAX_UNREAD, self.max_tokens):
            return
        while (start := len(self._cached)) < len(tokens):
            yield from self.evaluate_calls(tokens[start : start + self.max_tokens], 0)

    def resync(self) -> None:
        """Discard the tree, and what llama.cpp's cache lacks, after a failed or interrupted call."""
        length = min(len(self._cached), self.shared.length(self._sequence))
        self._tree.free(all_ids=True)
        self.shared.remove(self._sequence, length)
        self._tree.guard(0, length)
        self._forget(length)
        self._follow(length)
