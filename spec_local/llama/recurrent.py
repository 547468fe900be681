"""A row of a recurrent or hybrid model, some of whose layers have one state for the whole history.

Such a state has no positions, so that the last tokens cannot simply be removed: see
`spec_local.core.kept_states`. The tree is a chain in the row's first sequence. A checkpoint is a sequence of
its own, which shares the state with the original until one of the two changes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call
from spec_local.core.kept_states import KINDS, KeptStates, Kind
from spec_local.core.language_model import common_prefix
from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama.batch import Batch
from spec_local.llama.context import LlamaContext
from spec_local.llama.row import LlamaRow


class RecurrentRow(LlamaRow):
    """A row of a recurrent or hybrid model: see `LlamaRow`."""

    def __init__(self, context: LlamaContext, index: int) -> None:
        super().__init__(context, index)
        self._states = KeptStates(context.max_rollback)
        kinds = () if self.rollback == "none" else KINDS
        first = context.first_other + len(kinds) * index
        self._checkpoints = {kind: first + i for i, kind in enumerate(kinds)}

    def fill_batch(self, batch: Batch, start: int, call: Call[Any], n_logits: int) -> None:
        """See `LlamaRow.fill_batch`."""
        self._states.on_call()
        super().fill_batch(batch, start, call, n_logits)

    def on_evaluated(self, n: int) -> None:
        """See `LlamaRow.on_evaluated`."""
        self._states.on_evaluated(n)

    def _commit(self, path: Sequence[int]) -> None:
        self._keep(len(self._cached) + len(path))

    def checkpoint(self, *, lasting: bool = False) -> bool:
        """Keep the state of the history: see `LanguageModel.checkpoint`."""
        self._check_open()
        if self.rollback == "none":
            return False
        if self._tree:
            raise InvalidRequest("a tree has no checkpoint: commit it first")
        if self._states.has_rolled_back:
            return False
        kind: Kind = "lasting" if lasting else "usual"
        if self._states.lacks(len(self._cached), kind):
            self._states.checkpoints.pop(kind, None)  # gone if a signal handler interrupts the copy
            self._states.on_copied()
            self._replace(self._checkpoints[kind], self._sequence)
            self._states.checkpoints[kind] = len(self._cached)
        return True

    def _keep(self, length: int) -> None:
        """Reduce history and tree to `length` tokens, or to fewer: see `Rollback`.

        Raises:
            ModelError: the model cannot roll back, and `length` is neither 0 nor that of both.
        """
        self._cached.extend(node.token for node in self._tree.nodes)  # the tree is a chain
        self._tree.clear()
        n = len(self._cached) - length
        if not n:
            return
        self._check_rollback(length)
        done = False
        try:
            if length and self._states.can_remove(n):
                self._remove_last(n)
            else:
                length = self._restore(length)
            done = True
        finally:
            if not done:  # interrupted by a signal handler
                self.resync()
        del self._cached[length:]

    def _remove_last(self, n: int) -> None:
        """Remove the last n tokens by a kept state.

        llama.cpp removes more than can be removed, or twice, without an error, and leaves a wrong state: this
        is refused here.

        Raises:
            InvalidRequest: see `KeptStates.can_remove`.
        """
        if not self._states.can_remove(n):
            raise InvalidRequest(f"cannot remove the last {n} tokens: the state before them is not kept")
        length = len(self._cached) - n
        if not self.context.remove(self._sequence, length):
            raise BackendError("llama.cpp could not discard the last tokens: please report it")
        self._states.on_removed(length)
        self._free_checkpoints()

    def _restore(self, length: int) -> int:
        """Return to the longest checkpoint of up to `length` tokens; returns their number, 0 without one."""
        kind = self._states.nearest(length)
        self._states.on_replaced()
        self._free_checkpoints()
        if kind is None:
            self.context.remove(self._sequence, 0)
            return 0
        self._replace(self._sequence, self._checkpoints[kind])
        return self._states.checkpoints[kind]

    def _replace(self, sequence: int, source: int) -> None:
        """Make a sequence share all cells of another one."""
        self.context.remove(sequence, 0)
        self.context.copy(source, sequence, -1, -1)

    def _free_checkpoints(self) -> None:
        """Free the cells of checkpoints that have been forgotten."""
        for kind, sequence in self._checkpoints.items():
            if kind not in self._states.checkpoints:
                self.context.remove(sequence, 0)

    def reuse(self, tokens: Sequence[int]) -> None:
        """See `LanguageModel.reuse`: only whole states can be copied."""
        if self.rollback == "none":
            super().reuse(tokens)
            return
        own = kept = common_prefix(self._cached, tokens)
        if own < len(self._cached) and not self._states.can_remove(len(self._cached) - own):
            kept = max((n for n in self._states.checkpoints.values() if n <= own), default=0)
        others = [
            (n, sequence, row)
            for row in self._rows()
            for n, sequence in row._copyable()
            if n > kept and row is not self and n <= common_prefix(row._cached, tokens)
        ]
        if not others:
            self.truncate(own)
            return
        n, sequence, row = max(others, key=lambda each: each[0])
        row._states.on_copied()
        self._copy(sequence, tokens[:n])

    def _copyable(self) -> Iterator[tuple[int, int]]:
        """The states that can be copied: number of tokens, and sequence id."""
        if not self._tree and not self._states.has_rolled_back:
            yield len(self._cached), self._sequence
        for kind, n in self._states.checkpoints.items():
            yield n, self._checkpoints[kind]

    def _rows(self) -> Iterator["RecurrentRow"]:
        return (row for row in self.context.rows if isinstance(row, RecurrentRow))

    def _copy(self, sequence: int, tokens: Sequence[int]) -> None:
        super()._copy(sequence, tokens)
        self._states.on_replaced()

    def restore(self, tokens: Sequence[int], state: NDArray[np.uint8]) -> None:
        """See `LlamaRow.restore`."""
        if len(tokens) <= self.n_ctx:
            self.truncate(0)
        super().restore(tokens, state)

    @contextlib.contextmanager
    def _only_committed(self) -> Iterator[None]:
        """See `LlamaRow._only_committed`; checkpoints are freed."""
        self.truncate(len(self._cached))
        self._states.checkpoints.clear()
        self._free_checkpoints()
        with super()._only_committed():
            yield

    def resync(self, *, unchanged: bool = False) -> None:
        """See `LlamaRow.resync`: goes back to a checkpoint, as the state may include tokens of the call."""
        self._tree.clear()
        length = self.context.length(self._sequence)
        if not unchanged or length != len(self._cached):
            del self._cached[self._restore(len(self._cached)) :]
