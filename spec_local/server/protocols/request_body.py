"""The JSON object in the body of an HTTP request, and its fields."""

import importlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from spec_local.errors import InvalidRequest
from spec_local.server.protocols.work import in_thread
from spec_local.system.cancellation import check_wanted

_LARGE = 1 << 16  # bytes: what is larger is read in a thread, since others would wait
_MAX_VALUES = 1 << 20  # in a body: `{"":[]},` is 8 bytes that become 300
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""What may be one, or belong to a pair: programs cut text between the two."""
_HALVES = (rb"\u", b"\xed")  # of which a text of base64 has none: to find that out takes milliseconds
_IMAGES = (b"image", b"audio", b"multimodal_data")  # all forms of images and sound have one of these words
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_ENCODINGS = 2  # one after another, each of which can make a large body of a small one
_MAX_MEMBERS = 1 << 14  # of a file of gzip: one of 20 bytes takes as long as a thousand bytes
_FIRST_PIECE, _PIECE = 1 << 9, 1 << 16  # bytes of a member that are read at a time; they double
_ZLIB, _GZIP, _RAW = zlib.MAX_WBITS, zlib.MAX_WBITS | 16, -zlib.MAX_WBITS


class TooLarge(Exception):
    """The body is larger than the limit."""


async def read_json(request: Request, max_body: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    `request.state.is_large`: work on it takes long. `has_images`: it may contain images.

    Args:
        max_body: its maximum size in bytes, after decompression.

    Raises:
        InvalidRequest: there is none.
        TooLarge: it is larger than that.
        HTTPException: it has an encoding that is not supported.
    """
    body = await request.body()
    encoding = request.headers.get("content-encoding", "")
    request.state.is_large = bool(encoding) or len(body) > _LARGE

    request.state.has_images = False

    def read() -> Any:
        text = decoded(body, encoding, max_body)
        request.state.has_images = any(word in text for word in _IMAGES)
        _check_values(text)
        value = json.loads(text)
        if not any(part in text for part in _HALVES) or not _HALF_CHARACTER.search(text):
            return value
        return json.loads(_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))

    try:
        value = await in_thread(read, "large") if request.state.is_large else read()
    except InvalidRequest:  # of its encoding, or of its size
        raise
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"the body is not JSON ({reason}): send a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object: send one")
    return value


def _check_values(text: bytes) -> None:
    """Refuse a body that would take many times its size of memory."""

    def count(*part: int) -> int:
        return text.count(b",", *part) + text.count(b"[", *part) + text.count(b"{", *part)

    if count() <= _MAX_VALUES:
        return
    n, end = 0, 0
    for string in _STRING.finditer(text):  # what is in strings does not count
        check_wanted()
        n, end = n + count(end, string.start()), string.end()
        if n > _MAX_VALUES:
            break
    if n + count(end) > _MAX_VALUES:
        raise InvalidRequest(f"the body has more than {_MAX_VALUES} values: send fewer")


def completed(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The body with defaults in place of what is missing or null."""
    given = {name: value for name, value in body.items() if value is not None}
    if isinstance(speculative := given.get("speculative"), dict):
        given["speculative"] = {**defaults.get("speculative", {}), **speculative}
    elif speculative is True:  # as it is without the field
        del given["speculative"]
    return {**defaults, **given}


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false.

    Raises:
        InvalidRequest: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} has the wrong type: give true or false")
    return value


# Encodings


def decoded(body: bytes, encodings: str, max_size: int) -> bytes:
    """A body without its ``Content-Encoding``.

    Raises:
        InvalidRequest: the body is not in this encoding.
        TooLarge: it would be larger than `max_size` bytes.
        HTTPException: the encoding is not supported here.
    """
    names = [name.strip().lower() for name in encodings.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > _MAX_ENCODINGS:
        raise InvalidRequest(f"the body has {len(names)} encodings: use one")
    for name in reversed(names):
        decode = _DECODERS.get(name.removeprefix("x-"))
        try:
            if decode is None:
                raise ImportError
            body = decode(body, max_size + 1)
        except ImportError:
            message = f"the content encoding {name[:40]!a} is not supported: send gzip, or the body as it is"
            raise HTTPException(415, message, {"accept-encoding": "gzip, deflate"}) from None
        except Exception as error:  # each library has its own
            raise InvalidRequest(f"the body is not {name} ({error}): send what the header names") from None
        if len(body) > max_size:
            raise TooLarge
    return body


def _gzip(body: bytes, max_size: int) -> bytes:
    parts, size, start = [], 0, 0
    while start < len(body) and size < max_size:  # a file of gzip can have several members
        part, start = _inflated(body, start, max_size - size, _GZIP)
        parts.append(part)
        size += len(part)
        if len(parts) > _MAX_MEMBERS:
            raise ValueError(f"it has more than {_MAX_MEMBERS} members")
    return b"".join(parts)


def _deflate(body: bytes, max_size: int) -> bytes:
    try:
        return _inflated(body, 0, max_size, _ZLIB)[0]
    except zlib.error:  # many clients leave out the header of zlib
        return _inflated(body, 0, max_size, _RAW)[0]


def _inflated(body: bytes, start: int, max_size: int, bits: int) -> tuple[bytes, int]:
    """What a body has from an index on, up to the end of the data or the size; and the index after it.

    Takes as long as the data that is read, however much follows it.
    """
    inflater, parts, size, n = zlib.decompressobj(bits), list[bytes](), 0, _FIRST_PIECE
    while not inflater.eof and size < max_size:
        check_wanted()
        piece = memoryview(body)[start : start + n]
        parts.append(inflater.decompress(piece, min(_PIECE, max_size - size)))
        size += len(parts[-1])
        start += len(piece) - len(inflater.unused_data if inflater.eof else inflater.unconsumed_tail)
        n = min(2 * n, _PIECE)
        if not piece and not parts[-1] and not inflater.eof:
            raise ValueError("it is cut short")
    return b"".join(parts), start


def _brotli(body: bytes, max_size: int) -> bytes:
    decompressor = importlib.import_module("brotli").Decompressor()
    if not hasattr(decompressor, "can_accept_more_data"):
        raise ImportError("before 1.2, the size of its output has no limit")
    text: bytes = decompressor.process(body, output_buffer_limit=max_size)
    if not decompressor.is_finished() and len(text) < max_size:
        raise ValueError("it is cut short")
    return text


def _zstd(body: bytes, max_size: int) -> bytes:
    text: bytes
    try:
        library = importlib.import_module("compression.zstd")  # Python 3.14
    except ImportError:
        reader = importlib.import_module("zstandard").ZstdDecompressor().stream_reader(body)
        text = reader.read(max_size)
    else:
        text = library.ZstdDecompressor().decompress(body, max_size)
    return text  # one that is cut short is no JSON


_DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
