"""One row of a llama.cpp context: the KV cache of one token sequence, extended by a tree of draft tokens.

The sequences of the tree are those of `spec_local.llama.branches`; the committed tokens are always in the
row's first one. Rows of recurrent and hybrid models roll back in another way:
`spec_local.llama.recurrent`.

llama.cpp aborts the process when it is called with wrong arguments, so all of them are checked here first.
Positions are not passed in: they follow from the tree.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call
from spec_local.core.language_model import RowMethods, States, common_prefix
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, ModelError
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.branches import Branches
from spec_local.llama.context import LlamaContext
from spec_local.llama.memory import check_free_memory
from spec_local.llama.native_context import NativeRow, check_parents
from spec_local.llama.native_object import Pointer
from spec_local.llama.saved import Progress
from spec_local.prompt_cache.entry import Match

_MIN_RESTORED = 16  # tokens: fewer are read as fast


class LlamaRow(NativeRow, RowMethods):
    """One row of a llama.cpp context: a `Row`. Created by `spec_local.llama.open`.

    Args:
        context: what the rows have in common; most attributes are documented there.
        index: number of this row.
    """

    context: LlamaContext

    def __init__(self, context: LlamaContext, index: int) -> None:
        super().__init__(context, index * context.max_branches)
        self.flash_attention, self.pad_to = context.flash_attention, context.pad_to
        self.max_logits = context.max_logits
        self.max_branches, self.rollback = context.max_branches, context.rollback
        guard = context.first_other + index if context.has_guard else None
        self._tree = Branches(context, self._sequence, context.max_branches, guard)
        self._batch_start = 0  # of the entries of the last call

    @property
    def _lib(self) -> Any:
        return self.context.lib

    @property
    def _memory(self) -> Pointer:
        return self.context.memory

    @property
    def max_rollback(self) -> int:
        """See `LanguageModel.max_rollback`."""
        return self.context.max_rollback

    def call(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> Call["LlamaRow"]:
        """Prepare a call: see `Row.call`."""
        self._check(tokens, parents, n_logits)
        return Call(self, tokens, parents, n_logits)

    def _check(self, tokens: Sequence[int], parents: Sequence[int], n_logits: int) -> None:
        self._check_open()
        n = len(tokens)
        if not 1 <= n <= self.max_tokens:
            raise InvalidRequest(f"{n} tokens in one call: give 1 to {self.max_tokens}")
        if not 0 <= n_logits <= min(n, self.max_logits):
            raise InvalidRequest(
                f"{n_logits} rows of logits for {n} tokens: give 0 to {min(n, self.max_logits)}"
            )
        self._check_vocabulary(tokens)
        self._check_room(len(self._cached) + len(self._tree) + n)
        check_parents(tokens, parents)
        n_branches = self._tree.count(parents)
        if n_branches > self.max_branches:
            if self.model.is_recurrent:
                raise ModelError("a recurrent model cannot evaluate a tree: draft chains (`shape=chain`)")
            raise InvalidRequest(f"a tree with {n_branches} branches: give at most {self.max_branches}")

    def fill_batch(self, batch: Batch, start: int, call: Call[Any], n_logits: int) -> None:
        """Add new nodes to the tree, and fork sequences where they branch off: see `BatchRow.fill_batch`."""
        self._batch_start = start
        self._tree.add(batch, start, call, n_logits, len(self._cached))

    def states(self, nodes: Sequence[int]) -> States:
        """Hidden states of tokens of the last call: see `Row.states`."""
        return self.context.states([self._batch_start + node for node in nodes])

    def on_evaluated(self, n: int) -> None:
        """See `BatchRow.on_evaluated`."""

    def commit(self, path: Sequence[int]) -> None:
        """Commit a path of the tree and discard the rest: see `LanguageModel.commit`."""
        self._check_open()
        if not path and not self._tree:
            return
        self._tree.check_path(path)
        if (self.pad_to or 1) > 1 and (n_first := _n_first(path)) < len(path):
            # Later tokens would fill the cells of rejected nodes between those of the path, and llama.cpp's
            # attention adds up in the order of the cells (specdec's does not depend on it, and needs no
            # padding). The nodes after the first gap are evaluated again.
            tokens = [self._tree.nodes[node].token for node in path[n_first:]]
            self.commit(path[:n_first])
            self.evaluate(tokens, 0)
            return
        self._commit(path)

    def _commit(self, path: Sequence[int]) -> None:
        """`commit` of a path that has been checked."""
        nodes, start = self._tree.nodes, len(self._cached)
        try:
            self._tree.take(path, start)
            self._cached.extend(nodes[node].token for node in path)
            if len(path) < len(nodes):
                self._cut(len(self._cached))
            self._tree.guard(start, len(self._cached))
        except BaseException:  # from a signal handler
            self.resync()
            raise
        self._tree.clear()

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens, and discard the tree: see `LanguageModel.truncate`."""
        self._check_open()
        self._check_length(length)
        self._forget_text(length)
        self._keep(length)

    def _keep(self, length: int) -> None:
        """Reduce the history to `length` tokens, and discard the tree."""
        if length < len(self._cached) or self._tree:
            self._cut(length)

    def checkpoint(self) -> bool:
        """See `LanguageModel.checkpoint`: no checkpoints are needed, or possible."""
        self._check_open()
        return self.rollback == "any"

    def reuse(self, tokens: Sequence[int]) -> None:
        """Make the history a prefix of `tokens`, the longest that is known: see `LanguageModel.reuse`.

        Cells of another row are shared, not copied.
        """
        self._check_open()
        own = common_prefix(self._cached, tokens)
        if self.rollback == "none":
            self.truncate(own if own == len(self._cached) else 0)
            return
        if own < len(self._cached) and self.context.saved.saves_all:
            self.save()
        found = self.context.saved.find(tokens)
        self._take_cells(tokens, found, len(tokens))

    def _take_cells(self, tokens: Sequence[int], found: Match, most: int) -> None:
        """Make the history the longest known prefix of `tokens`, of up to `most` of them.

        Args:
            found: what the prompt cache has of them.
        """
        best: LlamaRow = max(self._rows(), key=lambda row: (common_prefix(row._cached, tokens), row is self))
        n = min(most, common_prefix(best._cached, tokens))
        use_saved = min(most, found.n_cells) - n >= _MIN_RESTORED
        if use_saved:
            n -= n % self.context.saved.block
        if best is self:
            self._shorten(n)
        else:
            self._copy(best._sequence, tokens[:n])
        if use_saved:
            self._restore_cells(tokens, found, most)

    def _restore_cells(self, tokens: Sequence[int], found: Match, most: int) -> None:
        """Append cells of the prompt cache to the history, as far as there are any, up to `most` tokens."""
        for cells in found.cells:
            start, end = cells.start, min(most, cells.start + cells.n)
            if start < len(self._cached) or end <= start:
                continue
            if start > len(self._cached) or not self.context.saved.put_cells(cells, self._sequence, end):
                return  # the file has gone: the rest is evaluated
            done = False
            try:
                self._tree.guard(start, end)
                self._cached.extend(tokens[start:end])
                self.expect(tokens[start:end])
                done = True
            finally:
                if not done:  # interrupted by a signal handler
                    self.resync()

    def save(self, most: int | None = None) -> Progress:
        """Copy what the prompt cache lacks of the history into it: see `SavedParts.save`."""
        self._check_open()
        if not self._cached or self._tree:
            return "all"
        return self.context.saved.save(self._cached, self._sequence, most)

    def _shorten(self, length: int) -> None:
        """Keep the cells of the first `length` tokens, and discard the tree."""
        self.truncate(length)

    def _rows(self) -> Sequence[Self]:
        return [row for row in self.context.rows if isinstance(row, type(self))]

    def _copy(self, sequence: int, tokens: Sequence[int]) -> None:
        """Replace the history with the first tokens of a sequence of another row; their cells are shared."""
        self.truncate(0)
        try:
            self.context.copy(sequence, self._sequence, 0, len(tokens))
            self._tree.guard(0, len(tokens))
            self._cached.extend(tokens)
        finally:
            if len(self._cached) < len(tokens):  # interrupted by a signal handler
                self.resync()

    def state_size(self) -> int:
        """Return the size of `state` in bytes."""
        with self._only_committed():
            return int(self._lib.llama_state_get_size(self.handle))

    def state(self) -> NDArray[np.uint8]:
        """Return a copy of the cached state of the committed tokens; the tree is discarded.

        The other rows must be empty.

        Returns:
            uint8 (n,), in llama.cpp's format. It is the state of the whole context: the state of a single
            sequence lacks the tokens outside a sliding window, to which the cache may be rolled back.

        Raises:
            ContextOverflow: there is no memory for the copy.
            BackendError: llama.cpp could not write the state.
        """
        with self._only_committed():
            n = int(self._lib.llama_state_get_size(self.handle))
            check_free_memory(n, "to save the state")
            state = np.empty(n, np.uint8)
            runtime.clear_log()
            if self._lib.llama_state_get_data(self.handle, _bytes(state), n) != n:
                raise BackendError(
                    f"llama.cpp could not save its state ({runtime.failure_reason()}): continue without it"
                )
        return state

    def restore(self, tokens: Sequence[int], state: NDArray[np.uint8]) -> None:
        """Replace the cache with a state saved from a context with the same model and settings.

        Args:
            tokens: the tokens that were committed when the state was saved.
            state: uint8 (n,), the unmodified result of `state`. llama.cpp does not validate it.

        Raises:
            ContextOverflow: there are more tokens than `n_ctx`; nothing has changed.
            BackendError: llama.cpp rejected the state; the context is empty.
        """
        self._check_open()
        if len(tokens) > self.n_ctx:
            raise ContextOverflow(f"{len(tokens)} tokens do not fit into a context of {self.n_ctx}")
        self._tree.clear()
        self._cached.clear()
        done = False
        try:
            runtime.clear_log()
            n = self._lib.llama_state_set_data(self.handle, _bytes(state), len(state))
            end = self._lib.llama_memory_seq_pos_max(self._memory, self._sequence) + 1
            if n != len(state) or end != len(tokens):
                raise BackendError(
                    f"llama.cpp rejected a saved state ({runtime.failure_reason()}): continue without it"
                )
            self._tree.guard(0, end)
            self._cached.extend(tokens)
            done = True
        finally:
            if not done:
                self._lib.llama_memory_clear(self._memory, True)

    @contextlib.contextmanager
    def _only_committed(self) -> Iterator[None]:
        """Keep only sequence 0 in the cache within the block: its state does not depend on `max_branches`."""
        self.truncate(len(self._cached))
        try:
            self._tree.guard(0, 0)
            yield
        finally:
            self._tree.guard(0, len(self._cached))

    def _cut(self, length: int) -> None:
        """Reduce the cache to `length` tokens, and discard the tree."""
        self._check_rollback(length)
        try:
            self._tree.cut(length)
        except BaseException:  # llama.cpp failed, or a signal handler interrupts it
            self.resync()
            raise
        del self._cached[length:]
        self._tree.clear()

    def _check_rollback(self, length: int) -> None:
        """Check that the row can go back to its first `length` tokens.

        If it cannot, llama.cpp may still say so, having overwritten their cells.
        """
        if length and self.rollback == "none":
            raise ModelError("rows with a cache each cannot roll back: clear the row")

    def resync(self, *, unchanged: bool = False) -> None:
        """See `BatchRow.resync`."""
        del self._cached[self.context.length(self._sequence) :]
        self._tree.resync(len(self._cached))


def _n_first(path: Sequence[int]) -> int:
    """Return how many nodes of a path are the first ones of the tree, in order."""
    return next((i for i, node in enumerate(path) if node != i), len(path))


def _bytes(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
