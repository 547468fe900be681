"""Saving what the slots of a session have read in its prompt cache, between answers."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from spec_local import kernels
from spec_local.answers.assembly import Slot
from spec_local.errors import InvalidRequest
from spec_local.llama.heads.base import CachingSequence, HeadSequence
from spec_local.llama.heads.chained import ChainedSequence
from spec_local.llama.identity import content_key
from spec_local.llama.memory import free_memory
from spec_local.llama.saved import SavedParts, can_be_saved
from spec_local.llama.sequence import LlamaSequence
from spec_local.prompt_cache.cache import PromptCache
from spec_local.system import machine

_SHARE, _MOST = 4, 1 << 32
"""The cache in memory takes one part in four of what is free, and at most 4 GiB: more is read from disk."""

_POLL_S = 0.01
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
        self.is_done, self._saves = True, True
        self._saved: list[SavedParts] = []  # which also save what a prompt is about to replace
        if not cache:
            return
        main, draft = slots[0].main, slots[0].draft
        if main.limits.rollback == "none" or not can_be_saved(main.model):
            return
        facts = conditions(main)
        self._saved += _attach([slot.main for slot in slots], cache, facts)
        if isinstance(draft, CachingSequence) and not isinstance(draft, ChainedSequence):
            facts |= {"head": content_key(draft.model.path), "kind": type(draft.context).__name__}
            self._saved += _attach([slot.draft for slot in slots], cache, facts)
        elif (
            isinstance(draft, LlamaSequence) and draft.limits.rollback != "none" and can_be_saved(draft.model)
        ):
            _attach([slot.draft for slot in slots], cache, conditions(draft))

    def begin(self, *, saves: bool = True) -> None:
        """Note that an answer begins: until `end`, nothing is written to disk.

        Args:
            saves: False: prompts are looked up, but not saved, as those of a batch, which do not come again.
        """
        if self._cache:
            self._saves = saves
            self._cache.set_busy(True)
            for saved in self._saved:
                saved.saves_all = saves

    def end(self) -> None:
        """Note that no answer is running, and that caches have changed."""
        if self._cache:
            self._cache.set_busy(False)
            self.is_done = not self._saves

    def pause(self, paused: bool) -> None:
        """Write nothing to disk, as a prompt is about to come, or go on; any thread may call it."""
        if self._cache:
            self._cache.set_busy(paused)

    def step(self) -> bool:
        """Save a part of a sequence, in some milliseconds; returns whether more can be saved at once."""
        if not self._cache:
            return False
        waits = self._cache.n_unwritten > 0  # for room in memory
        drafts = (slot.draft for slot in self._slots if not slot.window.start)
        sequences = [*(slot.main for slot in self._slots), *drafts]
        has_room = True
        with suppress(InvalidRequest):  # the models were closed in mid-answer
            for sequence in sequences:
                if isinstance(sequence, LlamaSequence | CachingSequence):
                    progress = sequence.save(most=1)
                    if progress == "some":
                        return True
                    has_room &= progress == "all"
        self.is_done = has_room or not waits
        return False

    def finish(self) -> None:
        """Save all that there is room for now."""
        while not self.is_done and self.step():
            pass

    def close(self) -> None:
        """Save the rest, and write it to disk."""
        if not self._cache:
            return
        end = time.monotonic() + _CLOSE_S
        while not self.is_done and time.monotonic() < end:
            if not self.step():
                time.sleep(_POLL_S)  # the writer makes room
        self._cache.close(max(0.0, end - time.monotonic()))


def _attach(
    sequences: Sequence[LlamaSequence | HeadSequence | None], cache: PromptCache, facts: dict[str, object]
) -> list[SavedParts]:
    """Let the contexts of sequences look up prompts from now on; facts: on which the bytes depend."""
    identity, found = json.dumps(facts, sort_keys=True), list[SavedParts]()
    for context in dict.fromkeys(sequence.context for sequence in sequences if sequence):
        context.saved.prompts = cache.prompts(identity, context.saved.block, context.model.name)
        found.append(context.saved)
    return found


def conditions(sequence: LlamaSequence) -> dict[str, object]:
    """Everything that the bytes of a cache depend on. They do not depend on `n_ctx` and `max_branches`."""
    model = sequence.model
    return {
        "model": content_key(model.path),
        "llama.cpp": machine.llama_cpp_build(),
        "kernels": kernels.identity(),
        "cache type": sequence.cache_type,
        "flash attention": sequence.flash_attention,
        "offload": str(model.offload),
        "is extended": sequence.n_ctx > (model.n_ctx_original or sequence.n_ctx),
        "padded calls": bool(sequence.pad_to),
    }
