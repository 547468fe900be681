"""The response to a request for answers: one JSON object, or a stream.

A slow machine loads a model or reads a long prompt for minutes, and clients and proxies close connections on
which nothing arrives. So there are signs of life: comments, pings or empty parts in a stream, and white space
before a JSON object.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from spec_local.errors import SpecLocalError
from spec_local.server.protocols import errors
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.supervision.events import Event, Reading, Refused
from spec_local.server.supervision.supervisor import AnswerEvents

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_Arrived = list[tuple[int, Event]]


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that pass before something is written.

    headers: until the headers of a stream; an error that is known by then has a status of its own. checked:
    the same while a long prompt or a grammar is checked, since agents shorten prompts on a 400. whole: until
    the headers of a JSON object, which fix its status at 200. sign: between two signs of life, of which the
    strictest clients wait for one for 10 s.
    """

    headers: float = 0.15
    checked: float = 5.0
    whole: float = 15.0
    sign: float = 5.0


WAITS = Waits()


async def with_signs(
    make: Coroutine[Any, Any, Response],
    kind: type[Exchange],
    path: str,
    *,
    begun: "asyncio.Future[None] | None" = None,
    model: str = "",
    waits: Waits = WAITS,
) -> Response:
    """The response that a coroutine makes, or one that has signs of life until it is made.

    Args:
        make: cancelled if the client goes.
        path: of the request.
        begun: for a stream; done as soon as it will have signs of its own. None: the response is an object.
        model: the name of the one that is loaded until then.
    """
    making = asyncio.create_task(make)
    first: list[asyncio.Future[Any]] = [making] if begun is None else [making, begun]
    try:
        seconds = waits.whole if begun is None else waits.headers
        await asyncio.wait(first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if any(each.done() for each in first):
            return await making
    except BaseException:
        _abandon(making)
        raise

    async def write() -> AsyncIterator[str | bytes]:
        while not making.done():
            yield " " if begun is None else kind.sign_of_life(f"loading {model}", model)
            await asyncio.wait([making], timeout=waits.sign)
        try:
            response = making.result()
        except SpecLocalError as error:  # too late for its status
            body = JSONResponse(errors.body_for(path, error)).body
            yield bytes(body) if begun is None else kind.refused(error)
            return
        if isinstance(response, _Parts):
            async for part in response.parts:
                yield part
        else:
            yield bytes(response.body)

    media_type = "application/json" if begun is None else kind.media_type
    return _Parts(write(), lambda: _abandon(making), media_type)


def _abandon(making: "asyncio.Task[Response]") -> None:
    """End what makes a response, or the response that it has made."""
    was_made = not making.cancel() and not making.cancelled() and not making.exception()
    if was_made and isinstance(response := making.result(), _Parts):
        response.end()


async def whole(exchange: Exchange, answers: AnswerEvents, end: Callable[[], None]) -> Response:
    """The response with all answers in one object.

    Args:
        end: called when they have ended, or the client has gone.

    Raises:
        SpecLocalError: the first error.
    """
    found: list[list[Event]] = [[] for _ in exchange.requests]
    try:
        async for arrived in answers:
            for index, event in arrived:
                if isinstance(event, Refused):
                    raise event.error
                if not isinstance(event, Reading):
                    found[index].append(event)
    finally:
        end()
    return JSONResponse(exchange.whole(found))


async def stream(
    exchange: Exchange, answers: AnswerEvents, end: Callable[[], None], waits: Waits = WAITS
) -> Response:
    """The response with the events of all answers; an error at the start is a response of its own.

    Args:
        end: called when the response has ended, or the client has gone.
    """
    try:
        first = await _first(answers, waits)
    except BaseException:
        end()
        raise
    begun = {index for index, event in first if not isinstance(event, Reading | Refused)}
    for index, event in first:
        if isinstance(event, Refused) and index not in begun:
            end()
            raise event.error

    async def write() -> AsyncIterator[str]:
        arrived, parts, state = first, [*exchange.begin()], "waiting"
        now = asyncio.get_running_loop().time
        written = now() if begun else -waits.sign
        while True:
            for index, event in arrived:
                if isinstance(event, Refused):
                    async for part in _apart([*parts, exchange.failed(event.error)], exchange):
                        yield part
                    return
                if isinstance(event, Reading):
                    state = f"reading the prompt {event.n_read}/{event.n_prompt}"
                    parts += exchange.reading(index, event)
                else:
                    state = "generating"
                    parts += exchange.write(index, event)
            if not parts and now() >= written + waits.sign:
                parts = [exchange.sign_of_life(state, exchange.model)]
            if parts:
                async for part in _apart(parts, exchange):
                    yield part
                written, parts = now(), []
            if answers.are_done:
                break
            arrived = await answers.next(written + waits.sign - now())
        yield "".join(exchange.end())

    return _Parts(write(), end, exchange.media_type)


async def _apart(parts: Sequence[str], exchange: Exchange) -> AsyncIterator[str]:
    """The texts to write; asyncio complains about many at a time to a client that has just gone."""
    for part in parts if exchange.has_chunks else ["".join(parts)]:
        yield part
        await asyncio.sleep(0)  # then it is known whether it has


async def _first(answers: AnswerEvents, waits: Waits) -> _Arrived:
    """The events that arrive before the headers must be sent."""
    now = asyncio.get_running_loop().time
    begun, first = now(), _Arrived()
    while not any(isinstance(event, Refused) for _, event in first):
        if not answers.unchecked and not all(isinstance(event, Reading) for _, event in first):
            break
        limit = waits.checked if answers.unchecked else waits.headers
        if (left := begun + limit - now()) <= 0:
            break
        first += await answers.next(left)
    return first


class _Parts(StreamingResponse):
    """A response that is written in parts. end: called when it has ended, for whatever reason."""

    def __init__(self, parts: AsyncIterator[str | bytes], end: Callable[[], None], media_type: str) -> None:
        super().__init__(parts, media_type=media_type, headers=_STREAM_HEADERS)
        self.parts, self.end = parts, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()
