"""Work for a client: it ends when its client has gone, and large bodies delay no others."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from spec_local.system.cancellation import abandoned_if

_T = TypeVar("_T")
Work = Literal["short", "large", "images"]
"""How long work on a request takes: ``large`` is that on a large body, and with images it may also wait for
another host."""
# One thread: it competes with the event loop for Python's lock, and each of its bodies can take 500 MB.
_POOLS = {"large": ThreadPoolExecutor(1, "large-bodies"), "images": ThreadPoolExecutor(4, "images")}


def until_gone(
    respond: Callable[[Request], Coroutine[Any, Any, Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """A handler of requests that is cancelled when its client goes: ClientDisconnect."""

    @functools.wraps(respond)
    async def watched(request: Request) -> Response:
        await request.body()  # what comes after it is the end of the connection
        waiting, gone = asyncio.create_task(respond(request)), asyncio.create_task(_disconnection(request))
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientDisconnect
            return waiting.result()
        finally:
            waiting.cancel()
            gone.cancel()

    return watched


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def work_on(request: Request, *, reads_images: bool) -> Work:
    """What work on the body of a request is, after `read_json`; reads_images: or sound."""
    if reads_images and request.state.has_images:
        return "images"
    return "large" if request.state.is_large else "short"


async def in_thread(work: Callable[[], _T], kind: Work) -> _T:
    """The result of work in a thread; if the task that waits for it is cancelled, it is abandoned.

    Args:
        work: calls `spec_local.system.cancellation.check_wanted` where it takes long.
        kind: large work is done one after another.
    """
    gone = threading.Event()

    def run() -> _T:
        with abandoned_if(gone.is_set):
            return work()

    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_POOLS.get(kind), run)
    finally:
        gone.set()
