"""The datastore: texts on disk, by vocabulary, from which later sessions draft.

A datastore is a folder with two files. ``index`` contains texts and their sorted positions; it is only
replaced as a whole. ``journal`` contains newer texts, one record each; records are appended, and merged into
a new index when there are many, or when one is damaged. Each text has a label, and a newer text replaces the
one with the same label: merging a journal twice, as after a kill between the two writes, changes nothing.
Writers hold a lock. Readers do not: they rely on checksums, and may miss a text that is just being written.

A problem with these files never makes an answer fail: it is logged once. A damaged file is rewritten with
what could be read of it, and no file is written while one cannot be read.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from spec_local.datastore import copies, file_format, records
from spec_local.datastore.context_index import SEPARATOR, ContextIndex
from spec_local.datastore.file_format import StoredText, Tokens, joined
from spec_local.errors import SpecLocalError
from spec_local.llama.model import Model
from spec_local.system.files import read_bytes, write_atomically
from spec_local.system.folders import user_folder

MAX_TOKENS = 1_000_000
"""Capacity of a datastore in tokens, at 8 bytes each on disk; the oldest texts are dropped first."""
LOCK = "lock"
"""Name of the file that writers lock in a datastore's folder."""
ANSWERS = ".answers"
"""Suffix of the files of answer stores, which are in a datastore's folder."""
DAMAGED = ".damaged-"
"""Begins what follows in the name of a damaged file that was set aside."""
_MIN_ANSWER = 4  # tokens
_LOCK_TIMEOUT = 10.0  # seconds
_MAX_PLACES = 24
_MAX_MODELS = 20
_MAX_NAMES = 1 << 16  # bytes of 20 names
_MAX_FILE_SIZE = 64 << 20  # bytes; no datastore file is larger


@dataclass(frozen=True, slots=True)
class Contents:
    """Summary of a datastore.

    size: total size of its files in bytes. models: file names of the models that have used it.
    """

    folder: Path
    n_texts: int
    n_tokens: int
    size: int
    models: Sequence[str]


