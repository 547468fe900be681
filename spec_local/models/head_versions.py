"""Versions of the head that learns from a user's answers: for each main model, a folder of heads and a list.

``versions.json`` is replaced as a whole, after the head that it names has been copied, so that a process that
is killed at any time leaves the versions before or after the change. Writers hold a lock; readers do not.
"""

import contextlib
import functools
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout
from pydantic import ConfigDict, Field

from spec_local.errors import ModelFileError, SpecLocalError
from spec_local.llama.identity import content_key
from spec_local.system.files import replacing, sha256, write_atomically
from spec_local.system.folders import user_folder
from spec_local.system.json_file import JsonRecord, read_record
from spec_local.text import printable

Data = Literal["user", "built_in"]
"""Held-out answers of the user, and answers to built-in prompts."""
_LIST, _LOCK = "versions.json", "lock"
_MAX_FILES = 5  # heads that are kept: 10 to 100 MB each
_MAX_VERSIONS = 100  # entries in the list, for the history of acceptance: 500 bytes each
_MAX_BYTES = 1 << 20  # of the list
_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]  # as in the answer store
_Time = Annotated[float, Field(ge=0, lt=1e11)]  # before the year 5000


class HeadVersion(JsonRecord):
    """A head that was trained on the user's answers.

    Attributes:
        number: from 1. file: its name in the folder; older files are deleted, their entries stay.
        size, sha256: of the file, in bytes and hexadecimal.
        trained: seconds since 1970.
        origin: the head that it continues, as a path; "": none.
        origin_key: `content_key` of the head with which this line of versions began; "": they began without.
        n_answers: the user's answers that it has learned from.
        last_answer: number of the last kept answer that it has seen; 0: none.
        before, after: acceptance of the first draft token, 0 to 1, of the head that it continues and its own.
        is_rolled_back: the user or a failure has taken it out of use.
    """

    model_config = ConfigDict(extra="ignore")

    number: Annotated[int, Field(ge=1, lt=1 << 63)]
    file: Annotated[str, Field(pattern=r"^head-[0-9]+\.gguf$")]
    size: _Count
    sha256: str
    trained: _Time
    origin: str = ""
    origin_key: str = ""
    n_answers: _Count = 0
    last_answer: _Count = 0
    before: dict[Data, _Share] = Field(default_factory=dict)
    after: dict[Data, _Share] = Field(default_factory=dict)
    is_rolled_back: bool = False


class _List(JsonRecord):
    """last_round: number of the last kept answer that a round of training has seen, whatever came of it."""

    model_config = ConfigDict(extra="ignore")

    versions: list[HeadVersion] = Field(default_factory=list)
    last_round: _Count = 0


