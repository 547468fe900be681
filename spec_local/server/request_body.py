"""The JSON object in the body of an HTTP request, and its fields."""

import asyncio
import importlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from spec_local.errors import InvalidRequest

_LARGE = 1 << 16  # bytes: what is larger is read in a thread, since others would wait
_ZLIB, _GZIP, _RAW = zlib.MAX_WBITS, zlib.MAX_WBITS | 16, -zlib.MAX_WBITS


class TooLarge(Exception):
    """The body is larger than the limit."""


async def read_json(request: Request, max_body: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    Args:
        max_body: its maximum size in bytes, after decompression.

    Raises:
        InvalidRequest: there is none.
        TooLarge: it is larger than that.
        HTTPException: it has an encoding that is not supported.
    """
    body = await request.body()
    encoding = request.headers.get("content-encoding", "")

    def read() -> Any:
        return json.loads(decoded(body, encoding, max_body))

    try:
        value = await asyncio.to_thread(read) if encoding or len(body) > _LARGE else read()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"the body is not JSON ({reason}): send a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object: send one")
    return value


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
    for name in reversed([name.strip().lower() for name in encodings.split(",")]):
        if name in ("", "identity"):
            continue
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


def _inflated(body: bytes, max_size: int, bits: int) -> bytes:
    parts, size = [], 0
    while body and size < max_size:  # a file of gzip can have several members
        inflater = zlib.decompressobj(bits)
        parts.append(inflater.decompress(body, max_size - size))
        size += len(parts[-1])
        if not inflater.eof and size < max_size:
            raise ValueError("it is cut short")
        body = inflater.unused_data
    return b"".join(parts)


def _deflate(body: bytes, max_size: int) -> bytes:
    try:
        return _inflated(body, max_size, _ZLIB)
    except zlib.error:  # many clients leave out the header of zlib
        return _inflated(body, max_size, _RAW)


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
    "gzip": lambda body, max_size: _inflated(body, max_size, _GZIP),
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
