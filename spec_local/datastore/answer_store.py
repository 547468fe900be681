"""The answer store: whole prompts and answers of one main model on disk, to train a drafter on them.

It is an SQLite file in the datastore's folder of the model's vocabulary, named after the model's content.
Every operation holds the lock of that folder and opens the file anew: no process ever has a file open that
another one deletes or replaces. An answer is there as soon as `AnswerStore.add` returns, also after a kill.

A problem with the file never makes an answer fail: it is logged once. The digest of each answer shows damage,
which SQLite cannot see in the tokens. Whoever finds a damaged file keeps it beside a new one with all answers
that can be recovered from it.
"""

import contextlib
import errno
import hashlib
import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from spec_local.datastore import copies, damaged_rows, datastore
from spec_local.errors import ModelFileError
from spec_local.llama.headers import open_header
from spec_local.llama.identity import content_key
from spec_local.llama.model import Model
from spec_local.system import extras
from spec_local.system.files import replacing
from spec_local.text import counted

MAX_TOKENS = 1_000_000
"""Capacity in tokens: 4 MB, and as much text as two cores read in a few hours of training."""
_MIN_ANSWER = 4  # tokens
_MAX_FILE_SIZE = 64 << 20  # bytes; tokens take 4 MB, and so many short answers as much again
_ADD_TIMEOUT = 2.0  # seconds that an answer may wait for the lock; a merge of the datastore takes one
_POLL = 0.005  # seconds between two attempts to get the lock; an addition takes a few milliseconds
_MAX_ROW = 1 << 26  # bytes; SQLite refuses larger ones, which only damage can make
_MAX_STEPS = 20_000_000  # of SQLite's virtual machine for a statement, a second: the longest needs 200,000
_MAX_SET_ASIDE = 3  # damaged files that are kept for each store
_LAST_TIME = 1e11  # seconds since 1970: thousands of years from now, and not too large for a date
_TOKEN = np.dtype("<i4")
_Result = TypeVar("_Result")

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL,"
    " temperature REAL NOT NULL, n_prompt INTEGER NOT NULL, digest BLOB NOT NULL UNIQUE,"
    " tokens BLOB NOT NULL)",
)
_SEQUENCE = "CREATE TABLE sqlite_sequence(name,seq)"  # made by SQLite
_EXPECTED = {each.replace("IF NOT EXISTS ", "").encode() for each in (*_SCHEMA, _SEQUENCE)}
_PRAGMAS = (
    f"page_size = {damaged_rows.PAGE_SIZE}",  # of a new file
    "secure_delete = ON",  # what was dropped is overwritten
    "trusted_schema = OFF",  # the file may be damaged or of another program
    "cell_size_check = ON",
    "synchronous = NORMAL",  # a power loss does not damage the file
)
_PROBLEMS = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_AUTH, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_READONLY),
}
"""Results of SQLite that say nothing about the content of the file."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptAnswer:
    """An answer with its whole prompt.

    Attributes:
        number: ascending in time; never used again, not even after the store was cleared.
        time: of its end, in seconds since 1970.
        temperature: of the sampler; 0 is greedy.
        n_prompt: number of tokens of the prompt; for a chat, of the whole conversation before the answer.
        tokens: prompt and answer, int32 (n,); without the token that ended the answer.
    """

    number: int
    time: float
    temperature: float
    n_prompt: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AnswerContents:
    """Summary of an answer store.

    size: of its file in bytes. first, last: seconds since 1970, None without answers. model: the file name of
    the main model, empty if it cannot be read.
    """

    path: Path
    n_answers: int
    n_tokens: int
    size: int
    first: float | None
    last: float | None
    model: str


class AnswerStore:
    """The kept answers of one main model. Any number of threads and processes may use it at the same time.

    Args:
        path: of the file; it and its folder are created by the first addition, for the owner only.
        model: file name of the main model, for `AnswerContents`.
        max_tokens, max_answers: capacity; the oldest answers are dropped first. Their sizes are added up at
            each addition, in about 10 ms.
        add_timeout, read_timeout: seconds to wait for the lock.
        pause: seconds without further attempts after a failed addition: not every answer is to wait.
        log: called once with a line about each problem.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: str = "",
        max_tokens: int = MAX_TOKENS,
        max_answers: int = 10_000,
        add_timeout: float = _ADD_TIMEOUT,
        read_timeout: float = 10.0,
        pause: float = 60.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path = path
        self.read_only = False
        """True if `add` does nothing."""
        self._model, self._max_tokens, self._max_answers, self._log = model, max_tokens, max_answers, log
        self._add_timeout, self._read_timeout, self._pause = add_timeout, read_timeout, pause
        self._logged: set[str] = set()
        self._retry_at = -math.inf  # on the monotonic clock
        self._is_checked = False  # this object has found it without damage

    @property
    def key(self) -> str:
        """The key of the main model's content: see `spec_local.llama.identity`."""
        return self.path.stem

    def create(self) -> bool:
        """Create the file if there is none; returns True if it was created. Problems are only logged."""
        with self._problems_logged(), self._locked(self._add_timeout):
            created = self._create()
            with self._problems_logged():
                self._write(())
            return created
        return False

    def add(self, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> None:
        """Keep an answer of at least 4 tokens, unless the same one to the same prompt is kept already.

        Problems are only logged; after one, nothing is added for a while.
        """
        n_tokens = len(prompt) + len(answer)
        if self.read_only or len(answer) < _MIN_ANSWER or n_tokens > self._max_tokens:
            return
        if time.monotonic() < self._retry_at:
            return
        tokens = np.array([*prompt, *answer], _TOKEN)
        added = KeptAnswer(0, time.time(), temperature, len(prompt), tokens)
        with self._problems_logged(), self._locked(self._add_timeout):
            self._create()
            self._write([added])

    def answers(self) -> list[KeptAnswer]:
        """All answers, the oldest first; of a damaged file, those that can be recovered, which is logged."""
        return self._read(self._all) or []

    def answers_to_copy(self, folder: Path) -> list[KeptAnswer]:
        """As `answers`, after creating and listing a folder of `copies` for what will be made from them.

        Raises:
            OSError: the folder cannot be created, or the list cannot be written.
        """
        with self._locked(self._read_timeout):
            copies.add(self.path.parent, folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.answers()  # afterwards: clearing these answers deletes the folder

    def end_copy(self, folder: Path, head: Path) -> None:
        """Delete a folder of copies, and list the head that has learned from them in its place.

        Raises:
            OSError: the folder cannot be deleted, or the list cannot be written.
        """
        copies.delete(folder)
        with self._locked(self._read_timeout):
            copies.replace(self.path.parent, folder, head)

    def count_after(self, number: int) -> int:
        """Count the answers with a higher number; takes a few milliseconds."""

        def count(connection: sqlite3.Connection) -> int:
            found = connection.execute("SELECT count(*) FROM answers WHERE number > ?", [number]).fetchone()
            return int(found[0])

        return self._read(count) or 0

    def contents(self) -> AnswerContents:
        """A summary for display."""
        answers = self.answers()
        name = self._read(_model_name) or ""
        size = 0
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
        times = [answer.time for answer in answers]
        return AnswerContents(
            self.path,
            len(answers),
            sum(len(answer.tokens) for answer in answers),
            size,
            min(times, default=None),
            max(times, default=None),
            name,
        )

    # Below, the lock is held

    def _create(self) -> bool:
        if self._exists():
            return False
        # SQLite would create it with the usual permissions; its other files get those of this one. It ignores
        # the journal that a file of this name has left if this one is empty.
        os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return True

    def _exists(self) -> bool:
        """Return whether there is a file.

        Raises:
            OSError: it is something else, which is neither read nor replaced.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        limit = max(_MAX_FILE_SIZE, 16 * self._max_tokens)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise OSError(errno.EINVAL, "not a file of an answer store")
        return True

    def _write(self, added: Sequence[KeptAnswer]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")  # ended by an error, nothing has changed
            _prepare(connection, self._model)
            if not self._is_checked:  # what is added to a damaged tree of pages may overwrite others
                self._all(connection)
            for answer in added:
                _insert(connection, answer, None)
            self._drop_oldest(connection)
            connection.execute("COMMIT")

        self._use(write)

    def _use(self, query: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """The result of a query; where the file turns out to be damaged, it is repaired before."""
        try:
            with _connection(_uri(self.path)) as connection:
                return query(connection)
        except sqlite3.Error as error:
            if not self._shows_damage(error):
                raise
        self._repair()
        with _connection(_uri(self.path)) as connection:
            return query(connection)

    def _drop_oldest(self, connection: sqlite3.Connection) -> None:
        room, last = self._max_tokens, None
        sizes = connection.execute("SELECT number, length(tokens) FROM answers ORDER BY number DESC")
        for n_newer, (number, size) in enumerate(sizes):
            room -= (size or 0) // _TOKEN.itemsize
            if room < 0 or n_newer >= self._max_answers:
                last = number
                break
        sizes.close()
        if last is not None:
            connection.execute("DELETE FROM answers WHERE number <= ?", [last])

    def _repair(self) -> None:
        """Set a damaged file aside, and replace it by one with all answers that can be recovered from it.

        A kill at any time leaves the damaged file or the new one in its place.
        """
        content = self.path.read_bytes()
        answers, aside = _recovered(content), self._set_aside(content)
        name = self._model
        if not name:
            with contextlib.suppress(sqlite3.Error), _connection(_uri(self.path)) as connection:
                name = _model_name(connection)
        with replacing(self.path) as temporary:
            with _connection(_uri(temporary), journal="MEMORY") as connection:
                _fill(connection, answers, name)
            for suffix in ("-journal", "-wal", "-shm"):  # SQLite has read them, as far as they belong to it
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self._log_once(
            f"{self.path} was damaged: the {counted(len(answers), 'answer')} that can be read "
            f"{'is' if len(answers) == 1 else 'are'} in it again, and the damaged file is kept beside it as "
            f"{aside.name}"
        )

    def _set_aside(self, content: bytes) -> Path:
        """Keep the content of a damaged file; the oldest of more than three are deleted."""
        # Named after the content: a repair that was killed does not keep it twice when it is repeated.
        prefix = f"{self.path.name}{datastore.DAMAGED}"
        aside = self.path.with_name(prefix + hashlib.sha256(content).hexdigest()[:8])
        with replacing(aside) as temporary:
            temporary.write_bytes(content)
        kept = sorted(self.path.parent.glob(f"{prefix}*"), key=lambda path: path.stat().st_mtime)
        for oldest in kept[:-_MAX_SET_ASIDE]:
            oldest.unlink()
        return aside

    def _all(self, connection: sqlite3.Connection) -> list[KeptAnswer]:
        """All answers, the oldest first.

        Raises:
            sqlite3.DatabaseError: the file is damaged.
        """
        if connection.execute("PRAGMA quick_check(1)").fetchone() != (b"ok",):
            raise sqlite3.DatabaseError("its pages are damaged")
        found: list[KeptAnswer] = []
        columns = "number, time, temperature, n_prompt, digest, tokens"
        for row in connection.execute(f"SELECT {columns} FROM answers ORDER BY number"):
            try:
                found.append(_decoded(*row))
            except (TypeError, ValueError, OverflowError):
                raise sqlite3.DatabaseError("an answer is damaged") from None
        self._is_checked = True
        return found

    def _shows_damage(self, error: sqlite3.Error) -> bool:
        """Return whether an error of SQLite comes from the content of the file."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code == sqlite3.SQLITE_READONLY:  # a damaged header says so, too
            return os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        return code not in _PROBLEMS

    # Locking and logging

    def _read(self, query: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        """The result of a query; None: there is no file, or it cannot be read, which is logged once."""
        try:
            if not self._exists():
                return None
            try:
                with self._locked(self._read_timeout):
                    # It may have been deleted in the meantime, or just been created.
                    return self._use(query) if self._has_content() else None
            except Timeout:
                raise
            except OSError:
                return self._read_only(query) if self._has_content() else None
        except OSError as error:
            self._log_once(f"{self.path} cannot be read ({datastore.reason(error)})")
        except sqlite3.Error as error:
            self._log_once(f"{self.path} cannot be read ({error})")
        return None

    def _read_only(self, query: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """The result of a query where nothing can be written: on a read-only disk, or a full one."""
        try:
            with _connection(_uri(self.path, "mode=ro&immutable=1")) as connection:
                return query(connection)
        except sqlite3.Error as error:
            if not self._shows_damage(error):
                raise
        answers = _recovered(self.path.read_bytes())
        self._log_once(f"{self.path} is damaged: {counted(len(answers), 'answer')} can be read")
        with _connection("file::memory:") as connection:
            _fill(connection, answers, "")
            return query(connection)

    def _has_content(self) -> bool:
        return self._exists() and self.path.stat().st_size > 0

    @contextlib.contextmanager
    def _locked(self, timeout: float) -> Iterator[None]:
        datastore.make_folder(self.path.parent)
        lock = FileLock(self.path.parent / datastore.LOCK, timeout=timeout, poll_interval=_POLL, mode=0o600)
        with lock:
            datastore.make_folder(self.path.parent)
            yield

    @contextlib.contextmanager
    def _problems_logged(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self._retry_at = time.monotonic() + self._pause
            self._log_once(f"answers are not kept for learning in {self.path} ({datastore.reason(error)})")

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)


def open_answer_store(model: Model, log: Callable[[str], None] = lambda line: None) -> AnswerStore:
    """The answer store of a main model; nothing is created before the first addition.

    Raises:
        ModelFileError: the model's file cannot be read.
    """
    try:
        key = content_key(model.path)
    except OSError as error:
        raise ModelFileError(
            f"{model.path} cannot be read ({error.strerror}), which learning needs: check the file"
        ) from None
    path = datastore.root() / model.vocabulary.fingerprint / f"{key}{datastore.ANSWERS}"
    return AnswerStore(path, model=model.name, log=log)


def answer_store_of(main: Path, log: Callable[[str], None] = lambda line: None) -> AnswerStore:
    """The answer store of the main model in a file; no weights are loaded.

    Raises:
        ModelFileError, ModelError: the file cannot be read, or is no model.
    """
    return open_answer_store(open_header(main), log)


def start_keeping(model: Model, log: Callable[[str], None]) -> AnswerStore:
    """The answer store of a main model whose answers will be kept; the first time, log what that means.

    Raises:
        ModelFileError: the model's file cannot be read.
    """
    store = open_answer_store(model, log)
    if store.create():
        log(
            f"learning: prompts and answers are kept as tokens in {store.path}, which only you can read; "
            "specdec datastore show lists them, specdec datastore clear deletes them"
        )
        if why := extras.without_torch():
            log(f"learning: lookups use them, but {why}")
    return store


def answer_stores(
    folder: Path | None = None, log: Callable[[str], None] = lambda line: None
) -> list[AnswerStore]:
    """All answer stores on this machine, or those in one of the datastore's folders."""
    folders = datastore.folders() if folder is None else [folder]
    paths = [path for each in folders for path in sorted(each.glob(f"*{datastore.ANSWERS}"))]
    return [AnswerStore(path, log=log) for path in paths]


def _uri(path: Path, mode: str = "mode=rw") -> str:
    """Of a database for SQLite, which never creates it."""
    return f"{path.absolute().as_uri()}?{mode}"


@contextlib.contextmanager
def _connection(
    uri: str, journal: str = "DELETE", max_steps: int = _MAX_STEPS
) -> Iterator[sqlite3.Connection]:
    """A connection to an existing file, which ends an unfinished transaction when it is closed.

    Raises:
        sqlite3.Error: as its calls, also for an error message that quotes damaged text.
    """
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_ADD_TIMEOUT)
    try:
        connection.text_factory = bytes  # damaged text may not be UTF-8
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_ROW)
        connection.set_progress_handler(lambda: True, max_steps)  # ends a statement that takes so many
        for pragma in (*_PRAGMAS, f"journal_mode = {journal}"):
            connection.execute(f"PRAGMA {pragma}")
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        if not {sql for (sql,) in found} <= _EXPECTED:
            raise sqlite3.DatabaseError("it is of another program")  # a table may be a view without an end
        yield connection
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"a damaged message: {error}") from None
    finally:
        connection.close()


def _fill(connection: sqlite3.Connection, answers: Iterable[KeptAnswer], model: str) -> None:
    """Write answers into an empty database."""
    connection.execute("BEGIN IMMEDIATE")
    _prepare(connection, model)
    for answer in answers:
        _insert(connection, answer, answer.number)
    connection.execute("COMMIT")


def _recovered(content: bytes) -> list[KeptAnswer]:
    """The answers that can be read from the content of a damaged file, the oldest first."""
    found: dict[bytes, KeptAnswer] = {}
    for number, seconds, temperature, n_prompt, digest, tokens in damaged_rows.rows(content):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if digest not in found:
                found[digest] = _decoded(number, seconds, temperature, n_prompt, digest, tokens)
    # The digest does not cover the number. A wrong one must not be higher than those of later answers.
    latest, answers = _first_number(), dict[int, KeptAnswer]()
    for answer in sorted(found.values(), key=lambda each: (each.number > latest, each.number)):
        number = answer.number
        if not 0 < number <= latest or number in answers:
            number = max(answers, default=0) + 1
        answers[number] = replace(answer, number=number)
    return [answers[number] for number in sorted(answers)]


def _prepare(connection: sqlite3.Connection, model: str) -> None:
    """Create the tables, and write the model's name."""
    for statement in _SCHEMA:
        connection.execute(statement)
    if not connection.execute("SELECT 1 FROM sqlite_sequence WHERE name = 'answers'").fetchone():
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('answers', ?)", [_first_number()])
    name = model.encode("utf-8", "surrogateescape")
    if name and _model_name(connection) != model:
        connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('model', ?)", [name])


def _first_number() -> int:
    """Microseconds since 1970. An addition takes longer, so the numbers of a deleted file are lower."""
    return time.time_ns() // 1000


def _insert(connection: sqlite3.Connection, answer: KeptAnswer, number: int | None) -> None:
    """Insert an answer, unless it is there. number: None: the next one."""
    tokens = answer.tokens.astype(_TOKEN).tobytes()
    connection.execute(
        "INSERT OR IGNORE INTO answers (number, time, temperature, n_prompt, digest, tokens)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        [number, answer.time, answer.temperature, answer.n_prompt, _digest(answer.n_prompt, tokens), tokens],
    )


def _digest(n_prompt: int, tokens: bytes) -> bytes:
    """16 bytes that identify a prompt with its answer."""
    return hashlib.sha256(n_prompt.to_bytes(8, "little") + tokens).digest()[:16]


def _decoded(number: int, seconds: Any, temperature: Any, n_prompt: Any, digest: Any, raw: Any) -> KeptAnswer:
    """The answer of a row.

    Raises:
        ValueError, TypeError, OverflowError: it is damaged.
    """
    if not (isinstance(n_prompt, int) and isinstance(raw, bytes)):
        raise TypeError
    if digest != _digest(n_prompt, raw) or not 0 <= n_prompt <= len(raw) // _TOKEN.itemsize:
        raise ValueError
    if not (0 <= seconds < _LAST_TIME and 0 <= temperature < math.inf):
        raise ValueError
    tokens = np.frombuffer(raw, _TOKEN).astype(np.int32)
    return KeptAnswer(number, float(seconds), float(temperature), n_prompt, tokens)


def _model_name(connection: sqlite3.Connection) -> str:
    found = connection.execute("SELECT value FROM meta WHERE key = 'model'").fetchone()
    name = found[0].decode("utf-8", "replace") if found and isinstance(found[0], bytes) else ""
    return name if name.isprintable() else ""
