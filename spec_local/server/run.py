"""Run the server until a signal ends it."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from spec_local.errors import InvalidRequest
from spec_local.server import app
from spec_local.server.guard import Access
from spec_local.server.learning.idle_training import IdleTraining
from spec_local.server.supervision.events import Loaded
from spec_local.server.supervision.served_models import ServedModels
from spec_local.system.machine import is_loopback

GRACE_S = 5
"""Seconds for answers to finish after a signal; then they are cut. Docker kills a process after 10."""
_CUT_S = 1  # for the last events of answers that are cut; then their connections are closed
_LAST_S = 7.5  # from the signal to the end of the process, whatever waits for whatever
_BACKLOG = 512  # connections that wait to be accepted
_LOOPBACKS = ("localhost", "127.0.0.1")
_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_access(host: str, api_key: str | None) -> None:
    """Raise InvalidRequest for an address that others can reach, unless there is a key."""
    if not is_loopback(host) and not api_key:
        raise InvalidRequest(
            f"others can reach {host}: give --api-key (or SPECDEC_API_KEY) as well, or listen on 127.0.0.1"
        )


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Open the sockets of the server; port 0: any that is free.

    For localhost and 127.0.0.1, there is one for IPv6's loopback address, too, if the machine has it: many
    clients try that first for localhost.

    Raises:
        InvalidRequest: the address is unknown or in use.
    """
    sockets = _loopbacks(port) if host in _LOOPBACKS else [_opened(host, port)]
    with contextlib.ExitStack() as stack:
        for each in sockets:
            stack.enter_context(each)
        yield sockets


def _loopbacks(port: int, n_tries: int = 5) -> list[socket.socket]:
    first = _opened("127.0.0.1", port)
    try:
        return [first, _opened("::1", first.getsockname()[1])]
    except _NoAddress:
        return [first]
    except InvalidRequest:
        first.close()
        if port or not n_tries:
            raise
        return _loopbacks(port, n_tries - 1)  # another program has this port of the other address


class _NoAddress(InvalidRequest):
    """The machine does not have this address."""


def _opened(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            opened = stack.enter_context(socket.socket(family, kind, protocol))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "::":  # and IPv4
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            opened.bind(address)
            opened.listen(_BACKLOG)
        except OSError as error:
            is_missing = isinstance(error, socket.gaierror) or error.errno in _MISSING
            reason = error.strerror or error
            raise (_NoAddress if is_missing else InvalidRequest)(
                f"cannot listen on {host} port {port} ({reason}): give another --host or --port"
            ) from None
        stack.pop_all()
        return opened


def run(
    opened: Sequence[socket.socket],
    served: ServedModels,
    access: Access,
    *,
    on_ready: Callable[[Loaded], None],
    persist: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve on a socket until SIGINT, SIGTERM or SIGHUP.

    At the first signal, no further connections are accepted, requests that are not being answered yet are
    refused, and answers have `GRACE_S` seconds to finish. At the second one, they are cut.

    Args:
        opened: see `listening`.
        served, access: see `app.create`.
        on_ready: called when the first model is loaded for the first time.
        persist: try again if it cannot be loaded the first time, as when workers are not running.
        log: called with a line about each head that is trained while the server is idle.

    Raises:
        SpecLocalError: it cannot be loaded.
    """

    # Otherwise, work in threads that does not end would be waited for: reading a file from a dead network.
    last_resort = threading.Timer(_LAST_S, os._exit, [0])

    async def main() -> None:
        learns = any(model.session.get("learn") for model in served.models)
        learning = IdleTraining(served, log) if learns else None
        config = uvicorn.Config(
            app.create(served, access, learning=learning),
            lifespan="off",  # the models are started and stopped here
            log_level="error",
            access_log=False,
            server_header=False,
            http=_Protocol,
            timeout_graceful_shutdown=GRACE_S + 2 * _CUT_S,
        )
        server = _Server(config, served, last_resort, early)
        loading = asyncio.create_task(served.start(persist=persist))
        serving = asyncio.create_task(server.serve(sockets=[*opened]))
        await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
        failed = None
        if loading.done() and not server.should_exit:
            if failed := loading.exception():
                server.should_exit = True
            elif loaded := loading.result():
                on_ready(loaded)
        if learning and not failed:
            learning.start()
        await serving
        await server.close_connections()
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await asyncio.gather(served.stop(), *([learning.stop()] if learning else []))
        if failed:
            raise failed

    last_resort.daemon = True
    # A signal that comes before the event loop can handle it counts when it can.
    early: list[int] = []
    before = {signum: signal.signal(signum, lambda signum, frame: early.append(signum)) for signum in _ENDING}
    try:
        asyncio.run(main())
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        last_resort.cancel()


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with a limit of the time for headers: it has one between requests only.

    When the server ends, it does not wait for bodies of which a part is missing.
    """

    headers_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._limit = self.loop.call_later(self.headers_s, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle and not self.cycle.response_complete:  # headers have arrived
            self._limit.cancel()
        elif self._limit.cancelled():  # those of the next request have begun
            self._limit = self.loop.call_later(self.headers_s, self.transport.close)

    def shutdown(self) -> None:
        if self.cycle and self.cycle.more_body:
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        super().connection_lost(error)


class _Server(uvicorn.Server):
    """A server that ends gracefully at the first signal, and at once at the second one.

    last_resort: started at the first signal. early: signals that came before `serve`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        served: ServedModels,
        last_resort: threading.Timer,
        early: Sequence[int] = (),
    ) -> None:
        super().__init__(config)
        self._served, self._last_resort, self._early = served, last_resort, early

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in _ENDING:
            loop.add_signal_handler(signum, self._end)
        for _ in self._early:
            self._end()
        try:
            yield
        finally:
            for signum in _ENDING:
                loop.remove_signal_handler(signum)

    def _end(self) -> None:
        if self.should_exit:
            self.force_exit = True
            self._served.cancel_all()
            return
        self.should_exit = True
        self._last_resort.start()
        self._served.refuse()
        loop = asyncio.get_running_loop()
        loop.call_later(GRACE_S, self._served.cancel_all)
        loop.call_later(GRACE_S + _CUT_S, self._abort)

    async def close_connections(self) -> None:
        """Close those that are left, after the last events of answers that a second signal has cut."""
        for are_closed in (False, True):
            if are_closed:
                self._abort()
            if tasks := set(self.server_state.tasks):
                await asyncio.wait(tasks, timeout=_CUT_S)

    def _abort(self) -> None:
        """Close all connections: what writes to a client that does not read, or waits for an event, ends."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
