"""Saving what the slots of a session have read in its prompt cache, between answers."""

import json
from collections.abc import Sequence

from spec_local.answers.assembly import Slot
from spec_local.llama.memory import free_memory
from spec_local.llama.row import LlamaRow
from spec_local.llama.state import conditions
from spec_local.prompt_cache.cache import PromptCache

_SHARE, _MOST = 4, 1 << 32
"""The cache in memory takes one part in four of what is free, and at most 4 GiB: more is read from disk."""

_CLOSE_S = 5.0  # that closing a session may take to write to disk: some gigabytes


def memory_budget() -> int:
    """Bytes of memory for a prompt cache, after the models have been loaded."""
    return min(free_memory() // _SHARE, _MOST)


class PromptSaver:
    """Fills the prompt cache of a session from its slots.

    Args:
        slots: of the session; their contexts look up prompts in the cache from now on.
        cache: shared by the main model and the draft model or head; None: nothing is saved.

    Attributes:
        is_done: whether everything has been saved that the cache has room for.
    """

    def __init__(self, slots: Sequence[Slot], cache: PromptCache | None) -> None:
        self._slots, self._cache = slots, cache
        self.is_done = True
        if not cache:
            return
        main, draft = slots[0].main, slots[0].draft
        if main.rollback != "none":
            _attach(main, cache, saves_all=True)
        if isinstance(draft, LlamaRow) and draft.rollback != "none":
            _attach(draft, cache, saves_all=False)

    def begin(self) -> None:
        """Note that an answer begins: until `end`, nothing is written to disk."""
        if self._cache:
            self._cache.set_busy(True)

    def end(self) -> None:
        """Note that no answer is running, and that caches have changed."""
        if self._cache:
            self._cache.set_busy(False)
            self.is_done = False

    def step(self) -> None:
        """Save a part of one of the rows, which takes some milliseconds: see `is_done`."""
        if not self._cache:
            return
        waits = self._cache.n_unwritten > 0  # for room in memory
        rows = [slot.main for slot in self._slots]
        rows += [s.draft for s in self._slots if isinstance(s.draft, LlamaRow) and not s.window.start]
        progress = [row.save(most=1) for row in rows]
        self.is_done = "some" not in progress and not ("none" in progress and waits)

    def finish(self) -> None:
        """Save all that there is room for."""
        while not self.is_done:
            self.step()

    def close(self) -> None:
        """Write to disk what has been saved."""
        if self._cache:
            self._cache.close(_CLOSE_S)


def _attach(row: LlamaRow, cache: PromptCache, *, saves_all: bool) -> None:
    saved = row.context.saved
    identity = json.dumps(conditions(row), sort_keys=True)
    saved.prompts = cache.prompts(identity, saved.block, row.model.path.name)
    saved.saves_all = saves_all
