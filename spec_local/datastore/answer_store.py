"""The answer store: whole prompts and answers of one main model on disk, to train a drafter on them.

It is a file in the datastore's folder of the model's vocabulary, named after the model's content: `records`,
of which the first has the model's name, and each other one an answer. Answers are appended. Where something
else changes, the file is replaced by a new one: when the oldest answers are dropped, or one is damaged.
Writers hold the lock of the folder. Readers do not: they rely on checksums.

A problem with the file never makes an answer fail: it is logged once. A damaged file is kept beside the new
one, which has all answers that the damage has not reached.
"""

import contextlib
import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from spec_local.datastore import copies, datastore, records
from spec_local.errors import ModelFileError
from spec_local.llama.headers import open_header
from spec_local.llama.identity import content_key
from spec_local.llama.model import Model
from spec_local.system import extras
from spec_local.system.files import read_bytes, replacing
from spec_local.text import counted

MAX_TOKENS = 1_000_000
"""Capacity in tokens: 4 MB, and as much text as two cores read in a few hours of training."""
_MIN_ANSWER = 4  # tokens
_MAX_FILE_SIZE = 64 << 20  # bytes; tokens take 4 MB, and so many short answers less than as much again
_ADD_TIMEOUT = 2.0  # seconds that an answer may wait for the lock; a merge of the datastore takes one
_COPY_TIMEOUT = 10.0  # seconds that a training may wait for it
_POLL = 0.005  # seconds between two attempts to get the lock; an addition takes a few milliseconds
_MAX_SET_ASIDE = 3  # damaged files that are kept for each store
_LAST_TIME = 1e11  # seconds since 1970: thousands of years from now, and not too large for a date
_NAME = 0  # number of the record with the model's name, padded with zero bytes
_HEAD = struct.Struct("<ddI")  # of an answer: time, temperature, n_prompt
_TOKEN = np.dtype("<i4")


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


@dataclass(slots=True)
class _File:
    """What is in the file of a store.

    name: of the main model; None: there is none. answers: the oldest first. end: of the last intact record,
    in bytes. is_damaged: something else is there, too.
    """

    name: str | None = None
    answers: list[KeptAnswer] = field(default_factory=list)
    end: int = 0
    is_damaged: bool = False


