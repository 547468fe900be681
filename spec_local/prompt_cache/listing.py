"""Follow which files of one identity are on disk, as this and other processes write and delete them."""

import os
import time
from collections.abc import Callable, Set
from pathlib import Path

from spec_local.prompt_cache.entry import CacheEntry
from spec_local.prompt_cache.entry_file import Damaged, OtherVersion, read_entry
from spec_local.prompt_cache.folder import file_name, is_entry

_SETTLED = 2_000_000_000
"""Nanoseconds. A file system's clock has steps of up to 2 s; a second change within a step is not visible."""


class Listing:
    """on_damage: called with the number of damaged files, and the folder."""

    def __init__(
        self, path: Path, identity: bytes, block: int, on_damage: Callable[[int, Path], None]
    ) -> None:
        self._path, self._identity, self._block = path, identity, block
        self._on_damage = on_damage
        self.is_read = False
        self._listed: int | None = None  # the folder's time of change when it was listed last
        self._ignored: dict[str, tuple[int, ...]] = {}

    def changes(self, on_disk: Callable[[], Set[bytes]]) -> tuple[list[CacheEntry], Set[bytes]]:
        """Entries that appeared, and keys of those that vanished, compared with those that are on disk."""
        self.is_read = True
        try:
            changed = os.stat(self._path).st_mtime_ns
        except OSError:
            changed = -1
        if changed == self._listed:
            return [], set()
        self._listed = changed if abs(time.time_ns() - changed) > _SETTLED else None
        known = {file_name(key): key for key in on_disk()}
        try:
            names = set(os.listdir(self._path))
        except OSError:
            names = set()
        self._ignored = {name: facts for name, facts in self._ignored.items() if name in names}
        read = [self._read(name) for name in sorted(names - known.keys()) if is_entry(name)]
        if n_damaged := sum(isinstance(each, Damaged) for each in read):
            self._on_damage(n_damaged, self._path)
        appeared = [each for each in read if isinstance(each, CacheEntry)]
        return appeared, {known[name] for name in known.keys() - names}

    def ignore(self, name: str) -> None:
        """Leave a file out from now on, until it is another one."""
        self._ignored[name] = self._facts(name)

    def _read(self, name: str) -> CacheEntry | Damaged | None:
        if self._ignored.get(name) == (facts := self._facts(name)):
            return None
        try:
            return read_entry(self._path / name, self._identity, self._block)
        except FileNotFoundError:
            if not os.path.lexists(self._path / name):  # another process deleted it; not a link to nothing
                return None
        except OtherVersion:
            self._ignored[name] = facts
            return None
        except (OSError, Damaged):
            pass
        self._ignored[name] = facts
        return Damaged(name)

    def _facts(self, name: str) -> tuple[int, ...]:
        try:
            facts = os.lstat(self._path / name)
        except OSError:
            return ()
        return facts.st_ino, facts.st_size  # not the time: the writer may still be about to mark it as used
