"""The output file of a batch, in JSON Lines; it also records which prompts are done.

Each line is written to disk before the next prompt starts. If the process is killed, the file has complete
lines and perhaps a partial last one, which is removed when the file is opened again.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from spec_local.chat.request import ChatRequest
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.images.media_file import MediaFile
from spec_local.settings import GenerationSettings
from spec_local.system.files import replacing

_MAX_LINE = 1 << 28  # bytes; an answer as long as any context, with its log probabilities, has less
_LINE_START = b'{"index": '


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt of a batch.

    index: its position, from 0. id: the user's name for it. key: a hash of the prompt, of the model, and of
    all settings except those that affect only the speed; it does not include the context length and the
    precision of the KV cache. images: files of those that stand before the prompt; `request` is without them.
    """

    index: int
    id: str | int | None
    request: ChatRequest
    settings: GenerationSettings
    key: str
    images: Sequence[Path] = ()

    @property
    def with_images(self) -> ChatRequest:
        """The request with its images, which are read now.

        Raises:
            InvalidRequest: one cannot be read, or is no valid image.
        """
        if not self.images:
            return self.request
        return replace(self.request, images=[MediaFile.open(path) for path in self.images])


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """The output of a batch, and the answers that it already contains.

    Create it with `open_answers` for a file, or directly for a stream that is only written, such as standard
    output.

    keys: of the prompts that have been answered, by index. cut_short: the indices of those whose answer was
    not ended by the model. durable: whether to flush each line to disk.
    """

    stream: BinaryIO
    name: str = "standard output"
    keys: Mapping[int, str] = field(default_factory=dict)
    cut_short: Collection[int] = ()
    durable: bool = False

    def unanswered(self, prompts: Sequence[BatchPrompt]) -> list[BatchPrompt]:
        """Return the prompts without an answer.

        Raises:
            InvalidRequest: an answer does not belong to these prompts.
        """
        keys = {prompt.index: prompt.key for prompt in prompts}
        for index, key in self.keys.items():
            if keys.get(index) != key:
                raise InvalidRequest(
                    f"{self.name} was written for another prompt {index}, other settings or another model: "
                    f'give another `output`, or remove the line with "index": {index}'
                )
        return [prompt for prompt in prompts if prompt.index not in self.keys]

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; after an error, none of it is in the file."""
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
def open_answers(path: Path) -> Iterator[BatchOutput]:
    """Open an output file to resume a batch; a pipe or a device is only written.

    A partial last line and the lines of failed prompts are removed. A lock keeps other processes from
    opening the file; it is released when the process ends.

    Raises:
        InvalidRequest: the file contains something else; it is left unchanged.
        SpecLocalError: another process is writing to it.
        OSError: it cannot be opened.
    """
    name = str(path)
    if path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as stream:
            yield BatchOutput(stream, name)
        return
    path = path.resolve()
    if not path.parent.is_dir():  # FileLock would create it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    with _locked(path, name):
        keys, cut_short, clean = _read_keys(path, name)
        if not clean:
            with replacing(path) as temporary:
                shutil.copymode(path, temporary)
                with path.open("rb") as old, temporary.open("wb") as new:
                    new.writelines(line.rstrip(b"\n") + b"\n" for line in old if _parse(line))
        # Unbuffered: closing the file must not retry a write that failed.
        with path.open("ab", buffering=0) as stream:
            yield BatchOutput(stream, name, keys, cut_short, durable=True)


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise SpecLocalError(
            f"another specdec process is writing to {name}: wait for it or give another `output`"
        ) from None
    try:
        yield
    finally:
        # Deleted while it is held: another process that has just opened it finds it deleted and retries.
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()


def _read_keys(path: Path, name: str) -> tuple[dict[int, str], set[int], bool]:
    """Read the keys of the answers by index, and the indices of those that were cut short.

    Also returns whether all lines are complete answers.
    """
    keys: dict[int, str] = {}
    cut_short: set[int] = set()
    clean = True
    if not path.exists():
        return keys, cut_short, clean
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), 1):
            try:
                answer = _parse(line)
            except ValueError:
                raise InvalidRequest(
                    f"{name}, line {number} is not an answer of a batch: give another `output`"
                ) from None
            if answer:
                index, key, is_cut = answer
                keys[index] = key
                (cut_short.add if is_cut else cut_short.discard)(index)
            clean = clean and answer is not None and line.endswith(b"\n")
    return keys, cut_short, clean


def _parse(line: bytes) -> tuple[int, str, bool] | None:
    """Return the index and key of an answer, and whether it was cut short.

    None for a failed prompt and for a partial line.

    Raises:
        ValueError: the line was not written by a batch.
    """
    try:
        record = json.loads(line)
        index, key = record["index"], record["key"]
        if not isinstance(index, int) or not isinstance(key, str) or not {"content", "error"} & record.keys():
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        if not line.endswith(b"\n") and line[: len(_LINE_START)] == _LINE_START[: len(line)]:
            return None
        raise ValueError from None
    return (index, key, record.get("stop_type") in ("limit", "word")) if "content" in record else None
