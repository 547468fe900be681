"""Texts on disk, by vocabulary, so that what was said or read once can be guessed in later sessions.

A store is a folder with two files that matter. ``index`` holds texts and their sorted places; it never changes, and is only
replaced. ``journal`` holds what came since, a record a text; records are added at its end, and merged into a new index when
there are many. Each text has a label, and a newer text takes the place of the one with its label: merging a journal twice
changes nothing, which is what a kill between the two files leads to. Who writes holds a lock. Who reads does not, trusts
checksums only, and may miss a text that is just being written.

Nothing that is wrong with the files is worth an answer: it is told once, and what is damaged is built anew.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from filelock import FileLock, Timeout

from spec_local.datastore import text_format
from spec_local.datastore.text_format import Text, Tokens, in_one
from spec_local.datastore.text_index import SEPARATOR, ContextIndex
from spec_local.errors import SpecLocalError
from spec_local.files import write_atomically
from spec_local.llama.model import Model

MOST_TOKENS = 1_000_000
"""Of a store, 8 bytes each on disk; the oldest texts go first."""
_JOURNAL_TOKENS = 50_000  # which are sorted anew after each answer, in some 10 ms
_SHORTEST = 4  # tokens of an answer
_PATIENCE = 10.0  # seconds to wait for another process, which needs one to merge
_PLACES = 24
_MODELS = 20

_LARGEST_FILE = 64 << 20  # bytes; what is larger was not written here


@dataclass(frozen=True, slots=True)
class Contents:
    """What a store holds. size: bytes of its files. models: names of the files of the models that have used it."""

    folder: Path
    n_texts: int
    n_tokens: int
    size: int
    models: Sequence[str]


class Datastore:
    """The texts of one vocabulary, as they were when it was last opened or refreshed.

    Args:
        folder: where it is; its name stands for the vocabulary. It is made when something is written.
        n_vocab: main's tokens; ids that it does not have are never proposed.
        most: tokens that it may hold.
        log: told, in a line and only once, what is wrong.
    """

    def __init__(
        self,
        folder: Path,
        n_vocab: int,
        *,
        most: int = MOST_TOKENS,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder = folder
        self.learning = True
        """Whether `remember` remembers."""
        self._n_vocab, self._most, self._log = n_vocab, most, log
        self._key = hashlib.sha256(folder.name.encode()).digest()[:16]
        self._told: set[str] = set()
        self._states: dict[str, tuple[int, ...] | None] = {"index": None, "journal": None}
        self._old, self._labels = ContextIndex(b"", b""), list[int]()
        self._new, self._journal = ContextIndex(b"", b""), list[Text]()
        self._valid = 0  # bytes of the journal
        self._damaged = False  # the index
        self.refresh()

    def find(self, history: Sequence[int], length: int) -> tuple[Sequence[int], Tokens]:
        """See `spec_local.datastore.lookup.Texts`."""
        matches: list[int] = []
        followed: list[Tokens] = []
        for index in (self._new, self._old):
            if found := index.find(history, _PLACES):
                matches += [match for match, _ in found]
                followed.append(index.continuations([place for _, place in found], length, self._n_vocab))
        if not followed:
            return (), np.empty((0, length), np.int32)
        rows = followed[0]
        if len(followed) > 1:
            likeliest = sorted(range(len(matches)), key=lambda i: -matches[i])[:_PLACES]
            matches, rows = [matches[i] for i in likeliest], np.concatenate(followed)[likeliest]
        return matches, rows

    def refresh(self) -> None:
        """See what has been written since, by whomever; where there is nothing new it costs next to nothing."""
        for name, read in (("index", self._read_index), ("journal", self._read_journal)):
            path = self.folder / name
            try:
                state = _state(path)
                if state == self._states[name]:
                    continue
                self._states[name] = state
                self._damaged = self._damaged and name != "index"
                read(path.read_bytes() if state else b"")
            except OSError as error:
                read(b"")
                self._tell(f"{path} cannot be read ({error.strerror}): it is left out")
            except ValueError as error:
                self._damaged = self._damaged or name == "index"
                self._tell(f"{path} {error}: what it held is lost, and it is written anew")

    def remember(self, answer: Sequence[int], before: Sequence[int] = ()) -> None:
        """Add what was said, and the tokens before it, unless it is here; what goes wrong is only told."""
        if not self.learning or len(answer) < _SHORTEST or len(before) + len(answer) >= self._most:
            return
        try:
            with self._locked():
                text = Text.of([*before, *answer])
                if text.label not in self._labels and all(text.label != each.label for each in self._journal):
                    self._append(text)
                if self._damaged or sum(len(each.tokens) for each in self._journal) > _JOURNAL_TOKENS:
                    self._merge(())
        except (OSError, Timeout) as error:
            self.learning = False  # or every answer would wait for it, and fail
            self._tell(f"what is said now is not kept in {self.folder} ({_reason(error)})")

    def add(self, texts: Iterable[Text]) -> None:
        """Add many texts at once.

        Raises:
            SpecLocalError: they could not be written; nothing has changed.
        """
        try:
            with self._locked():
                self._merge(texts)
        except (OSError, Timeout) as error:
            raise SpecLocalError(
                f"{self.folder} cannot be written to ({_reason(error)}): mend that, and try again"
            ) from None

    def contents(self) -> Contents:
        """What it holds."""
        texts = self._texts(())
        size = sum(state[0] for state in self._states.values() if state)
        n_tokens = sum(len(text.tokens) for text in texts)
        return Contents(self.folder, len(texts), n_tokens, size, self._models())

    def used_by(self, model: str) -> None:
        """Note the name of a model's file, for people who look."""
        known = self._models()
        if model not in known:
            with contextlib.suppress(OSError):
                _make(self.folder)
                names = "\n".join([*known[1 - _MODELS :], model])
                write_atomically(self.folder / "models", names.encode("utf-8", "surrogateescape"))

    def _models(self) -> list[str]:
        with contextlib.suppress(OSError):
            names = (self.folder / "models").read_text(encoding="utf-8", errors="replace")
            return [name for name in names.splitlines() if name.isprintable()][-_MODELS:]
        return []

    def _texts(self, more: Iterable[Text]) -> list[Text]:
        """All of them, the oldest first."""
        tokens = self._old.tokens
        old = np.split(tokens, np.flatnonzero(tokens == SEPARATOR) + 1)[:-1]
        known = {label: Text(label, text[:-1]) for label, text in zip(self._labels, old, strict=True)}
        for text in (*self._journal, *more):
            known.pop(text.label, None)
            known[text.label] = text
        return list(known.values())

    def _merge(self, more: Iterable[Text]) -> None:
        kept: list[Text] = []
        room = self._most
        for text in reversed(self._texts(more)):
            room -= len(text.tokens) + 1
            if room < 0:
                break
            kept.append(text)
        write_atomically(self.folder / "index", text_format.index_file(self._key, kept[::-1]))
        (self.folder / "journal").unlink(missing_ok=True)  # killed before this, it is merged once more
        self.refresh()

    def _append(self, text: Text) -> None:
        record = text_format.record(text)
        if not self._valid:
            record = text_format.journal_head(self._key) + record
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        file = os.open(self.folder / "journal", flags, 0o600)
        try:
            os.ftruncate(file, self._valid)  # a kill or a full disk may have left the beginning of a record
            os.lseek(file, 0, os.SEEK_END)
            while record:
                record = record[os.write(file, record) :]
        finally:
            os.close(file)
        self.refresh()

    def _read_index(self, content: bytes) -> None:
        self._old, self._labels = ContextIndex(b"", b""), []
        if content:
            self._old, self._labels = text_format.read_index(self._key, content)

    def _read_journal(self, content: bytes) -> None:
        self._valid, self._journal = 0, []
        try:
            if content:
                for text, end in text_format.read_journal(self._key, content):
                    self._journal.append(text)
                    self._valid = end
        finally:
            self._new = ContextIndex.of(in_one(self._journal))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's lock, and know what others have written."""
        _make(self.folder)
        with FileLock(self.folder / "lock", timeout=_PATIENCE, mode=0o600):
            self.refresh()
            yield

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._log(line)


