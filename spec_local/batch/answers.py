"""A file of answers as JSON lines, which is also the memory of a batch: what it holds is done.

Each line is on the disk before the next prompt is begun. A kill leaves whole lines and perhaps a torn last one, which
goes when the file is opened again.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from filelock import FileLock, Timeout

from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.files import replacing

_BEGINNING = b'{"index": '


class Keyed(Protocol):
    """What can be answered: its number, and a hash of all that decides what may be said."""

    @property
    def index(self) -> int: ...

    @property
    def key(self) -> str: ...


_Asked = TypeVar("_Asked", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Answers:
    """Where the answers of a batch go, and what is known of those that are there.

    Made by `open_answers` for a file; of a stream, such as standard output, nothing is known.

    keys: of the prompts that have been answered, by their index. durable: whether a line must be on the disk.
    """

    stream: BinaryIO
    name: str = "standard output"
    keys: Mapping[int, str] = field(default_factory=dict)
    durable: bool = False

    def left(self, entries: Sequence[_Asked]) -> list[_Asked]:
        """The prompts that have no answer yet.

        Raises:
            InvalidRequest: there is an answer to a prompt that these are not.
        """
        now = {entry.index: entry.key for entry in entries}
        for index, key in self.keys.items():
            if now.get(index) != key:
                raise InvalidRequest(
                    f"{self.name} answers another prompt {index}, or with other settings or another model: give "
                    f'another --output, or remove the line with "index": {index}'
                )
        return [entry for entry in entries if entry.index not in self.keys]

    def append(self, record: dict[str, Any]) -> None:
        """Write one line: when this returns it is on the disk, and when it raises none of it is there."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        start = self.stream.seek(0, os.SEEK_END) if self.durable else 0
        try:
            while line:
                line = line[self.stream.write(line) :]
            self.stream.flush()
            if self.durable:
                os.fsync(self.stream.fileno())
        except BaseException as error:
            if self.durable:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.stream.fileno(), start)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = self.name
            raise


@contextlib.contextmanager
def open_answers(path: Path) -> Iterator[Answers]:
    """Open a file of answers to go on with it; what is no ordinary file (a pipe, a device) is only written to.

    A torn last line, as a kill may leave it, and the lines of prompts that failed are removed. While the file is open no
    other process can open it like this; the lock of a process that was killed is gone with the process.

    Raises:
        InvalidRequest: the file holds something else than answers, and is left as it is.
        SpecLocalError: another process writes to it.
        OSError: it cannot be opened.
    """
    shown = str(path)
    if path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as stream:
            yield Answers(stream, shown)
        return
    path = path.resolve()
    if not path.parent.is_dir():  # the lock would make it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shown)
    with _locked(path, shown):
        keys, tidy = _known(path, shown)
        if not tidy:
            with replacing(path) as temporary:
                shutil.copymode(path, temporary)
                with path.open("rb") as old, temporary.open("wb") as new:
                    new.writelines(line.rstrip(b"\n") + b"\n" for line in old if _answered(line))
        # Without a buffer: what could not be written is not tried again when the file is closed.
        with path.open("ab", buffering=0) as stream:
            yield Answers(stream, shown, keys, durable=True)


@contextlib.contextmanager
def _locked(path: Path, shown: str) -> Iterator[None]:
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise SpecLocalError(
            f"another specdec writes to {shown}: wait for it, or give another --output"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(
            OSError
        ):  # while it is held: who has it open sees that it is gone, and tries again
            Path(lock.lock_file).unlink()
        lock.release()


def _known(path: Path, shown: str) -> tuple[dict[int, str], bool]:
    """The keys of the answers that a file holds, by index; and whether it holds nothing else."""
    keys: dict[int, str] = {}
    tidy = True
    if not path.exists():
        return keys, tidy
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                answer = _answered(line)
            except ValueError:
                raise InvalidRequest(
                    f"{shown}, line {number}: this is no answer of a batch: give another --output"
                ) from None
            if answer:
                index, key = answer
                keys[index] = key
            tidy = tidy and answer is not None and line.endswith(b"\n")
    return keys, tidy


def _answered(line: bytes) -> tuple[int, str] | None:
    """Index and key of an answer; None for a prompt that failed, and for the beginning of a line.

    Raises:
        ValueError: it is nothing that a batch has written.
    """
    try:
        record = json.loads(line)
        index, key = record["index"], record["key"]
        if not isinstance(index, int) or not isinstance(key, str) or not {"content", "error"} & record.keys():
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
            return None
        raise ValueError from None
    return (index, key) if "content" in record else None
