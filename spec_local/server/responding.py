"""The response to a request for answers: one JSON object, or a stream of server-sent events.

A slow machine reads a long prompt for minutes, and clients and proxies close connections on which nothing
arrives. So there are signs of life: comments or pings in a stream, white space before a JSON object.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from spec_local.errors import SpecLocalError
from spec_local.server import errors
from spec_local.server.engine import Answers
from spec_local.server.events import Event, Reading, Refused
from spec_local.server.protocol import Exchange

_HEADERS_S = 0.15  # until the headers of a stream: an error that is known by then has a status of its own
_SIGN_S = 5.0  # between two signs of life: the strictest clients wait 10 s
_WHOLE_S = 15.0  # until those of a JSON object, which fix its status at 200
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_Arrived = list[tuple[int, Event]]


async def whole(exchange: Exchange, answers: Answers, path: str, end: Callable[[], None]) -> Response:
    """The response with all answers in one object, or with the first error.

    Args:
        path: of the request.
        end: called when the response has ended, or the client has gone.
    """
    making = asyncio.ensure_future(_object(exchange, answers))
    try:
        await asyncio.wait([making], timeout=_WHOLE_S)
        if making.done():
            end()
            return JSONResponse(making.result())
    except BaseException:
        making.cancel()
        end()
        raise

    async def write() -> AsyncIterator[bytes]:
        while not making.done():
            yield b" "
            await asyncio.wait([making], timeout=_SIGN_S)
        try:
            body = making.result()
        except SpecLocalError as error:  # too late for its status
            body = errors.body_for(path, error)
        yield bytes(JSONResponse(body).body)

    return _Parts(write(), end, "application/json")


async def _object(exchange: Exchange, answers: Answers) -> Any:
    found: list[list[Event]] = [[] for _ in exchange.requests]
    async for arrived in answers:
        for index, event in arrived:
            if isinstance(event, Refused):
                raise event.error
            if not isinstance(event, Reading):
                found[index].append(event)
    return exchange.whole(found)


async def stream(exchange: Exchange, answers: Answers, end: Callable[[], None]) -> Response:
    """The response with the events of all answers; an error at the start is a response of its own.

    Args:
        end: called when the response has ended, or the client has gone.
    """
    first = await _first(answers)
    opening = next((event for _, event in first if not isinstance(event, Reading)), None)
    if isinstance(opening, Refused):
        end()
        raise opening.error

    async def write() -> AsyncIterator[str]:
        arrived, parts, state = first, [*exchange.begin()], "waiting"
        written = time.monotonic() if opening else -_SIGN_S
        while True:
            for index, event in arrived:
                if isinstance(event, Refused):
                    yield "".join([*parts, exchange.failed(event.error)])
                    return
                if isinstance(event, Reading):
                    state = f"reading the prompt {event.n_read}/{event.n_prompt}"
                    parts += exchange.reading(index, event)
                else:
                    state = "generating"
                    parts += exchange.write(index, event)
            if not parts and time.monotonic() >= written + _SIGN_S:
                parts = [exchange.sign_of_life(state)]
            if parts:
                yield "".join(parts)  # one write: asyncio complains about many to a client that has just gone
                written, parts = time.monotonic(), []
            if answers.are_done:
                break
            arrived = await answers.next(written + _SIGN_S - time.monotonic())
        yield "".join(exchange.end())

    return _Parts(write(), end, "text/event-stream")


async def _first(answers: Answers) -> _Arrived:
    """The events that arrive before the headers must be sent."""
    deadline, first = time.monotonic() + _HEADERS_S, _Arrived()
    while all(isinstance(event, Reading) for _, event in first):
        if (left := deadline - time.monotonic()) <= 0:
            break
        first += await answers.next(left)
    return first


class _Parts(StreamingResponse):
    """A response that is written in parts. end: called when it has ended, for whatever reason."""

    def __init__(self, parts: AsyncIterator[str | bytes], end: Callable[[], None], media_type: str) -> None:
        super().__init__(parts, media_type=media_type, headers=_STREAM_HEADERS)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
