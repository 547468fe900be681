"""The tree of draft tokens that extends a row's history, and the llama.cpp sequences of its branches.

In llama.cpp, a token attends to a cache cell if both share a sequence id and the cell's position is not
later. Each branch of the tree is therefore a sequence: it is forked from its parent's sequence without
copying data, and a token with several children belongs to the sequences of all of them. The history is always
in the row's first sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_local.core.calls import Call
from spec_local.core.proposal import check_path
from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama.batch import Batch
from spec_local.llama.native_context import NativeContext


@dataclass(frozen=True, slots=True)
class Node:
    """A token of the tree; `sequence` is one that contains it and all its ancestors."""

    token: int
    parent: int
    position: int
    sequence: int


class Branches:
    """The tree of one row.

    Args:
        context: the cells of its cache belong to the sequences.
        first: the row's first sequence id, that of its history. Those of its branches follow.
        limit: maximum number of branches, the first sequence included.
        guard: id of a sequence that contains only the history, for models with a sliding window; None: there
            is no window. Without it, llama.cpp would reuse cells that have left the window, even for draft
            tokens that are then rejected.

    Attributes:
        nodes: in the order in which they were added.
    """

    def __init__(self, context: NativeContext, first: int, limit: int, guard: int | None = None) -> None:
        self.nodes: list[Node] = []
        self._guard = guard
        self._context, self._first, self._limit = context, first, limit
        self._ends = {first: -1}  # the last node of each sequence in use; -1: no node

    def __len__(self) -> int:
        return len(self.nodes)

    def count(self, parents: Sequence[int]) -> int:
        """Number of branches after nodes with these parents have been added.

        Raises:
            InvalidRequest: a parent does not exist.
        """
        ends, n_branches = set(self._ends.values()), len(self._ends)
        for node, parent in enumerate(parents, len(self.nodes)):
            if not -1 <= parent < node:
                raise InvalidRequest(f"node {node} has parent {parent}: give -1 to {node - 1}")
            if parent in ends:
                ends.remove(parent)
            else:
                n_branches += 1
            ends.add(node)
        return n_branches

    def add(self, batch: Batch, start: int, call: Call[Any], n_logits: int, n_history: int) -> None:
        """Add a call's nodes to the tree and to a batch, and fork sequences where they branch off.

        Args:
            start: number of entries that the batch already has.
            n_logits: number of the last nodes whose logits are computed.
            n_history: number of tokens before the tree.
        """
        n_before, first_wanted = len(self.nodes), len(call.tokens) - n_logits
        for i, (token, parent) in enumerate(zip(call.tokens, call.parents, strict=True)):
            position, sequence = n_history, self._first
            if parent >= 0:
                position, sequence = self.nodes[parent].position + 1, self.nodes[parent].sequence
            if self._ends[sequence] != parent:
                sequence = self._fork(batch, start, parent, n_before, n_history)
            self._ends[sequence] = n_before + i
            self.nodes.append(Node(token, parent, position, sequence))
            batch.put(start + i, token, position, sequence, i >= first_wanted)

    def add_unevaluated(self, token: int) -> None:
        """Add the first token of an empty history without an entry in a batch: it gets no cell."""
        self._ends[self._first] = len(self.nodes)
        self.nodes.append(Node(token, -1, 0, self._first))

    def _fork(self, batch: Batch, start: int, node: int, n_before: int, n_history: int) -> int:
        """Create a sequence that ends with `node`; nodes from `n_before` on are not evaluated yet."""
        sequence = self._first + len(self._ends)
        while node >= n_before:
            batch.add_sequence(start + node - n_before, sequence)
            node = self.nodes[node].parent
        source, length = self._first, n_history
        if node >= 0:
            source, length = self.nodes[node].sequence, self.nodes[node].position + 1
        if length:
            self._context.copy(source, sequence, 0, length)
        return sequence

    def check_path(self, path: Sequence[int]) -> None:
        """Raise InvalidRequest if nodes are not a path from the root."""
        check_path(path, [node.parent for node in self.nodes])

    def take(self, path: Sequence[int], n_history: int) -> None:
        """Put the cells of a path into the first sequence, in place of other nodes."""
        source = self.nodes[path[-1]].sequence if path else self._first
        if source != self._first:
            self._context.remove(self._first, n_history)
            self._context.copy(source, self._first, n_history, n_history + len(path))
            self._ends[self._first] = path[-1]

    def cut(self, length: int) -> None:
        """Free all cells but those of the first `length` tokens of the first sequence.

        Raises:
            BackendError: llama.cpp could not do so.
        """
        if not self._context.remove(self._first, length):
            raise BackendError("llama.cpp could not discard the last tokens: please report it")
        self.free()
        self.guard(length, length)

    def resync(self, length: int) -> None:
        """Free what may have been left by an interruption, keep `length` tokens, and forget all nodes."""
        self.free(all_ids=True)
        self._context.remove(self._first, length)
        self.guard(0, length)
        self.clear()

    def free(self, *, all_ids: bool = False) -> None:
        """Free the cells of all sequences but the first.

        Args:
            all_ids: also those of sequences that should be empty, after an interruption.
        """
        for sequence in range(1, self._limit if all_ids else len(self._ends)):
            self._context.remove(self._first + sequence, 0)

    def guard(self, start: int, end: int) -> None:
        """Extend the guard sequence from the tokens before `start` to those before `end`."""
        if self._guard is None:
            return
        self._context.remove(self._guard, start)
        if start < end:
            self._context.copy(self._first, self._guard, start, end)

    def clear(self) -> None:
        """Forget all nodes; the cells must have been freed."""
        self.nodes.clear()
        self._ends = {self._first: -1}
