"""What surrounds the pixels in an image file: its format, its size, and the parts that a decoder needs.

Pillow is given only those parts. Everything else stays unread: colour profiles, comments, thumbnails and
further frames, and metadata, of which only EXIF's orientation is of use. Reading it costs time, damaged
metadata makes Pillow warn, and compressed texts can grow. The size is known, too, before Pillow allocates
anything.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from spec_local.errors import InvalidRequest

MAX_PARTS: Final = 100_000
"""Chunks and blocks that are read: a PNG of 32 MiB in chunks of 8 KiB has 4,000, a hostile one millions."""

MAX_SCANS: Final = 64
"""Of a progressive JPEG. Encoders write about ten; each costs time for the whole image, but few bytes."""

_CONVERT = "convert the file to PNG or JPEG"


class Container(NamedTuple):
    """What is known of an image before it is decoded.

    Attributes:
        width, height: in pixels, as stored: before the orientation is applied.
        orientation: EXIF's, 1 to 8; 1 if there is none, or none that is valid.
        file: a file of the same format with no more than the first image.
    """

    format: str
    width: int
    height: int
    orientation: int
    file: bytes


def read(data: bytes) -> Container:
    """Parse the container of an image; its content decides on the format.

    Raises:
        InvalidRequest: it is of no supported format, or damaged; one line without the name of the file.
    """
    for beginning, parse in _PARSERS:
        if beginning.match(data):
            try:
                return parse(data)
            except (struct.error, IndexError):
                raise damaged("it ends too early") from None
    what = _other_kind(data)
    advice = "download the image itself" if what.endswith("web page") else _CONVERT
    raise InvalidRequest(f"{what}: {advice}")


def is_known(data: bytes) -> bool:
    """Return whether a file begins as an image, or as something else that is given in place of one."""
    return any(beginning.match(data[:4096]) for beginning, _ in (*_PARSERS, *_OTHERS))


def damaged(why: str, noun: str = "image") -> InvalidRequest:
    """The error for a file that cannot be decoded."""
    return InvalidRequest(f"the {noun} is damaged ({why}): save or download it again")


def each_part(noun: str = "image") -> Iterator[int]:
    """Count the parts of a file, for a loop that ends with the last one.

    Raises:
        InvalidRequest: there are more than `MAX_PARTS`.
    """
    yield from range(MAX_PARTS)
    raise damaged("it has too many parts", noun)


def _png(data: bytes) -> Container:
    header, transparency, palette = b"", b"", b""
    pixels: list[bytes] = []
    orientation = 1
    for kind, content in _png_chunks(data):
        match kind:
            case b"IHDR" if not header:
                header = content
            case b"PLTE" if not pixels:
                palette = content
            case b"tRNS" if not pixels:
                transparency = content
            case b"IDAT":
                pixels.append(content)
            case b"eXIf":
                orientation = _orientation(content)
    width, height, bits, colours = struct.unpack_from(">IIBB", header)
    chunks = [(b"IHDR", header)]
    if colours == 3:
        if not palette:
            raise damaged("it has no palette")
        chunks.append((b"PLTE", palette))
    if transparency:
        chunks.append((b"tRNS", _transparency(transparency, bits, colours)))
    # One chunk, as Pillow seeks each of many small ones.
    chunks += [(b"IDAT", b"".join(pixels)), (b"IEND", b"")]
    return Container("PNG", width, height, orientation, data[:8] + b"".join(map(_png_chunk, chunks)))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The kind and content of each chunk, to the end of the image; checks the sums of those that matter."""
    at = 8
    for _ in each_part():
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        content = data[at + 8 : at + 8 + length]
        (expected,) = struct.unpack_from(">I", data, at + 8 + length)
        if kind[:1].isupper() and zlib.crc32(content, zlib.crc32(kind)) != expected:
            raise damaged("a checksum is wrong")
        yield kind, content
        at += 12 + length


def _png_chunk(chunk: tuple[bytes, bytes]) -> bytes:
    kind, content = chunk
    summed = kind + content
    return b"".join((struct.pack(">I", len(content)), summed, struct.pack(">I", zlib.crc32(summed))))


