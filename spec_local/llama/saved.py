"""Copies of parts of a context's cache in main memory, from which a sequence can be filled again.

llama.cpp writes the state of a sequence: its cells, and the state of recurrent layers after its last token.
The spare sequence of a context, which is empty between calls, holds the part that is copied: sequences share
cells, so that this moves no data.

llama.cpp does not validate what it reads: only data that `cells` and `state` returned for a context with the
same model and settings may be given back.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spec_local.core.span import whole
from spec_local.errors import BackendError, ContextOverflow
from spec_local.llama import runtime
from spec_local.llama.memory import check_free_memory
from spec_local.llama.model import Model
from spec_local.llama.native_context import NativeContext
from spec_local.prompt_cache.entry import FoundCells, FoundState, Match
from spec_local.prompt_cache.placement import superfluous
from spec_local.prompt_cache.prompts import Prompts

Saved = NDArray[np.uint8]
"""In llama.cpp's format, uint8 (n,)."""
Progress = Literal["all", "some", "none"]
"""What has been saved: everything; a part, and the rest can be; nothing, as there is no room."""

BLOCK = 256
"""Tokens whose cells are copied at once: some megabytes."""

_WHOLE, _RECURRENT = 0, 1  # LLAMA_STATE_SEQ_FLAGS_NONE and _PARTIAL_ONLY
_HEAD = 8  # bytes before both kinds: a magic number, and the sequence id


_OTHER_CACHES = (
    *("deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp"),
)
"""Architectures with caches of other kinds, of which it is not known whether parts can be copied."""


def can_be_saved(model: Model) -> bool:
    """Return whether parts of the model's cache can be copied.

    Of a hybrid model with a sliding window, llama.cpp reuses the cells that a kept state would need.
    """
    return model.architecture not in _OTHER_CACHES and not (model.is_recurrent and model.has_window)


class SavedParts:
    """Copies parts of the sequences of a context into a prompt cache, and puts them back.

    Args:
        context: the context.
        spare: id of a sequence that is empty between calls.
        has_states: whether there are recurrent layers.

    Attributes:
        prompts: the part of the prompt cache for this context; None: nothing is copied.
        saves_all: whether sequences also copy what they are about to lose, and not only between answers.
        block: number of tokens whose cells are copied at once.
        has_cells: whether tokens have cells: not in models with recurrent layers only.
    """

    def __init__(self, context: NativeContext, spare: int, *, has_states: bool) -> None:
        self._context, self._spare = context, spare
        self.prompts: Prompts | None = None
        self.saves_all = False
        model = context.model
        # llama.cpp leaves out the tokens that are outside the window of the last one of a block.
        self.block = min(BLOCK, context.lib.llama_model_n_swa(model.handle) or BLOCK)
        self._has_states = has_states
        self._no_state: Saved | None = None  # what follows the cells of a sequence without a state
        self.has_cells = model.is_hybrid or not has_states

    def find(self, tokens: Sequence[int]) -> Match:
        """Return what the prompt cache has of a text."""
        return self.prompts.find(tokens) if self.prompts else Match((), ())

    def save(
        self,
        tokens: Sequence[int],
        seq_id: int,
        most: int | None = None,
        position: Callable[[int], int] = int,
    ) -> Progress:
        """Copy the cells of a sequence that the prompt cache lacks.

        A span that begins in one block and ends in another is in the latter.

        Args:
            tokens: of the sequence.
            most: number of blocks to copy; None: all of them.
            position: of each token, by its number.
        """
        if not self.prompts or not self.has_cells:
            return "all"
        lacking = self.prompts.lacking(tokens)
        for start, end in lacking[:most]:
            try:
                first, next_ = (position(whole(tokens, n)) for n in (start, end))
                data = self._cells(seq_id, first, next_)
            except (BackendError, ContextOverflow):  # it is only a cache
                return "none"
            if not self.prompts.add_cells(tokens[:end], start, data):
                return "none"
        return "all" if most is None or len(lacking) <= most else "some"

    def save_state(self, tokens: Sequence[int], seq_id: int) -> Progress:
        """Copy the recurrent state after the tokens of a sequence, if the prompt cache lacks it."""
        if not self.prompts or self.prompts.has_state(tokens):
            return "all"
        try:
            data = self._get(seq_id, _RECURRENT)
        except (BackendError, ContextOverflow):
            return "none"
        if not self.prompts.add_state(tokens, data):
            return "none"
        states = {found.length: found for found in self.prompts.find(tokens).states}
        for length in superfluous(list(states)):
            self.prompts.drop(states[length].entry)
        return "all"

    def put_cells(
        self, found: FoundCells, seq_id: int, end: int, position: Callable[[int], int] = int
    ) -> bool:
        """Append cells to a sequence, up to token `end` − 1; one of a recurrent model loses its state.

        Args:
            position: of each token, by its number; whole spans only.

        Returns:
            False: they are no longer there; the sequence is unchanged, but for the state.
        """
        data = self.prompts.read(found.entry) if self.prompts else None
        if data is None:
            return False
        context = self._context
        if self._has_states:
            if self._no_state is None:
                self._no_state = self._get(self._spare, _RECURRENT)[_HEAD:]  # some bytes
            data = np.concatenate([data, self._no_state])
        try:
            if done := self._set(data, self._spare, _WHOLE):
                context.copy(self._spare, seq_id, position(found.start), position(end))
            return done
        finally:
            context.remove(self._spare, 0)

    def put_state(self, found: FoundState, seq_id: int) -> bool:
        """Replace the state of the recurrent layers; False: it is no longer there."""
        data = self.prompts.read(found.entry) if self.prompts else None
        return data is not None and self._set(data, seq_id, _RECURRENT)

    def drop_state(self, seq_id: int) -> None:
        """Drop the state of the recurrent layers, so that the last cells can be removed."""
        self._context.copy(self._spare, seq_id, -1, -1)  # of a sequence that has neither cells nor state

    def _cells(self, seq_id: int, start: int, end: int) -> Saved:
        context = self._context
        try:
            context.copy(seq_id, self._spare, start, end)
            found = self._get(self._spare, _WHOLE)
            # The state of recurrent layers follows: that after the last token of the sequence.
            if not self._has_states:
                return found
            return found[: len(found) - self._size(self._spare, _RECURRENT) + _HEAD].copy()
        finally:
            context.remove(self._spare, 0)

    def _size(self, seq_id: int, part: int) -> int:
        context = self._context
        return int(context.lib.llama_state_seq_get_size_ext(context.handle, seq_id, part))

    def _get(self, seq_id: int, part: int) -> Saved:
        context, n = self._context, self._size(seq_id, part)
        check_free_memory(n, "to keep a part of the cache")
        data = np.empty(n, np.uint8)
        runtime.clear_log()
        copied = context.lib.llama_state_seq_get_data_ext(context.handle, _bytes(data), n, seq_id, part)
        if copied != n:
            raise BackendError(f"llama.cpp could not copy a part of its cache ({runtime.failure_reason()})")
        return data

    def _set(self, data: Saved, seq_id: int, part: int) -> bool:
        context = self._context
        n = context.lib.llama_state_seq_set_data_ext(context.handle, _bytes(data), len(data), seq_id, part)
        return int(n) == len(data)


def _bytes(array: Saved) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
