"""Write entries to disk in a thread, while no request is running."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_local.prompt_cache import entry_file, folder
from spec_local.prompt_cache.entry import CacheEntry
from spec_local.prompt_cache.index import Index, Item
from spec_local.prompt_cache.memory import RecentItems
from spec_local.system.files import is_full, replacing

_TOUCH_EVERY = 60.0  # seconds between two marks of use of the same file
_MAX_TOUCHED = 10_000
_HANG = 1.0  # seconds that closing waits for a system call that does not return


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """history: entries of the same history, which this one must not replace."""

    item: Item
    name: str
    history: Collection[CacheEntry]


class _Superseded(Exception):
    """The entry being written is no longer wanted."""


class _TooLate(Exception):
    """The time for closing is over."""


class Writer:
    """The queue of what is to be written, and the thread that writes it.

    lock: guards all items; it is not held while a file is written. log: may be called by the thread.
    write: as `entry_file.write`.
    """

    def __init__(
        self,
        path: Path,
        limit: int,
        memory: RecentItems,
        lock: threading.RLock,
        log: Callable[[str], None],
        write: Callable[..., None],
    ) -> None:
        self._folder, self._limit, self._memory, self._log = path, limit, memory, log
        self._write_file = write
        self._lock, self._work = lock, threading.Condition(lock)
        self._gate, self._may_write = threading.Lock(), threading.Event()
        self._may_write.set()
        self._jobs: dict[bytes, _Job] = {}
        self._used: dict[bytes, list[tuple[Path, int]]] = {}
        self._touched: dict[bytes, float] = {}  # by the last entry of a history
        self._thread: threading.Thread | None = None
        self._closing = self._stopped = False
        self._deadline: float | None = None
        self.n_bytes = 0  # still to be written

    def path(self, index: Index, entry: CacheEntry) -> Path:
        return self._folder / index.identity.hex() / folder.file_name(entry.key)

    def add(self, item: Item, name: str, history: Collection[CacheEntry]) -> None:
        """Write an entry later. name: of the model. history: entries of the same history that are stored."""
        size = entry_file.file_size(item.entry, item.index.identity, item.index.block)
        if self._stopped or self._closing or size > self._limit:
            return
        self._jobs[item.entry.key] = _Job(item, name, history)
        item.waits = True
        self.n_bytes += item.entry.size
        self._start()

    def discard(self, item: Item) -> None:
        """Do not write an entry, or no longer."""
        job = self._jobs.get(item.entry.key)
        if job and job.item is item:
            del self._jobs[item.entry.key]
            self.n_bytes -= item.entry.size
        item.waits = False

    def use(self, index: Index, entries: Sequence[CacheEntry]) -> None:
        """Mark the files of a history as used; all of them, so that its beginning stays the newest."""
        last, now = entries[0].key, time.monotonic()
        if self._stopped or self._closing or now - self._touched.get(last, -_TOUCH_EVERY) < _TOUCH_EVERY:
            return
        if len(self._touched) >= _MAX_TOUCHED:
            self._touched.clear()
        self._touched[last] = now
        self._used[last] = [(self.path(index, entry), entry.end) for entry in entries]
        self._start()

    def set_busy(self, busy: bool) -> None:
        with self._gate:
            if busy and not self._closing:
                self._may_write.clear()
            else:
                self._may_write.set()

    def close(self, seconds: float | None) -> None:
        with self._gate:
            self._closing = True
            self._deadline = None if seconds is None else time.monotonic() + seconds
            self._may_write.set()
        with self._lock:
            self._work.notify_all()
            thread = self._thread
        if thread and thread is not threading.current_thread():
            thread.join(None if seconds is None else seconds + _HANG)

    def _start(self) -> None:
        if not self._thread:
            self._thread = threading.Thread(target=self._run, name="prompt cache writer", daemon=True)
            self._thread.start()
        self._work.notify_all()

    def _run(self) -> None:
        try:
            with contextlib.suppress(_TooLate):
                while self._wait_for_work():
                    self._pause()
                    self._step()
        finally:  # nothing waits for a thread that is gone, even after a defect
            self._give_up()

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not (self._jobs or self._used or self._closing):
                self._work.wait()
            return bool(self._jobs or self._used)

    def _pause(self, job: _Job | None = None) -> None:
        """Wait while a request is running.

        Raises:
            _TooLate: the time for closing is over.
            _Superseded: the job was discarded.
        """
        self._may_write.wait()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise _TooLate
        if job and self._jobs.get(job.item.entry.key) is not job:
            raise _Superseded

    def _step(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
            job = next(iter(self._jobs.values()), None)
            if job:
                job.item.is_written_now = True
        for paths in used.values():
            folder.mark_used(paths)
        if job:
            written = False
            try:
                written = self._write(job)
            finally:
                self._finish(job, written)

    def _write(self, job: _Job) -> bool:
        """Whether the file is there in the end."""
        item, index = job.item, job.item.index
        entry, data, path = item.entry, item.data, self.path(index, item.entry)
        try:
            if data is None:
                return False
            with contextlib.suppress(OSError, entry_file.Damaged, entry_file.OtherVersion):
                if entry_file.read_entry(path, index.identity, index.block) == entry:
                    return True  # another process has written it
            size = entry_file.file_size(entry, index.identity, index.block)
            kept = {self.path(index, each) for each in job.history}
            if not folder.make_room(self._folder, size, self._limit, kept):
                return False
            folder.prepare(path.parent, job.name)
            with replacing(path, durable=False, make_folder=False) as part:
                self._write_file(part, entry, index.identity, index.block, data, lambda: self._pause(job))
            with self._lock:
                on_disk = [each for each in job.history if (its := index.get(each.key)) and its.on_disk]
            folder.mark_used([(self.path(index, each), each.end) for each in (entry, *on_disk)])
            return True
        except (_Superseded, FileNotFoundError):  # another process has cleared the folder
            return False
        except IsADirectoryError:  # in the place of the file
            return False
        except OSError as error:
            self._give_up()
            advice = "free some space" if is_full(error) else "check its permissions"
            self._log(
                f"{self._folder} cannot be written ({error.strerror}), prompts stay in memory: {advice}"
            )
            return False

    def _finish(self, job: _Job, written: bool) -> None:
        item, index = job.item, job.item.index
        with self._lock:
            item.is_written_now = False
            self.discard(item)
            if not written:
                return
            if index.get(item.entry.key) is not item:  # it was replaced meanwhile
                superfluous = [item]
            else:
                item.on_disk = True
                self._memory.drop(item)  # the system keeps files in memory where it has room
                superfluous = [each for each in index.covered(item.entry) if each.on_disk]
            for each in superfluous:
                with contextlib.suppress(OSError):
                    self.path(index, each.entry).unlink()
                each.on_disk = False
                each.forget_if_gone()

    def _give_up(self) -> None:
        with self._lock:
            self._stopped = True
            for job in list(self._jobs.values()):
                self.discard(job.item)
            self._used.clear()
