"""Find the rows of a damaged answer store without SQLite, by the bytes with which each of them begins.

A row is a record of SQLite: the types of its columns, then their values, of which long ones go on in pages
elsewhere (https://www.sqlite.org/fileformat2.html, sections 1.6 and 2.1). Neither the file's header nor its
tree of pages is needed, so that damage loses only the rows in which it is. A row that is put together wrongly
does not have its digest.
"""

import re
import struct
from collections.abc import Iterator
from typing import Any

PAGE_SIZE = 4096
"""Bytes of a page in all files of answer stores; the usual size of SQLite."""
_RESERVED = (0, 12)  # bytes at the end of each page that are not used: in general, and by macOS's own SQLite
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)  # bytes of numbers, by type
_REAL, _ZERO = 7, 8  # types: a float; 0, which is followed by that of 1
_WORK = 4  # bytes that are put together, in sizes of the file: damage may make millions of long rows

_NUMBER = re.compile(rb"[\x80-\xff]{0,7}[\x00-\x7f]\Z")  # of the row, before its header
_HEADER = re.compile(  # its size, and the type of each column
    rb"(?P<size>[\x07-\x0a])\x00(?P<types>[\x01-\x09]{3})\x2c(?P<tokens>[\x80-\xff]{0,3}[\x00-\x7f])",
    re.DOTALL,
)


def rows(content: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield number, time, temperature, n_prompt, digest and tokens of what may be the rows of a file.

    Rows may come twice, and in any order; some are none.
    """
    for reserved in _RESERVED:
        budget = _WORK * len(content)
        for found in _HEADER.finditer(content):
            size, start = found["size"][0], found.start()
            number = _NUMBER.search(content, max(0, start - 8), start)
            n_bytes, odd = divmod(_varint(found["tokens"]) - 12, 2)
            if not number or found.end() - start != size or n_bytes not in range(len(content)) or odd:
                continue
            types = found["types"]
            sizes = [*(_SIZES[each] for each in types), 16, n_bytes]
            budget -= sum(sizes)
            if budget < 0:
                break
            record = _record(content, start, size + sum(sizes), PAGE_SIZE - reserved)
            values = []
            for n in sizes:
                values.append(record[size : size + n])
                size += n
            numbers = [_number(*each) for each in zip(types, values, strict=False)]
            yield _varint(number[0]), *numbers, *values[len(numbers) :]


def _record(content: bytes, start: int, size: int, usable: int) -> bytes:
    """The bytes of a record, as far as they are there. usable: bytes of each page."""
    n_here = size
    if size > usable - 35:
        least = (usable - 12) * 32 // 255 - 23
        n_here = least + (size - least) % (usable - 4)
        if n_here > usable - 35:
            n_here = least
    parts, at = [content[start : start + n_here]], start + n_here
    left = size - n_here
    while left > 0:
        # Here is the number of the page where it goes on, which begins with that of the next one.
        at = (int.from_bytes(content[at : at + 4]) - 1) * PAGE_SIZE
        part = content[at + 4 : at + min(left + 4, usable)] if at >= 0 else b""
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _number(kind: int, value: bytes) -> float:
    if kind >= _ZERO:
        return kind - _ZERO
    if kind == _REAL:
        return float(struct.unpack(">d", value)[0]) if len(value) == 8 else -1.0
    return int.from_bytes(value, signed=True)


def _varint(value: bytes) -> int:
    n = 0
    for byte in value:
        n = n << 7 | byte & 0x7F
    return n
