"""The cache of a session: what its models computed for prompts, in memory and on disk.

A language model that continues a prompt whose beginning it has seen need not evaluate that beginning again,
if the state of its context after it is kept. Prompts of a chat, of an agent or of a batch share most of their
beginnings; what is shared is stored once.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from spec_local.prompt_cache import entry_file
from spec_local.prompt_cache import folder as files
from spec_local.prompt_cache.entry import identity_key
from spec_local.prompt_cache.index import Index
from spec_local.prompt_cache.listing import Listing
from spec_local.prompt_cache.memory import RecentItems
from spec_local.prompt_cache.prompts import Prompts
from spec_local.prompt_cache.writer import Writer

_warn = logging.getLogger(__name__).warning


class PromptCache:
    """The entries of several models, by their identities.

    Entries are found, added and read by one thread; any thread may call the methods of this class.

    memory: how many bytes are kept in memory: what there are no files for, and what is not written yet.
    folder, limit: where to keep files, and how many bytes of them; None or 0: nowhere. Other processes may
    use the same folder. log: may be called by another thread.
    """

    def __init__(
        self,
        memory: int,
        *,
        folder: Path | None = None,
        limit: int = 0,
        log: Callable[[str], None] = _warn,
        write: Callable[..., None] = entry_file.write,
    ) -> None:
        self._lock = threading.RLock()
        self._memory = RecentItems(memory)
        self._folder = folder if folder and limit > 0 else None
        self._writer = (
            Writer(self._folder, limit, self._memory, self._lock, log, write) if self._folder else None
        )
        self._log, self._logged = log, set[str]()
        self._prompts: dict[bytes, Prompts] = {}

    def prompts(self, identity: str, block: int, name: str = "") -> Prompts:
        """The entries of one model.

        Args:
            identity: text on which the meaning of the bytes depends: entries of another are never found.
            block: tokens of a full block.
            name: of the model, for people.
        """
        if block < 1:
            raise ValueError(f"a block of {block} tokens")
        key = identity_key(identity, block)
        with self._lock:
            if key not in self._prompts:
                self._prompts[key] = self._made(key, block, name)
            return self._prompts[key]

    def set_busy(self, busy: bool) -> None:
        """While busy, as from the arrival of a request to its end, nothing is written to disk."""
        if self._writer:
            self._writer.set_busy(busy)

    @property
    def n_unwritten(self) -> int:
        """Bytes in memory that are still to be written to disk."""
        return self._writer.n_bytes if self._writer else 0

    def close(self, seconds: float | None = None) -> None:
        """Write what remains, within so many seconds, and stop the thread.

        Entries can still be found and read; those that are added are kept in memory only.
        """
        if self._writer:
            self._writer.close(seconds)

    def _made(self, key: bytes, block: int, name: str) -> Prompts:
        listing = None
        if self._folder:
            if not self._prompts:
                files.remove_left_overs(self._folder)
            listing = Listing(self._folder / key.hex(), key, block, self._report_damaged)
        return Prompts(
            Index(key, block),
            self._memory,
            self._lock,
            name=name,
            writer=self._writer,
            listing=listing,
            log=self._log_once,
        )

    def _report_damaged(self, n: int, path: Path) -> None:
        files_are = "1 damaged file is" if n == 1 else f"{n} damaged files are"
        self._log_once(f"list {path}", f"{files_are} ignored in {path}")

    def _log_once(self, topic: str, line: str) -> None:
        if topic not in self._logged:
            self._logged.add(topic)
            self._log(line)
