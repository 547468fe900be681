"""Files of records, to which new ones are appended: a damaged record does not hide those after it.

Each record starts with a marker, and its checksum also covers the key of the file. Numbers are little-endian.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEAD = struct.Struct("<8sIIQ")  # marker, words, checksum of key, number and content, number
_MARKER = b"specdec1"  # not in any tokens: the last byte of a token is 0, because vocabularies are smaller
_NUMBER, _WORD = 8, 4  # bytes


def encode(key: bytes, number: int, content: bytes) -> bytes:
    """A record with a number and a content of whole words, of four bytes each. key: 16 bytes."""
    checksum = zlib.crc32(key + number.to_bytes(_NUMBER, "little") + content)
    return _HEAD.pack(_MARKER, len(content) // _WORD, checksum, number) + content


def decode(key: bytes, file: bytes) -> Iterator[tuple[int, bytes, int]]:
    """The number and content of each record, and the offset of its end; one that is cut off ends the file.

    Raises:
        ValueError: something in the file is not an intact record; all intact ones have been returned before.
    """
    at, n_found, damaged = 0, 0, False
    while at < len(file):
        marker, end = file[at : at + len(_MARKER)], len(file) + 1
        if marker == _MARKER and at + _HEAD.size <= len(file):
            _, n_words, checksum, number = _HEAD.unpack_from(file, at)
            start = at + _HEAD.size
            end = start + n_words * _WORD
            if end <= len(file) and zlib.crc32(key + file[start - _NUMBER : end]) == checksum:
                yield number, file[start:end], end
                at, n_found = end, n_found + 1
                continue
        following = file.find(_MARKER, at + 1)
        incomplete = following < 0 and _MARKER.startswith(marker) and end > len(file)
        damaged = damaged or not incomplete
        at = following if following >= 0 else len(file)
    if damaged:
        raise ValueError(
            "is damaged" if n_found else "is damaged or belongs to another version or vocabulary"
        )


def append(path: Path, at: int, record: bytes) -> None:
    """Write a record to a file, which only its owner can read, at the end of the last intact one.

    Raises:
        OSError: it cannot be written; the record may be there in part.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        os.ftruncate(file, at)  # a kill or a full disk may have left a partial record
        os.lseek(file, 0, os.SEEK_END)
        while record:
            record = record[os.write(file, record) :]
    finally:
        os.close(file)
