"""Write files atomically; read those of specdec and of other programs, and those that a user names.

After a crash during a write, the file has either its old or its new content. Only regular files are read, as
far as a size that is given: a pipe in the place of a file would be waited for, and a device can be endless.
"""

import codecs
import contextlib
import errno
import glob
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from spec_local.errors import InvalidRequest

ABANDONED = 3600.0
"""Seconds after its last write when a temporary file is assumed to be left over from a killed process."""


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True, make_folder: bool = True) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it if the block succeeds, and is deleted otherwise.

    durable: flush it to disk first, so that the old or the new content also survives a power loss.
    make_folder: create its folder if there is none.

    Raises:
        OSError: it cannot be written; names a file, `path` if the system does not say which.
    """
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{path.name}.", ".part"
    for left in path.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "rb"):
            yield temporary
            if durable:
                os.fsync(descriptor)  # takes 0.5 ms for a small file, 40 ms for 100 MB
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def expanded(name: str | Path) -> Path:
    """A path that a user gave, with ~ and ~user replaced by the home directory.

    Raises:
        InvalidRequest: the home directory is unknown, and no file of this name exists.
    """
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        if path.exists():
            return path
        raise InvalidRequest(
            f"{name}: no home directory is known for {path.parts[0]}: give the full path"
        ) from None


@contextlib.contextmanager
def saving(path: Path) -> Iterator[Path]:
    """As `replacing`, for a path that a user gave.

    Raises:
        InvalidRequest: it cannot be written; an existing file is unchanged.
    """
    _check_name(path)
    try:
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise InvalidRequest(f"{path} is not a regular file: give another path")
        with replacing(Path(os.path.realpath(path))) as temporary:  # do not replace a symbolic link
            yield temporary
    except OSError as error:
        advice = "give another path"
        if is_full(error):
            advice = f"the disk is full, and nothing was lost; free some space, or {advice}"
        why = error.strerror or " ".join(map(str, error.args))  # NumPy's errors have no number
        raise InvalidRequest(f"{path} cannot be written ({why}): {advice}") from None


def check_target(target: Path, source: Path, *, force: bool) -> None:
    """Check that a draft can be written to `target`.

    Raises:
        InvalidRequest: it is the source, a folder or, without `force`, an existing file.
    """
    if target.exists():
        if target.samefile(source):
            raise InvalidRequest(f"{target} is the source model itself: give another `target`")
        if target.is_dir():
            raise InvalidRequest(f"{target} is a folder: give the path of a file")
        if not force:
            raise InvalidRequest(f"{target} exists: give another `target`, or `force` to replace it")


def is_full(error: OSError) -> bool:
    """Return whether an error says that the disk is full, or the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class NotRegular(OSError):
    """A path is that of a pipe, a device or a folder."""


def opened(path: Path) -> BufferedReader:
    """Open a regular file to read it, without waiting.

    Raises:
        NotRegular: it is something else.
        OSError: it cannot be read.
    """
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe may have no writer
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotRegular(errno.EINVAL, "not a regular file", path)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it is something else, cannot be read, or is larger than `max_bytes`.
    """
    with opened(path) as file:
        is_larger = os.fstat(file.fileno()).st_size > max_bytes
        content = b"" if is_larger else file.read(max_bytes + 1)  # it may grow meanwhile
    if is_larger or len(content) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open a file at a path that a user gave.

    Raises:
        InvalidRequest: it cannot be read.
    """
    _check_name(path)
    try:
        with opened(path) as file:
            yield file
    except NotRegular:
        raise InvalidRequest(f"{path} is not a regular file: give another path") from None
    except FileNotFoundError:
        raise InvalidRequest(f"{path} does not exist: check the path") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def _check_name(path: Path) -> None:
    try:
        valid = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        valid = False
    if not valid:
        raise InvalidRequest(f"{str(path)!r} cannot be a file name: give another path")


def read_text(path: Path, max_bytes: int) -> str:
    """`read_input`, as text; raises InvalidRequest if it is not UTF-8, too."""
    return decoded(read_input(path, max_bytes), str(path))


def read_input(path: Path, max_bytes: int) -> bytes:
    """The content of a file or pipe at a path that a user gave.

    Raises:
        InvalidRequest: it cannot be read, or has more than `max_bytes`.
    """
    _check_name(path)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}): check the file") from None
    return limited(content, str(path), max_bytes)


def limited(raw: bytes, source: str, max_bytes: int) -> bytes:
    """The same; raises InvalidRequest, naming the source, if there are more than `max_bytes`."""
    if len(raw) > max_bytes:
        raise InvalidRequest(f"{source} is larger than {max_bytes >> 20} MiB: give a smaller one")
    return raw


def check_encoding(raw: bytes, source: str) -> None:
    """Raise InvalidRequest if a text is UTF-16, as some editors on Windows save it."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRequest(f"{source} is UTF-16: save it as UTF-8")


def decoded(raw: bytes, source: str) -> str:
    """Decode UTF-8 with or without a byte order mark; raises InvalidRequest, naming the source."""
    check_encoding(raw, source)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{source} is not UTF-8 (byte {error.start}): convert it first, for example with iconv"
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small cache file, without flushing it to disk: a file damaged by a power loss is rebuilt."""
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(content)


def format_size(n: int) -> str:
    """Format `n` bytes for display: 4.2 MB, 98 MB, 4.7 GB."""
    if n >= 1e9:
        return f"{n / 1e9:.1f} GB"
    return f"{n / 1e6:.0f} MB" if n >= 1e7 else f"{n / 1e6:.1f} MB"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
