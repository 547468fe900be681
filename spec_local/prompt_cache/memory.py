"""The bytes in memory, of all identities together, within a budget."""

from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from spec_local.prompt_cache.index import Item


class RecentItems:
    """Items with data, the least recently used first.

    The blocks of a history are used from its end to its beginning, so that its end is dropped first: a
    beginning is of use without the end, but not the other way round.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._items: OrderedDict[bytes, Item] = OrderedDict()
        self.n_bytes = 0

    def use(self, items: Iterable[Item]) -> None:
        """Mark items as recently used, those that come later in the iteration as more recently."""
        for item in items:
            if item.entry.key in self._items:
                self._items.move_to_end(item.entry.key)

    def put(self, item: Item, data: NDArray[np.uint8]) -> None:
        self.drop(item)
        item.data = data
        self._items[item.entry.key] = item
        self.n_bytes += data.nbytes

    def drop(self, item: Item) -> None:
        if item.data is not None:
            del self._items[item.entry.key]
            self.n_bytes -= item.data.nbytes
            item.data = None

    def victims(
        self, size: int, history: Collection[bytes], replaced: Collection[Item] = ()
    ) -> list[Item] | None:
        """What to drop in favor of `size` bytes; None: there is no room for them.

        Args:
            history: keys of the entries of the same history, which are not dropped unless they are on disk.
            replaced: these are dropped in any case.
        """
        dropped = [item for item in replaced if item.data is not None]
        missing = self.n_bytes + size - self._budget - sum(item.entry.size for item in dropped)
        if missing <= 0:
            return dropped
        gone = {item.entry.key for item in dropped}
        free: list[Item] = []
        unwritten: list[Item] = []
        n_older = None  # how many of `unwritten` were used before the history
        for key, item in self._items.items():
            if key in history:
                n_older = len(unwritten)
            if key in gone:
                continue
            if item.on_disk or not (item.waits or key in history):
                free.append(item)
            elif not (item.is_written_now or key in history):
                unwritten.append(item)
        # What waits for the writer would be lost: it goes last, and only for what was used after it.
        for item in free + unwritten[:n_older]:
            dropped.append(item)
            missing -= item.entry.size
            if missing <= 0:
                return dropped
        return None