def stores() -> list[Path]:
    """The folders of all stores that there are."""
    with contextlib.suppress(OSError):
        return sorted(path for path in _home().iterdir() if path.is_dir())
    return []


def of_model(model: Model, log: Callable[[str], None] = lambda line: None) -> Datastore:
    """The store of a model's vocabulary, which all sizes and quantizations of its family share."""
    vocabulary = model.vocabulary
    store = Datastore(_home() / vocabulary.fingerprint, vocabulary.n_tokens, log=log)
    store.used_by(model.path.name)
    return store


def contents(folder: Path) -> Contents:
    """What a store holds."""
    return Datastore(folder, 0).contents()


def clear(folder: Path) -> None:
    """Delete a store; a session that has it open goes on without.

    Raises:
        SpecLocalError: another process holds it.
        OSError: a file cannot be deleted.
    """
    try:
        with FileLock(folder / "lock", timeout=_PATIENCE, mode=0o600):
            for path in folder.iterdir():
                path.unlink()  # the lock, too: who waits for it makes a new one
    except Timeout:
        raise SpecLocalError(f"another specdec is writing to {folder}: try again") from None
    with contextlib.suppress(OSError):  # there is something new already
        folder.rmdir()


def _home() -> Path:
    return Path(platformdirs.user_cache_dir("specdec")) / "texts"


def _make(folder: Path) -> None:
    """What was said is nobody else's business."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _state(path: Path) -> tuple[int, ...] | None:
    """What tells whether a file is still the one that was read; None: there is none.

    Raises:
        OSError: it cannot be read, or should not be.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_FILE:
        raise OSError(errno.EINVAL, "it is something else")
    return found.st_size, found.st_mtime_ns, found.st_ino


def _reason(error: Exception) -> str:
    return (
        "another process holds it" if isinstance(error, Timeout) else str(getattr(error, "strerror", error))
    )
