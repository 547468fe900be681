"""What is stored of one model: find it for a history, add to it, read it."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.prompt_cache import entry_file
from spec_local.prompt_cache.entry import CacheEntry, History, Kind, Match, key_of
from spec_local.prompt_cache.index import Index, Item
from spec_local.prompt_cache.listing import Listing
from spec_local.prompt_cache.memory import RecentItems
from spec_local.prompt_cache.writer import Writer

_MIN_TOKENS = 64
"""Histories that are shorter are not written to disk: to evaluate them again is as fast as to read them."""


class Prompts:
    """The entries of one identity. For one thread; made by `PromptCache.prompts`.

    block: tokens of a full block. log: called with a topic, of which one line is enough, and a line.
    """

    def __init__(
        self,
        index: Index,
        memory: RecentItems,
        lock: threading.RLock,
        *,
        name: str = "",
        writer: Writer | None = None,
        listing: Listing | None = None,
        log: Callable[[str, str], None],
    ) -> None:
        self.block = index.block
        self._index, self._memory, self._lock = index, memory, lock
        self._name, self._writer, self._listing, self._log = name, writer, listing, log

    def find(self, tokens: Sequence[int]) -> Match:
        """What is stored for a history and its beginnings. It counts as used now."""
        history = self._history(tokens)
        with self._lock:
            self._refresh()
            match = self._index.find(history)
            places = [(cells.start + cells.n, cells.entry) for cells in match.cells]
            places += [(state.length, state.entry) for state in match.states]
            self._use([entry for _, entry in sorted(places, key=lambda place: place[0], reverse=True)])
        return match

    def lacking(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """The blocks of a history whose cells are not stored, as ranges of tokens.

        The last range may be a partial block; it is not lacking if stored cells begin with all its tokens.
        """
        history = self._history(tokens)
        with self._lock:
            self._refresh()
            return self._index.lacking(history)

    def add_cells(self, tokens: Sequence[int], start: int, data: NDArray[np.uint8]) -> bool:
        """Store the cells of one block. It replaces shorter blocks with whose tokens it begins.

        Args:
            tokens: the history up to the end of the block.
            start: a multiple of `block`.
            data: belongs to the cache from now on; it is not copied.

        Returns:
            False: there is no room now; there may be when more is written to disk. Nothing has changed.
        """
        if start % self.block or not 0 < len(tokens) - start <= self.block:
            raise ValueError(f"no block of {self.block}: tokens {start} to {len(tokens)}")
        return self._add("cells", self._history(tokens), start // self.block, data)

    def has_state(self, tokens: Sequence[int]) -> bool:
        history = self._history(tokens)
        last = history.n // self.block
        with self._lock:
            self._refresh()
            return self._index.get(key_of("state", history.keys[last], history.part(last))) is not None

    def add_state(self, tokens: Sequence[int], data: NDArray[np.uint8]) -> bool:
        """Store the recurrent state after exactly these tokens. data, result: as for `add_cells`."""
        return self._add("state", self._history(tokens), len(tokens) // self.block, data)

    def read(self, entry: CacheEntry) -> NDArray[np.uint8] | None:
        """The bytes of an entry, read-only; None if it is gone, or damaged, and then it is forgotten."""
        with self._lock:
            item = self._index.get(entry.key)
            if item is None or item.entry != entry:
                return None
            if item.data is not None:
                return item.data
            if not self._writer:
                return None
            path = self._writer.path(self._index, entry)
        try:
            data = entry_file.read_data(path, entry, self._index.identity, self.block)
        except FileNotFoundError:
            self._forget(item)
            return None
        except MemoryError:
            return None
        except (OSError, entry_file.Damaged, entry_file.OtherVersion) as error:
            self._forget_damaged(item, path, error)
            return None
        data.flags.writeable = False
        return data

    def drop(self, entry: CacheEntry) -> None:
        """Forget an entry, in memory and on disk."""
        with self._lock:
            if not (item := self._index.get(entry.key)):
                return
            if item.on_disk and self._writer:
                with contextlib.suppress(OSError):
                    self._writer.path(self._index, entry).unlink()
            item.on_disk = False
            self._drop(item)
            item.forget_if_gone()

    def _history(self, tokens: Sequence[int]) -> History:
        return History(self._index.identity, self.block, tokens)

    def _add(self, kind: Kind, history: History, i: int, data: NDArray[np.uint8]) -> bool:
        parent, tokens = history.keys[i], history.part(i)
        data = np.ascontiguousarray(data, np.uint8).reshape(-1).view()
        data.flags.writeable = False
        entry = CacheEntry.of(kind, parent, i * self.block, tokens, data.nbytes)
        with self._lock:
            if self._listing and not self._listing.is_read:
                self._refresh()
            whole = self._index.find(history).whole()
            stored = self._index.get(entry.key)
            if stored or (kind == "cells" and self._index.covers(parent, tokens)):
                self._use(whole)
                return True
            replaced = self._index.covered(entry)
            dropped = self._memory.victims(entry.size, {each.key for each in whole}, replaced)
            if dropped is None:
                return False
            for item in dropped:
                self._drop(item)
            item = self._index.add(entry)
            self._memory.put(item, data)
            whole = [each for each in self._index.find(history).whole() if each is not entry]
            self._memory.use(self._items([entry, *whole]))
            # A full block is the beginning of what may become long.
            if self._writer and (entry.end >= _MIN_TOKENS or (kind == "cells" and entry.n == self.block)):
                self._writer.add(item, self._name, whole)
        return True

    def _drop(self, item: Item) -> None:
        self._memory.drop(item)
        if self._writer:
            self._writer.discard(item)
        item.forget_if_gone()

    def _items(self, entries: Sequence[CacheEntry]) -> list[Item]:
        return [item for entry in entries if (item := self._index.get(entry.key))]

    def _use(self, entries: Sequence[CacheEntry]) -> None:
        """entries: of one history, its end first."""
        items = self._items(entries)
        self._memory.use(items)
        if self._writer and (on_disk := [item.entry for item in items if item.on_disk]):
            self._writer.use(self._index, on_disk)

    def _refresh(self) -> None:
        """Take note of files that this and other processes have written and deleted."""
        if not self._listing:
            return
        appeared, vanished = self._listing.changes(self._index.on_disk)
        for entry in appeared:
            self._index.add(entry).on_disk = True
        for key in vanished:
            if item := self._index.get(key):
                self._forget(item)

    def _forget(self, item: Item) -> None:
        """Of an entry whose file is gone."""
        with self._lock:
            item.on_disk = False
            item.forget_if_gone()

    def _forget_damaged(self, item: Item, path: Path, error: Exception) -> None:
        self._forget(item)
        if isinstance(error, entry_file.Damaged):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._listing:
            self._listing.ignore(path.name)
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        self._log(f"read {path.parent}", f"{path} is ignored ({reason}): its tokens are evaluated again")