class Datastore:
    """The texts of one vocabulary, as of the last `refresh`. Several threads may use it at the same time.

    Args:
        folder: named after the vocabulary; created by the first write.
        n_vocab: size of the main model's vocabulary; tokens outside it are never proposed.
        max_tokens: capacity. max_journal: tokens of answers that are sorted again after each one, in about
            10 ms; with more, they are merged.
        lock_timeout: seconds; a merge by another process takes about one second.
        log: called once with a line about each problem.
    """

    def __init__(
        self,
        folder: Path,
        n_vocab: int,
        *,
        max_tokens: int = MAX_TOKENS,
        max_journal: int = 50_000,
        lock_timeout: float = _LOCK_TIMEOUT,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder = folder
        self.read_only = False
        """True if `add_answer` does nothing."""
        self._n_vocab, self._max_tokens, self._log = n_vocab, max_tokens, log
        self._max_journal, self._lock_timeout = max_journal, lock_timeout
        self._key = hashlib.sha256(folder.name.encode()).digest()[:16]
        self._logged: set[str] = set()
        self._lock = threading.RLock()  # the threads of one process; the file lock is for processes
        self._versions: dict[str, tuple[int, ...] | None] = {"index": None, "journal": None}
        self._index, self._labels = ContextIndex(), list[int]()
        self._journal_index, self._journal = ContextIndex(), list[StoredText]()
        self._valid_size = 0  # bytes of the journal up to the end of the last intact record
        self._damaged: set[str] = set()  # names of files
        self.refresh()

    def find(self, history: Sequence[int], length: int) -> tuple[Sequence[int], Tokens]:
        """Implement `spec_local.datastore.lookup.Searchable`."""
        matches: list[int] = []
        parts: list[Tokens] = []
        for index in (self._journal_index, self._index):
            if found := index.find(history, _MAX_PLACES):
                matches += [match for match, _ in found]
                parts.append(index.continuations([position for _, position in found], length, self._n_vocab))
        if not parts:
            return (), np.empty((0, length), np.int32)
        rows = parts[0]
        if len(parts) > 1:
            longest = sorted(range(len(matches)), key=lambda i: -matches[i])[:_MAX_PLACES]
            matches, rows = [matches[i] for i in longest], np.concatenate(parts)[longest]
        return matches, rows

    def refresh(self) -> None:
        """Read what any process has written since; almost free if there is nothing new."""
        with self._lock:
            for name in self._versions:
                try:
                    self._read(name)
                except OSError as error:
                    self._versions[name] = None
                    self._decode(name, b"")
                    self._log_once(f"{self.folder / name} cannot be read ({error.strerror}) and is ignored")

    def add_answer(self, answer: Sequence[int], before: Sequence[int] = ()) -> None:
        """Add an answer and the tokens before it, unless already present; problems are only logged."""
        if self.read_only or len(answer) < _MIN_ANSWER or len(before) + len(answer) >= self._max_tokens:
            return
        try:
            with self._locked():
                text = StoredText.of([*before, *answer])
                if text.label not in self._labels and all(text.label != each.label for each in self._journal):
                    self._append(text)
                n_tokens = sum(len(each.tokens) for each in self._journal)
                if self._damaged or n_tokens > self._max_journal:
                    self._merge(())
        except OSError as error:
            self.read_only = True  # otherwise every answer would wait for the lock and fail
            self._log_once(f"answers are not added to the datastore {self.folder} ({reason(error)})")

    def add(self, texts: Iterable[StoredText]) -> None:
        """Add many texts at once.

        Raises:
            SpecLocalError: they could not be written; nothing has changed.
        """
        try:
            with self._locked():
                self._merge(texts)
        except OSError as error:
            raise SpecLocalError(
                f"cannot write to the datastore {self.folder} ({reason(error)}): fix this and try again"
            ) from None

    def contents(self) -> Contents:
        """A summary for display."""
        with self._lock:
            texts = self._texts(())
        size = sum(version[0] for version in self._versions.values() if version)
        n_tokens = sum(len(text.tokens) for text in texts)
        return Contents(self.folder, len(texts), n_tokens, size, self._models())

    def add_model(self, name: str) -> None:
        """Add the file name of a model to `Contents.models`."""
        known = self._models()
        if name not in known:
            with contextlib.suppress(OSError):
                make_folder(self.folder)
                names = "\n".join([*known[1 - _MAX_MODELS :], name])
                write_atomically(self.folder / "models", names.encode("utf-8", "surrogateescape"))

    def _models(self) -> list[str]:
        with contextlib.suppress(OSError):
            names = read_bytes(self.folder / "models", _MAX_NAMES).decode("utf-8", "replace")
            return [name for name in names.splitlines() if name.isprintable()][-_MAX_MODELS:]
        return []

    def _texts(self, more: Iterable[StoredText]) -> list[StoredText]:
        """The texts of both files, then `more`, the oldest first."""
        tokens = self._index.tokens
        old = np.split(tokens, np.flatnonzero(tokens == SEPARATOR) + 1)[:-1]
        known = {label: StoredText(label, text[:-1]) for label, text in zip(self._labels, old, strict=True)}
        for text in (*self._journal, *more):
            known.pop(text.label, None)
            known[text.label] = text
        return list(known.values())

    def _merge(self, more: Iterable[StoredText]) -> None:
        """Write a new index of the latest texts that fit, and delete the journal."""
        kept: list[StoredText] = []
        room = self._max_tokens
        for text in reversed(self._texts(more)):
            room -= len(text.tokens) + 1
            if room < 0:
                break
            kept.append(text)
        write_atomically(self.folder / "index", file_format.encode_index(self._key, kept[::-1]))
        (self.folder / "journal").unlink(missing_ok=True)  # after a kill before this, it is merged again
        self.refresh()

    def _append(self, text: StoredText) -> None:
        """Append a text to the journal."""
        record = file_format.encode_record(self._key, text)
        records.append(self.folder / "journal", self._valid_size, record)
        self.refresh()

    def _read(self, name: str) -> None:
        """Read a file if it has changed.

        Raises:
            OSError: it cannot be read.
        """
        path = self.folder / name
        version = _version(path)
        if version == self._versions[name]:
            return
        content = read_bytes(path, _MAX_FILE_SIZE) if version else b""
        self._versions[name] = version
        self._damaged.discard(name)
        try:
            self._decode(name, content)
        except ValueError as error:
            self._damaged.add(name)
            self._log_once(f"{path} {error}: its damaged texts are lost, and it will be rewritten")

    def _decode(self, name: str, content: bytes) -> None:
        if name == "index":
            self._index, self._labels = ContextIndex(), []
            try:
                if content:
                    self._index, self._labels = file_format.decode_index(self._key, content)
            except ValueError:
                texts = file_format.recovered_texts(self._key, content)
                self._index, self._labels = ContextIndex.build(joined(texts)), [text.label for text in texts]
                raise
            return
        self._valid_size, self._journal = 0, []
        try:
            for text, end in file_format.decode_journal(self._key, content):
                self._journal.append(text)
                self._valid_size = end
        finally:
            self._journal_index = ContextIndex.build(joined(self._journal))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the writers' lock, and read what other processes have written.

        Raises:
            OSError: a file cannot be read: a writer would replace it by what it knows.
        """
        make_folder(self.folder)
        with self._lock, FileLock(self.folder / LOCK, timeout=self._lock_timeout, mode=0o600):
            for name in self._versions:
                self._read(name)
            yield

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)


def folders() -> list[Path]:
    """The folders of all datastores."""
    with contextlib.suppress(OSError):
        return sorted(path for path in root().iterdir() if path.is_dir())
    return []


def open_datastore(model: Model, log: Callable[[str], None] = lambda line: None) -> Datastore:
    """The datastore for a model's vocabulary, shared by all sizes and quantizations of its family."""
    vocabulary = model.vocabulary
    datastore = Datastore(root() / vocabulary.fingerprint, vocabulary.n_tokens, log=log)
    datastore.add_model(model.name)
    return datastore


def contents(folder: Path) -> Contents:
    """A summary of the datastore in a folder."""
    return Datastore(folder, 0).contents()


def clear(folder: Path, lock_timeout: float = _LOCK_TIMEOUT) -> copies.Made:
    """Delete the datastore in a folder, and all copies of the answers in it; sessions continue without it.

    Returns:
        what was made from the answers. After a kill, the next call deletes the rest.

    Raises:
        SpecLocalError: another process is writing to it.
        OSError: a file cannot be deleted.
    """
    try:
        with FileLock(folder / LOCK, timeout=lock_timeout, mode=0o600):
            # First: a training that has read these answers ends when its copies are gone.
            made = copies.delete_all(folder)
            kept = {copies.LIST} if made.failed else set()
            last = [copies.LIST, LOCK]  # a process that is waiting for the lock creates a new one
            for path in sorted(folder.iterdir(), key=lambda path: [path.name == name for name in last[::-1]]):
                if path.name not in kept:
                    path.unlink()
    except Timeout:
        raise SpecLocalError(f"another specdec process is writing to {folder}: try again later") from None
    with contextlib.suppress(OSError):  # another process has already added something
        folder.rmdir()
    return made


def has_answers(folder: Path) -> bool:
    """Return whether a folder has answers to learn from: see `spec_local.datastore.answer_store`."""
    return any(folder.glob(f"*{ANSWERS}"))


def set_aside(folder: Path) -> list[Path]:
    """The damaged files that were set aside in a folder."""
    return sorted(folder.glob(f"[!.]*{ANSWERS}{DAMAGED}*"))


def root() -> Path:
    """The folder with the folders of all datastores."""
    return user_folder("cache") / "texts"


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner can read."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _version(path: Path) -> tuple[int, ...] | None:
    """Size, modification time and inode, which change with the file; None: there is no file.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def reason(error: Exception) -> str:
    """Why a file of a folder cannot be used, for a message."""
    if isinstance(error, Timeout):
        return "another process holds its lock"
    return str(getattr(error, "strerror", None) or error)
