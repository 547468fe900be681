"""The prefix tree of one identity: which entries are stored, and which of them fit a history."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.prompt_cache.entry import (
    TOKEN_BYTES,
    CacheEntry,
    FoundCells,
    FoundState,
    History,
    Match,
    n_common,
)


@dataclass(slots=True, eq=False)
class Item:
    """An entry, and where its bytes are: in memory, on disk, or both.

    waits: it is still to be written to disk. is_written_now: the writer thread is about it.
    """

    entry: CacheEntry
    index: "Index"
    data: NDArray[np.uint8] | None = None
    on_disk: bool = False
    waits: bool = False
    is_written_now: bool = False

    def forget_if_gone(self) -> None:
        if self.data is None and not self.on_disk:
            self.index.remove(self)


class Index:
    """The entries of one identity. identity: its key, also the name of its folder."""

    def __init__(self, identity: bytes, block: int) -> None:
        self.identity, self.block = identity, block
        self._items: dict[bytes, Item] = {}
        self._cells: dict[bytes, dict[bytes, Item]] = {}
        self._states: dict[bytes, dict[bytes, Item]] = {}

    def get(self, key: bytes) -> Item | None:
        return self._items.get(key)

    def add(self, entry: CacheEntry) -> Item:
        """The item of an entry, which is new or already here."""
        if item := self._items.get(entry.key):
            return item
        item = self._items[entry.key] = Item(entry, self)
        self._siblings(entry).setdefault(entry.parent, {})[entry.key] = item
        return item

    def remove(self, item: Item) -> None:
        entry = item.entry
        if self._items.get(entry.key) is not item:
            return
        del self._items[entry.key]
        siblings = self._siblings(entry)
        del siblings[entry.parent][entry.key]
        if not siblings[entry.parent]:
            del siblings[entry.parent]

    def on_disk(self) -> set[bytes]:
        return {key for key, item in self._items.items() if item.on_disk}

    def find(self, history: History) -> Match:
        cells = []
        for i, key in enumerate(history.keys[1:]):
            item = self._items.get(key)
            if item is None:
                break
            cells.append(FoundCells(item.entry, i * self.block, self.block))
        i = len(cells)
        if partial := self._longest_common(history.keys[i], history.part(i)):
            cells.append(FoundCells(partial[0], i * self.block, partial[1]))
        # Beyond the first missing cells, too: a purely recurrent model has no cells.
        states = [
            FoundState(item.entry, item.entry.end)
            for i, key in enumerate(history.keys)
            for item in self._states.get(key, {}).values()
            if history.part(i).startswith(item.entry.tokens)
        ]
        return Match(cells, sorted(states, key=lambda found: found.length))

    def _longest_common(self, parent: bytes, tokens: bytes) -> tuple[CacheEntry, int] | None:
        best, longest = None, 0
        for item in self._cells.get(parent, {}).values():
            theirs, n_bytes = item.entry.tokens, (longest + 1) * TOKEN_BYTES
            # Only the few that are better than the best so far are compared in full.
            if len(tokens) >= n_bytes <= len(theirs) and theirs.startswith(tokens[:n_bytes]):
                best = item.entry
                longest = n_common(np.frombuffer(theirs, "<i4"), np.frombuffer(tokens, "<i4"))
        return (best, longest) if best else None

    def lacking(self, history: History) -> list[tuple[int, int]]:
        """The blocks of which no cells are stored, as ranges of tokens."""
        ranges = [
            (i * self.block, (i + 1) * self.block)
            for i, key in enumerate(history.keys[1:])
            if key not in self._items
        ]
        last = len(history.keys) - 1
        if (tail := history.part(last)) and not self.covers(history.keys[last], tail):
            ranges.append((last * self.block, history.n))
        return ranges

    def covers(self, parent: bytes, tokens: bytes) -> bool:
        """Whether stored cells begin with these tokens."""
        siblings = self._cells.get(parent, {}).values()
        return any(item.entry.tokens.startswith(tokens) for item in siblings)

    def covered(self, entry: CacheEntry) -> list[Item]:
        """Cells that a longer entry makes superfluous, as its tokens begin with theirs."""
        if entry.kind == "state":
            return []
        return [
            item
            for item in self._cells.get(entry.parent, {}).values()
            if item.entry.n < entry.n and entry.tokens.startswith(item.entry.tokens)
        ]

    def before(self, entry: CacheEntry) -> Iterator[Item]:
        """The full blocks before an entry, the last one first, as far as they are stored without a gap."""
        while item := self._items.get(entry.parent):
            yield item
            entry = item.entry

    def _siblings(self, entry: CacheEntry) -> dict[bytes, dict[bytes, Item]]:
        return self._cells if entry.kind == "cells" else self._states