class HeadVersions:
    """The versions of one main model's head, shared by all processes.

    Args:
        main: the main model's file; the first one if it is split.
        log: called with a line about a damaged list, which counts as empty.

    Raises:
        ModelFileError: the main model cannot be read.
    """

    def __init__(
        self, main: Path, log: Callable[[str], None] = lambda line: None, lock_timeout: float = 10.0
    ) -> None:
        try:
            key = content_key(main)
        except OSError as error:
            reason = error.strerror or error
            raise ModelFileError(f"{main} cannot be read ({reason}): check the path") from None
        self.folder = folder_of(key)
        self._log, self._has_logged, self._lock_timeout = log, False, lock_timeout

    def all(self) -> list[HeadVersion]:
        """All versions, the oldest first, also those whose files have been deleted."""
        return self._read()[0].versions

    def current(self) -> HeadVersion | None:
        """The newest version that is in use and whose file is intact; None: there is none."""
        return next(self.usable(), None)

    def usable(self) -> Iterator[HeadVersion]:
        """The versions that are in use and whose files are intact, the newest first."""
        return (v for v in reversed(self.all()) if not v.is_rolled_back and self._is_intact(v))

    def continuing(self, given: Path | None) -> Iterator[HeadVersion]:
        """The current version, and those before it, that began with a head that the user gave.

        Args:
            given: None: those that began with no head.
        """
        try:
            key = self._origin_key(given, self.all())
        except OSError:
            return
        yield from itertools.takewhile(lambda version: version.origin_key == key, self.usable())

    def path(self, version: HeadVersion) -> Path:
        """The file of a version."""
        return self.folder / version.file

    @property
    def last_round(self) -> int:
        """Number of the last kept answer that a round of training has seen; 0: none."""
        return self._read()[0].last_round

    def add(
        self,
        head_file: Path,
        *,
        origin: Path | None = None,
        n_answers: int = 0,
        last_answer: int = 0,
        before: Mapping[Data, float] | None = None,
        after: Mapping[Data, float] | None = None,
    ) -> HeadVersion:
        """Move a head into the folder as the current version, and delete the oldest of more than five.

        If a kill interrupted an earlier call, the same call completes it.

        Args:
            head_file: a GGUF file, which is gone afterwards.
            origin: the head that it continues; None: none.
            n_answers, last_answer, before, after: see `HeadVersion`.

        Raises:
            OSError: a file cannot be read or written.
            SpecLocalError: another process holds the lock.
        """
        with self._changing() as (found, is_damaged):
            digest, versions = sha256(head_file), found.versions
            if versions and versions[-1].sha256 == digest and self._is_intact(versions[-1]):
                head_file.unlink()
                return versions[-1]
            used = [version.number for version in versions]
            if is_damaged:  # heads that a damaged list may have named are not replaced
                names = (path.stem[5:] for path in self.folder.glob("head-*.gguf"))
                used += [int(name) for name in names if name.isdecimal()]
            number = max(used, default=0) + 1
            added = HeadVersion(
                number=number,
                file=f"head-{number}.gguf",
                size=head_file.stat().st_size,
                sha256=digest,
                trained=time.time(),
                origin=printable(str(origin or "")),
                origin_key=self._origin_key(origin, versions),
                n_answers=n_answers,
                last_answer=last_answer,
                before=dict(before or {}),
                after=dict(after or {}),
            )
            with replacing(self.path(added)) as copy:
                shutil.copyfile(head_file, copy)
            versions = [*versions, added][-_MAX_VERSIONS:]
            self._write(_List(versions=versions, last_round=max(found.last_round, last_answer)))
            for old in versions[:-_MAX_FILES]:
                self.path(old).unlink(missing_ok=True)
            head_file.unlink()
            return added

    def rollback(self) -> HeadVersion | None:
        """Take the current version out of use for good; return the one before, which is current now.

        Returns:
            None: there is none; the head that the user gave is used, or none.

        Raises:
            OSError, SpecLocalError: see `add`.
        """
        if current := self.current():
            with self._changing() as (found, _):
                versions = [
                    v.model_copy(update={"is_rolled_back": True}) if v.number == current.number else v
                    for v in found.versions
                ]
                self._write(found.model_copy(update={"versions": versions}))
        return self.current()

    def end_round(self, last_answer: int) -> None:
        """Remember the last kept answer that a round of training has seen, so that no other one repeats it.

        Raises:
            OSError, SpecLocalError: see `add`.
        """
        with self._changing() as (found, _):
            if last_answer > found.last_round:
                self._write(found.model_copy(update={"last_round": last_answer}))

    def _origin_key(self, origin: Path | None, versions: list[HeadVersion]) -> str:
        """The key of the head with which a line of versions began, given the last head of it."""
        if not origin:
            return ""
        if origin.absolute().parent == self.folder.absolute():
            return next((v.origin_key for v in versions if v.file == origin.name), "")
        return content_key(origin)

    def _is_intact(self, version: HeadVersion) -> bool:
        try:
            status = self.path(version).stat()
        except OSError:
            return False
        return status.st_size == version.size and _has_digest(
            self.path(version), version.sha256, status.st_mtime_ns
        )

    def _read(self) -> tuple[_List, bool]:
        """The list, and whether it is damaged, in which case it counts as empty."""
        path = self.folder / _LIST
        try:
            return read_record(path, _List, _MAX_BYTES), False
        except FileNotFoundError:
            return _List(), False
        except (OSError, ValueError) as error:
            if not self._has_logged:
                reason = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is damaged"
                self._log(f"{path} {reason} and is ignored; the heads beside it are kept")
                self._has_logged = True
            return _List(), True

    @contextlib.contextmanager
    def _changing(self) -> Iterator[tuple[_List, bool]]:
        """Hold the lock; yields what `_read` returns."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / _LOCK, timeout=self._lock_timeout, mode=0o600):
                yield self._read()
        except Timeout:
            raise SpecLocalError(
                f"another process has been changing {self.folder} for {self._lock_timeout:.0f} s: try again "
                "when it has ended"
            ) from None

    def _write(self, content: _List) -> None:
        path = self.folder / _LIST
        if self._read()[1]:
            path.replace(path.with_suffix(".damaged"))
        write_atomically(path, content.model_dump_json(indent=1).encode())


def folder_of(key: str) -> Path:
    """The folder of the versions for the main model with a `content_key`."""
    return user_folder("data") / "heads" / key


def roll_back(main: Path, head: Path, error: SpecLocalError, log: Callable[[str], None]) -> bool:
    """Take a main model's current version out of use, which cannot be loaded because of an error.

    Returns:
        False: the head is another file, or the list cannot be written.
    """
    with contextlib.suppress(OSError, SpecLocalError):
        versions = HeadVersions(main)
        if (current := versions.current()) and versions.path(current) == head:
            versions.rollback()
            log(
                f"{head.name}, which learned from your answers, cannot be loaded, and is rolled back: {error}"
            )
            return True
    return False


@functools.cache
def _has_digest(path: Path, digest: str, changed: int) -> bool:
    """Return whether a file has a SHA-256, once a process: 50 MB take 30 ms. changed: when it was written."""
    try:
        return sha256(path) == digest
    except OSError:
        return False