class AnswerStore:
    """The kept answers of one main model. Any number of threads and processes may use it at the same time.

    Args:
        path: of the file; it and its folder are created by the first addition, for the owner only.
        model: file name of the main model, for `AnswerContents`.
        max_tokens, max_answers: capacity; the oldest answers are dropped first.
        add_timeout: seconds that an addition waits for the lock.
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
        pause: float = 60.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path = path
        self.read_only = False
        """True if `add` does nothing."""
        self._model, self._max_tokens, self._max_answers, self._log = model, max_tokens, max_answers, log
        self._add_timeout, self._pause = add_timeout, pause
        self._logged: set[str] = set()
        self._retry_at = -math.inf  # on the monotonic clock
        self._key = hashlib.sha256(path.stem.encode()).digest()[:16]

    @property
    def key(self) -> str:
        """The key of the main model's content: see `spec_local.llama.identity`."""
        return self.path.stem

    def create(self) -> bool:
        """Create the file if there is none; returns True if it was created. Problems are only logged."""
        with self._problems_logged(), self._locked(self._add_timeout):
            created = not self.path.exists()
            self._write()
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
            self._write(added)

    def answers(self) -> list[KeptAnswer]:
        """All answers, the oldest first; of a damaged file, those that can be read, which is logged."""
        return self._known().answers

    def answers_to_copy(self, folder: Path) -> list[KeptAnswer]:
        """As `answers`, after creating and listing a folder of `copies` for what will be made from them.

        Raises:
            OSError: the folder cannot be created, or the list cannot be written.
        """
        with self._locked(_COPY_TIMEOUT):
            copies.add(self.path.parent, folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.answers()  # afterwards: clearing these answers deletes the folder

    def end_copy(self, folder: Path, head: Path) -> None:
        """Delete a folder of copies, and list the head that has learned from them in its place.

        Raises:
            OSError: the folder cannot be deleted, or the list cannot be written.
        """
        copies.delete(folder)
        with self._locked(_COPY_TIMEOUT):
            copies.replace(self.path.parent, folder, head)

    def count_after(self, number: int) -> int:
        """Count the answers with a higher number; takes a few milliseconds."""
        return sum(answer.number > number for answer in self.answers())

    def contents(self) -> AnswerContents:
        """A summary for display."""
        known, size = self._known(), 0
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
        times = [answer.time for answer in known.answers]
        return AnswerContents(
            self.path,
            len(known.answers),
            sum(len(answer.tokens) for answer in known.answers),
            size,
            min(times, default=None),
            max(times, default=None),
            known.name if known.name and known.name.isprintable() else "",
        )

    def _known(self) -> _File:
        """What can be read of the file; problems are only logged."""
        try:
            known = self._read()
        except OSError as error:
            self._log_once(f"{self.path} cannot be read ({datastore.reason(error)})")
            return _File()
        if known.is_damaged:
            self._log_once(f"{self.path} is damaged: {counted(len(known.answers), 'answer')} can be read")
        return known

    def _read(self) -> _File:
        """What is in the file.

        Raises:
            OSError: it cannot be read, or is something else, which is neither read nor replaced.
        """
        known, content = _File(), b""
        with contextlib.suppress(FileNotFoundError):
            content = read_bytes(self.path, max(_MAX_FILE_SIZE, 16 * self._max_tokens))
        try:
            for number, record, end in records.decode(self._key, content):
                known.end = end
                if number == _NAME:
                    known.name = record.rstrip(b"\0").decode("utf-8", "surrogateescape")
                elif answer := _decoded(number, record):
                    known.answers.append(answer)
                else:
                    known.is_damaged = True
        except ValueError:
            known.is_damaged = True
        return known

    # Below, the lock is held

    def _write(self, added: KeptAnswer | None = None) -> None:
        """Add an answer, unless it is there already, and drop the oldest ones and what is damaged.

        A kill at any time leaves the old file or the new one.

        Raises:
            OSError: the file cannot be read or written.
        """
        known = self._read()
        answers, name = known.answers, self._model or known.name or ""
        new = b""
        if added and not any(_is_same(added, each) for each in answers):
            last = max((answer.number for answer in answers), default=0)
            # An addition takes longer than a microsecond, so the numbers of a deleted file are lower.
            added = replace(added, number=max(last + 1, time.time_ns() // 1000))
            answers, new = [*answers, added], self._record(added)
        kept = self._latest(answers)
        if known.name == name and not known.is_damaged and len(kept) == len(answers):
            records.append(self.path, known.end, new)
            return
        aside = self._set_aside() if known.is_damaged else None
        raw = name.encode("utf-8", "surrogateescape")
        first = records.encode(self._key, _NAME, raw.ljust(-len(raw) % 4 + len(raw), b"\0"))
        with replacing(self.path) as temporary:
            temporary.write_bytes(b"".join([first, *map(self._record, kept)]))
        if aside:
            self._log_once(
                f"{self.path} was damaged: the {counted(len(known.answers), 'answer')} that can be read "
                f"{'is' if len(known.answers) == 1 else 'are'} in it again, and the damaged file is kept "
                f"beside it as {aside.name}"
            )

    def _record(self, answer: KeptAnswer) -> bytes:
        head = _HEAD.pack(answer.time, answer.temperature, answer.n_prompt)
        return records.encode(self._key, answer.number, head + answer.tokens.astype(_TOKEN).tobytes())

    def _latest(self, answers: Sequence[KeptAnswer]) -> list[KeptAnswer]:
        """The latest answers that fit, the oldest first."""
        kept, room = [], self._max_tokens
        for answer in reversed(answers[-self._max_answers :]):
            room -= len(answer.tokens)
            if room < 0:
                break
            kept.append(answer)
        return kept[::-1]

    def _set_aside(self) -> Path:
        """Keep a copy of the damaged file; the oldest of more than three are deleted."""
        content = self.path.read_bytes()
        # Named after the content: after a kill, it is not kept twice.
        prefix = f"{self.path.name}{datastore.DAMAGED}"
        aside = self.path.with_name(prefix + hashlib.sha256(content).hexdigest()[:8])
        with replacing(aside) as temporary:
            temporary.write_bytes(content)
        kept = sorted(self.path.parent.glob(f"{prefix}*"), key=lambda path: path.stat().st_mtime)
        for oldest in kept[:-_MAX_SET_ASIDE]:
            oldest.unlink()
        return aside

    # Locking and logging

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
        except OSError as error:
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


def _is_same(one: KeptAnswer, other: KeptAnswer) -> bool:
    """Return whether two are the same answer to the same prompt."""
    return one.n_prompt == other.n_prompt and np.array_equal(one.tokens, other.tokens)


def _decoded(number: int, record: bytes) -> KeptAnswer | None:
    """The answer of a record; None: it is impossible."""
    if len(record) < _HEAD.size:
        return None
    seconds, temperature, n_prompt = _HEAD.unpack_from(record)
    tokens = np.frombuffer(record, _TOKEN, offset=_HEAD.size).astype(np.int32)
    if not (0 <= seconds < _LAST_TIME and 0 <= temperature < math.inf and n_prompt <= len(tokens)):
        return None
    return KeptAnswer(number, seconds, temperature, n_prompt, tokens)
