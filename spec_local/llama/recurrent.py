"""A sequence of a recurrent or hybrid model, some of whose layers have one state for the whole history.

Such a state has no positions, so that the last tokens cannot simply be removed: see
`spec_local.llama.rollback`. The tree is a chain in the first of llama.cpp's ids. A checkpoint is an id of
its own, which shares the state with the original until one of the two changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from spec_local.core.calls import Call
from spec_local.core.sequence import States, common_prefix
from spec_local.core.span import Span, whole
from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama.context import LlamaContext
from spec_local.llama.native_context import Batch
from spec_local.llama.rollback import KeptStates
from spec_local.llama.saved import Progress
from spec_local.llama.sequence import LlamaSequence
from spec_local.prompt_cache import placement
from spec_local.prompt_cache.entry import FoundState, Match


class RecurrentSequence(LlamaSequence):
    """A sequence of a recurrent or hybrid model: see `LlamaSequence`."""

    def __init__(self, context: LlamaContext, index: int) -> None:
        super().__init__(context, index)
        self._states = KeptStates(context.limits.max_rollback)
        self._checkpoint = context.first_other + index
        self._parting = 0  # number of tokens of the text that are known, in this sequence or elsewhere

    def fill_batch(self, batch: Batch, start: int, call: Call[Any], n_logits: int) -> None:
        """See `LlamaSequence.fill_batch`."""
        self._states.on_call()
        super().fill_batch(batch, start, call, n_logits)

    def begin_span(self, call: Call[Any]) -> tuple[Span, int, int]:
        """See `LlamaSequence.begin_span`."""
        self._states.on_call()
        return super().begin_span(call)

    def on_span(self, n_last: int, states: States | None) -> None:
        """See `LlamaSequence.on_span`."""
        self._states.on_evaluated(n_last)
        super().on_span(n_last, states)

    def on_evaluated(self, n: int) -> None:
        """Note that llama.cpp has evaluated a call with n tokens of this sequence."""
        self._states.on_evaluated(n)

    def _check_positions(self, parents: Sequence[int], positions: Sequence[int]) -> None:
        raise InvalidRequest("a recurrent model numbers its tokens itself: give no positions")

    def _commit(self, path: Sequence[int]) -> None:
        self._keep(len(self.cached) + len(path))

    def checkpoint(self) -> bool:
        """Keep the state of the history: see `ModelSequence.checkpoint`."""
        self._check_open()
        if self.limits.rollback == "none":
            return False
        if self._tree.tokens:
            raise InvalidRequest("a tree has no checkpoint: commit it first")
        if self._states.has_rolled_back:
            return False
        if self._states.lacks(len(self.cached)):
            self._states.checkpoint = None  # gone if a signal handler interrupts the copy
            self._states.on_copied()
            self._replace(self._checkpoint, self._seq_id)
            self._states.checkpoint = len(self.cached)
        return True

    def stops(self, tokens: Sequence[int]) -> Sequence[int]:
        """See `ModelSequence.stops`: where messages begin, and where other texts have parted."""
        if self.limits.rollback == "none" or not self.context.saved.prompts:
            return ()
        is_control = self.model.vocabulary.is_control
        control = {token for token in set(tokens) if token >= 0 and is_control(token)}
        boundaries = (i for i, token in enumerate(tokens) if token in control)
        stops = placement.stops(len(self.cached), boundaries, self._parting, len(tokens))
        return sorted({n for stop in stops if (n := whole(tokens, stop)) > len(self.cached)})

    def keep(self) -> None:
        """See `ModelSequence.keep`: in the prompt cache."""
        self._check_open()
        if self.limits.rollback != "none":
            self.context.saved.save_state(self.cached, self._seq_id)

    def save(self, most: int | None = None) -> Progress:
        """See `LlamaSequence.save`; also the state after the history."""
        progress = super().save(most)
        if progress != "all" or not self.cached or self._tree.tokens:
            return progress
        return self.context.saved.save_state(self.cached, self._seq_id)

    def _keep(self, length: int) -> None:
        """Reduce history and tree to `length` tokens, or to fewer: see `Rollback`.

        Raises:
            ModelError: the model cannot roll back, and `length` is neither 0 nor that of both.
        """
        self._add_spans(self._tree.tokens, len(self.cached))
        self.cached += self._tree.tokens  # the tree is a chain
        self._tree.clear()
        n = len(self.cached) - length
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
        self._drop(length)

    def _remove_last(self, n: int) -> None:
        """Remove the last n tokens by a kept state.

        llama.cpp removes more than can be removed, or twice, without an error, and leaves a wrong state: this
        is refused here.

        Raises:
            InvalidRequest: see `KeptStates.can_remove`.
        """
        if not self._states.can_remove(n):
            raise InvalidRequest(f"cannot remove the last {n} tokens: the state before them is not kept")
        length = len(self.cached) - n
        if not self.context.remove(self._seq_id, self._at(length)):
            raise BackendError("llama.cpp could not discard the last tokens: please report it")
        self._states.on_removed(length)
        self._free_checkpoint()

    def _restore(self, length: int) -> int:
        """Return to the checkpoint, if it has up to `length` tokens; returns their number, 0 without one."""
        n = self._states.nearest(length)
        self._states.on_replaced()
        self._free_checkpoint()
        if n:
            self._replace(self._seq_id, self._checkpoint)
        else:
            self.context.remove(self._seq_id, 0)
        return n

    def _replace(self, seq_id: int, source: int) -> None:
        """Make a sequence share all cells of another one."""
        self.context.remove(seq_id, 0)
        self.context.copy(source, seq_id, -1, -1)

    def _free_checkpoint(self) -> None:
        """Free the cells of a checkpoint that has been forgotten."""
        if self._states.checkpoint is None and self.limits.rollback != "none":
            self.context.remove(self._checkpoint, 0)

    def _reuse(self, tokens: Sequence[int]) -> None:
        """See `ModelSequence.reuse`: only whole states can be copied."""
        if self.limits.rollback == "none":
            super()._reuse(tokens)
            return
        saved, own = self.context.saved, common_prefix(self.cached, tokens)
        if own < len(self.cached) and saved.saves_all:
            self.save()
        found, known = saved.find(tokens), max(common_prefix(each.cached, tokens) for each in self._all())
        self._parting = max(known, found.n_cells)
        kept = own
        if own < len(self.cached) and not self._states.can_remove(len(self.cached) - own):
            checkpoint = self._states.checkpoint or 0
            kept = checkpoint if checkpoint <= own else 0
        others = [
            (n, seq_id, each)
            for each in self._all()
            for n, seq_id in each._copyable()
            if n > kept and each is not self and n <= common_prefix(each.cached, tokens)
        ]
        n, seq_id, source = max(others, key=lambda each: each[0], default=(0, 0, self))
        for state in reversed(found.states):
            if state.length <= max(kept, n):
                break
            if (state.length <= self._parting or not saved.has_cells) and self._take(tokens, found, state):
                return
        if n > kept:
            source._states.on_copied()
            self._copy(seq_id, tokens[:n])
        else:
            self.truncate(common_prefix(self.cached, tokens))

    def _take(self, tokens: Sequence[int], found: Match, state: FoundState) -> bool:
        """Make the history that of a saved state; False: it, or a cell that it needs, has gone."""
        done = False
        try:
            if self.context.saved.has_cells:
                self._take_cells(tokens, found, state.length, least=1)
            else:
                self._shorten(0)
                self.cached += tokens[: state.length]
            done = len(self.cached) == state.length and self.context.saved.put_state(state, self._seq_id)
        finally:
            if not done:
                self._shorten(0)
        return done

    def _shorten(self, length: int) -> None:
        """See `LlamaSequence._shorten`; the state is lost."""
        self._tree.clear()
        self._states.nearest(length)
        self._states.on_replaced()
        self._free_checkpoint()
        self.context.saved.drop_state(self._seq_id)
        self.context.remove(self._seq_id, self._at(length))
        self._drop(length)

    def _copyable(self) -> Iterator[tuple[int, int]]:
        """The states that can be copied: number of tokens, and sequence id."""
        if not self._tree.tokens and not self._states.has_rolled_back:
            yield len(self.cached), self._seq_id
        if self._states.checkpoint:
            yield self._states.checkpoint, self._checkpoint

    def _copy(self, seq_id: int, tokens: Sequence[int]) -> None:
        super()._copy(seq_id, tokens)
        self._states.on_replaced()

    def resync(self, *, unchanged: bool = False) -> None:
        """See `LlamaSequence.resync`: goes back to a checkpoint; the state may include tokens of the call."""
        self._tree.clear()
        length = self._n_before(self.context.length(self._seq_id))
        if not unchanged or length != len(self.cached):
            self._drop(self._restore(len(self.cached)))