def _transparency(content: bytes, bits: int, colours: int) -> bytes:
    """The transparent value in the 8 bits in which Pillow compares it, which scales the pixels only."""
    if colours == 0 and bits in (2, 4):
        (value,) = struct.unpack_from(">H", content)
        return struct.pack(">H", value * 255 // ((1 << bits) - 1) & 0xFFFF)
    if colours == 2 and bits == 16:
        return struct.pack(">3H", *(value >> 8 for value in struct.unpack_from(">3H", content)))
    return content


_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
"""A JPEG marker; within a scan, zero bytes and restart markers follow 0xFF."""
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_LEFT_OUT = {*range(0xE1, 0xF0), 0xFE} - {0xEE}
"""Application segments and comments: not JFIF's and Adobe's, which tell how colours are stored."""


def _jpeg(data: bytes) -> Container:
    parts = [data[:2]]
    width = height = scans = 0
    orientation = 1
    at = 2
    for _ in each_part():
        found = _MARKER.search(data, at)
        if found is None:
            raise damaged("it ends too early")
        marker = found[0][-1]
        if scans:
            parts.append(data[at : found.start()])
        if marker == 0xD9:
            parts.append(b"\xff\xd9")
            break
        if marker in (0x01, 0xD8):  # they have no content
            at = found.end()
            continue
        (length,) = struct.unpack_from(">H", data, found.end())
        content = data[found.end() + 2 : found.end() + length]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", content, 1)
        elif marker == 0xDA:
            scans += 1
        elif marker == 0xE1 and orientation == 1 and content.startswith(b"Exif\0\0"):
            orientation = _orientation(content[6:])
        if marker not in _LEFT_OUT:
            parts += [bytes((0xFF, marker)), data[found.end() : found.end() + length]]
        at = found.end() + length
    if scans > MAX_SCANS:
        raise InvalidRequest(f"the JPEG has {scans} scans, more than the limit of {MAX_SCANS}: save it again")
    return Container("JPEG", width, height, orientation, b"".join(parts))


def _gif(data: bytes) -> Container:
    """The first frame, which can be larger than the screen that the header gives."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _colours_size(flags)
    parts = [data[:at]]
    n_parts = each_part()
    while True:
        start, _ = at, next(n_parts)
        match data[at]:
            case 0x2C:
                left, top, *size = struct.unpack_from("<4H", data, at + 1)
                width, height = max(width, left + size[0]), max(height, top + size[1])
                parts.append(data[at:])
                return Container("GIF", width, height, 1, b"".join(parts))
            case 0x21:
                at = _after_blocks(data, at + 2)
                if data[start + 1] == 0xF9:  # the transparent colour
                    parts.append(data[start:at])
            case 0x3B:
                raise damaged("it has no frame")
            case _:
                at += 1  # as browsers and Pillow do


def _colours_size(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_blocks(data: bytes, at: int) -> int:
    n_parts = each_part()
    while size := data[at]:
        next(n_parts)
        at += 1 + size
    return at + 1


def _webp(data: bytes) -> Container:
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(_slice(data, 24, 3), "little") + 1
        height = int.from_bytes(_slice(data, 27, 3), "little") + 1
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    orientation, at = 1, 12
    for _ in range(MAX_PARTS):
        if kind != b"VP8X" or at + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            orientation = _orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        at += 8 + length + length % 2
    return Container("WEBP", width, height, orientation, data)


def _slice(data: bytes, at: int, n: int) -> bytes:
    if at + n > len(data):
        raise IndexError
    return data[at : at + n]


def _bmp(data: bytes) -> Container:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        compression = 0
    else:
        width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression not in (0, 3):  # Pillow unpacks them in Python: seconds for a line of many zeros
        raise InvalidRequest(f"compressed BMP images are not supported: {_CONVERT}")
    return Container("BMP", width, abs(height), 1, data)  # a negative height: from the top down


def _orientation(exif: bytes) -> int:
    """The orientation in EXIF data, of which nothing else is read; 1 if there is none or it is invalid."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if not order:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (n,) = struct.unpack_from(f"{order}H", exif, at)
        for i in range(n):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, at + 2 + 12 * i)
            if tag == 0x0112:
                return value if kind == 3 and count == 1 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _begins(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL | re.IGNORECASE)


_PARSERS: tuple[tuple[re.Pattern[bytes], Callable[[bytes], Container]], ...] = (
    (_begins(rb"\x89PNG\r\n\x1a\n"), _png),
    (_begins(rb"\xff\xd8\xff"), _jpeg),
    (_begins(rb"GIF8[79]a"), _gif),
    (_begins(rb"RIFF.{4}WEBPVP8[ LX]"), _webp),
    (_begins(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0"), _bmp),
)

_OTHERS = (
    (_begins(rb"II\x2a\0|MM\0\x2a|II\x2b\0|MM\0\x2b"), "TIFF images are not supported"),
    (_begins(rb".{4}ftyp(hei|hev|mif1|msf1)"), "HEIC images are not supported"),
    (_begins(rb".{4}ftypavi[fs]"), "AVIF images are not supported"),
    (_begins(rb".{4}ftyp|\x1a\x45\xdf\xa3|RIFF.{4}AVI "), "videos are not supported"),
    (_begins(rb"\xff\x0a|\0\0\0\x0cJXL |\0\0\0\x0cjP  "), "JPEG XL and JPEG 2000 images are not supported"),
    (_begins(rb"\0\0[\x01\x02]\0"), "icons are not supported"),
    (_begins(rb"8BPS"), "Photoshop files are not supported"),
    (_begins(rb"\s*%PDF"), "PDF files are not supported"),
    (
        _begins(rb"(\xef\xbb\xbf)?\s*(<\?xml.{,1000}?)?(<!--.{,1000}?)?<(svg|!doctype svg)"),
        "SVG is not supported",
    ),
    (_begins(rb"(\xef\xbb\xbf)?\s*<(!doctype )?html"), "the file is a web page"),
)
"""What people give instead of a supported image."""


def _other_kind(data: bytes) -> str:
    for beginning, what in _OTHERS:
        if beginning.match(data[:4096]):
            return what
    return "the file is not a JPEG, PNG, GIF, WebP or BMP image"
