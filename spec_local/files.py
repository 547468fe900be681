"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import contextlib
import glob
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from spec_local.errors import InvalidRequest

_ABANDONED = 3600.0
"""Seconds after its last write that a temporary file belongs to nobody: who wrote it was killed."""


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and goes when not.

    durable: it is on the disk before it takes the place, so that a loss of power, too, leaves one of the two whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{path.name}.", ".part"
    for left in path.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "rb"):
            yield temporary
            if durable:
                os.fsync(
                    descriptor
                )  # of the file, whoever wrote it: 0.5 ms for a small one, 40 ms for 100 MB
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def expanded(name: str | Path) -> Path:
    """The path that a person means by a name: ~ and ~user are home folders there.

    Raises:
        InvalidRequest: no home folder is known, and no file is called so.
    """
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        if path.exists():
            return path
        raise InvalidRequest(
            f"{name}: no home folder is known for {path.parts[0]}: give the whole path"
        ) from None


@contextlib.contextmanager
def saving(path: Path) -> Iterator[Path]:
    """As `replacing`, at a path that a person gave.

    Raises:
        InvalidRequest: it cannot be written; what was there is still there.
    """
    try:
        if path.exists() and not path.is_file():  # a device would become a file
            raise InvalidRequest(f"{path} is no ordinary file: give another name")
        with replacing(Path(os.path.realpath(path))) as temporary:  # a link goes on pointing at its file
            yield temporary
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written ({error.strerror}): give another place") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """A file at a path that a person gave, open for reading.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise InvalidRequest(f"{path} is no ordinary file: give another name")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise InvalidRequest(f"{path} does not exist: check the path") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def read_text(path: Path, most: int) -> str:
    """The text of a file, or of a pipe, that a person gave.

    Raises:
        InvalidRequest: it cannot be read, has more than `most` bytes, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            return decoded(file.read(most + 1), str(path), most)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}): check the file") from None
    except ValueError as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{path} cannot be read ({error}): check the file") from None


def decoded(raw: bytes, source: str, most: int) -> str:
    """UTF-8, with a byte order mark or without; raises as `read_text` does, of `source`."""
    if len(raw) > most:
        raise InvalidRequest(f"{source} is larger than {most >> 20} MiB: give a smaller text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{source} is not UTF-8 (byte {error.start}): convert it first, for instance with iconv"
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file at once, for a cache: one that a loss of power has damaged is made anew, and must not be waited for."""
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(content)


def format_size(n: int) -> str:
    """`n` bytes for people: 4.2 MB, 98 MB, 4.7 GB."""
    if n >= 1e9:
        return f"{n / 1e9:.1f} GB"
    return f"{n / 1e6:.0f} MB" if n >= 1e7 else f"{n / 1e6:.1f} MB"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
