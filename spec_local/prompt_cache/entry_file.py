"""The file of one entry.

Format: `_MAGIC`, the length of the header (4 bytes, little-endian), the header (JSON), its hash; the tokens,
the data, and a hash over header, tokens and data. The hashes find every accident: torn writes, other files,
bad disks. They do not protect against malicious files: whoever can write to the folder can write anything.
"""

import hashlib
import os
from collections.abc import Callable
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from spec_local.prompt_cache.entry import TOKEN_BYTES, CacheEntry
from spec_local.system.files import opened

_HASH_BYTES = 32
_CHUNK = 1 << 22  # bytes to hash, and to read or write, at once; some systems write at most 2 GiB per call
_FAMILY, _MAGIC = b"specdec prompt ", b"specdec prompt 1\n"
_MAX_HEADER = 1 << 12
_FIRST_READ = 1 << 12  # holds header and tokens of a block of 256 in one read


class Damaged(Exception):
    """A file does not have the content that its name promises."""


class OtherVersion(Exception):
    """A file was written by another version of specdec."""


class _Header(BaseModel):
    """parent, identity: hexadecimal. start, n: tokens before the entry, and in it. size: bytes of data."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["cells", "state"]
    identity: str
    block: PositiveInt
    parent: str
    start: NonNegativeInt
    n: NonNegativeInt
    size: NonNegativeInt


def file_size(entry: CacheEntry, identity: bytes, block: int) -> int:
    """The bytes of the file of an entry."""
    return len(_frame(entry, identity, block)) + entry.size + _HASH_BYTES


def write(
    path: Path,
    entry: CacheEntry,
    identity: bytes,
    block: int,
    data: NDArray[np.uint8],
    checkpoint: Callable[[], None],
    *,
    chunk_bytes: int = _CHUNK,
) -> None:
    """Write the file of an entry.

    checkpoint: called before each chunk is written; may wait, or raise an exception, which ends the writing.

    Raises:
        OSError: it cannot be written; what is there of the file remains.
    """
    frame = _frame(entry, identity, block)
    digest = _digest_of(frame)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(frame))
        for start in range(0, entry.size, chunk_bytes):
            chunk = data.data[start : start + chunk_bytes]
            checkpoint()
            digest.update(chunk)
            _write_all(file, chunk)
        checkpoint()
        _write_all(file, memoryview(digest.digest()))


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]  # a disk that becomes full takes a part


def read_entry(path: Path, identity: bytes, block: int) -> CacheEntry:
    """The entry of a file, without reading its data.

    Raises:
        Damaged: the header or the tokens are, or the size of the file is wrong.
        OtherVersion: another version of specdec reads it.
        OSError: it cannot be read, or is not a regular file.
    """
    with opened(path) as file:
        return _read_frame(file, path, identity, block)[0]


def read_data(path: Path, entry: CacheEntry, identity: bytes, block: int) -> NDArray[np.uint8]:
    """The data of an entry, verified.

    Raises: as `read_entry`, and Damaged also if the data is, or is that of another entry.
    """
    with opened(path) as file:
        found, frame = _read_frame(file, path, identity, block)
        if found != entry:
            raise Damaged(path)
        file.seek(len(frame))
        data, digest = np.empty(entry.size, np.uint8), _digest_of(frame)
        for start in range(0, entry.size, _CHUNK):
            chunk = data.data[start : start + _CHUNK]
            if file.readinto(chunk) != len(chunk):
                raise Damaged(path)
            digest.update(chunk)
        if file.read(_HASH_BYTES) != digest.digest():
            raise Damaged(path)
    return data


def _digest_of(data: bytes) -> "hashlib.blake2b":
    """The digest of what has been read or written so far, to be updated with the rest."""
    return hashlib.blake2b(data, digest_size=_HASH_BYTES)


def _frame(entry: CacheEntry, identity: bytes, block: int) -> bytes:
    """All that is before the data."""
    header = _Header(
        kind=entry.kind,
        identity=identity.hex(),
        block=block,
        parent=entry.parent.hex(),
        start=entry.start,
        n=entry.n,
        size=entry.size,
    )
    text = header.model_dump_json().encode()
    return _MAGIC + len(text).to_bytes(4, "little") + text + _digest_of(text).digest() + entry.tokens


def _read_frame(file: BufferedReader, path: Path, identity: bytes, block: int) -> tuple[CacheEntry, bytes]:
    """The entry, and all bytes before the data."""
    content = file.read(_FIRST_READ)
    if not content.startswith(_MAGIC):
        raise OtherVersion(path) if content.startswith(_FAMILY) else Damaged(path)
    at = len(_MAGIC) + 4
    length = int.from_bytes(content[len(_MAGIC) : at], "little")
    if length > _MAX_HEADER:
        raise Damaged(path)
    content += file.read(max(0, at + length + _HASH_BYTES - len(content)))
    text, stored_hash = content[at : at + length], content[at + length : at + length + _HASH_BYTES]
    if _digest_of(text).digest() != stored_hash:
        raise Damaged(path)
    try:
        header = _Header.model_validate_json(text)
        parent = bytes.fromhex(header.parent)
    except ValueError:
        raise Damaged(path) from None
    first = at + length + _HASH_BYTES
    last = first + header.n * TOKEN_BYTES
    size = os.fstat(file.fileno()).st_size
    if size != last + header.size + _HASH_BYTES or (header.identity, header.block) != (identity.hex(), block):
        raise Damaged(path)
    content += file.read(max(0, last - len(content)))
    entry = CacheEntry.of(header.kind, parent, header.start, content[first:last], header.size)
    # The name is a hash of the tokens.
    if entry.key.hex() != path.stem or header.n > block or header.start % block:
        raise Damaged(path)
    return entry, content[:last]
