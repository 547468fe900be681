"""The server's side of the process with the models: starts it, and gives each answer its events."""

import asyncio
import collections
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from spec_local.errors import BackendCrash, BackendError, SpecLocalError
from spec_local.server.events import AnswerRequest, Ended, Event, Loaded, Refused

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0  # between two attempts to load the models
_LONGEST_WAIT_S = 60  # that a client is told to wait
_STOP_S = 10.0  # for the process to end: a call of a large model with a long prompt takes seconds
STOPPING = "the server is stopping: try again when it has started again"


class NotReady(SpecLocalError):
    """The models are being loaded."""


class Busy(SpecLocalError):
    """Too many requests wait. retry_s: seconds after which a place is likely to be free."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Answers:
    """The events of answers that were requested together.

    The last event of each answer is `Ended` or `Refused`.
    """

    def __init__(self, n: int) -> None:
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self._n_unfinished = n
        self.ids: list[int] = []
        self.started = time.monotonic()

    def put(self, index: int, event: Event) -> None:
        """Add an event; an answer has at most as many as the context has tokens."""
        self._events.append((index, event))
        self._arrived.set()

    @property
    def are_done(self) -> bool:
        """True if `next` has returned all events."""
        return not self._n_unfinished

    async def next(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """All events that have arrived since the last call, each with the index of its answer.

        Args:
            seconds: that it may wait for one; an empty list: none has arrived. None: until one arrives.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        self._arrived.clear()
        arrived, self._events = self._events, []
        self._n_unfinished -= sum(isinstance(event, Ended | Refused) for _, event in arrived)
        return arrived

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Event]]]:
        while not self.are_done:
            yield await self.next()


class Engine:
    """Starts the process with the models, and starts it again whenever it ends by itself.

    All methods are called in the event loop.

    Args:
        session: arguments of `Session.open`.
        name: of the main model, as clients name it.
        max_waiting: answers that may wait for a row.
        log: called with a line for each slow operation.

    Attributes:
        observe: called with the last event of each answer, and its seconds since the request.
        loaded: facts about the models; None: they are not loaded.
        error: why the models could not be loaded, or ended; None while they are loaded for the first time.
    """

    def __init__(
        self,
        session: Mapping[str, Any],
        name: str,
        *,
        max_waiting: int = 64,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._options = {"session": dict(session), "name": name}
        self._max_waiting, self._log = max_waiting, log
        self.observe: Callable[[Event, float], None] = lambda event, seconds: None
        self.loaded: Loaded | None = None
        self.error: SpecLocalError | None = None
        self.ready = asyncio.Event()
        """Set as soon as the models are loaded or cannot be loaded."""
        self._connection: Connection | None = None
        self._ids = itertools.count()
        self._answers: dict[int, tuple[Answers, int]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._seconds: collections.deque[float] = collections.deque(maxlen=32)  # of the last answers
        self._stopping = False
        self._is_reloading = False  # until the process has ended that `reload` ends
        self._previous: dict[str, Any] | None = None  # options to return to if the new ones fail
        self._reload_error: SpecLocalError | None = None

    @property
    def n_unfinished(self) -> int:
        """Answers that run or wait."""
        return len(self._answers)

    @property
    def n_running(self) -> int:
        """Answers that run."""
        return min(len(self._answers), self.loaded.n_rows if self.loaded else 0)

    async def run(self, *, persist: bool = False) -> None:
        """Keep a process with the models until `stop` is called.

        Args:
            persist: try again if the models cannot be loaded the first time; otherwise return.
        """
        retry = _FIRST_RETRY_S
        while not self._stopping:
            was_loaded, exit_code = await self._run_process()
            if self._stopping:
                self._lose(NotReady(STOPPING))
                return
            if self._is_reloading:
                self._is_reloading, persist = False, True
                continue
            if self._previous and not was_loaded:
                self._reload_error = self.error or _crash(exit_code)
                self._options, self._previous, self.error = self._previous, None, None
                continue
            if was_loaded or not self.error:
                self.error = _crash(exit_code)
            self._lose(self.error)
            self.ready.set()
            self._log(str(self.error))
            if was_loaded:
                persist, retry = True, _FIRST_RETRY_S
            elif not persist:
                return
            await asyncio.sleep(retry)
            retry = min(2 * retry, _LAST_RETRY_S)

    async def reload(self, session: Mapping[str, Any]) -> SpecLocalError | None:
        """Load the models with other arguments of `Session.open`; call it only while no answer runs or waits.

        Until they are loaded, `ready` is not set.

        Returns:
            why they cannot be loaded with these; those before are used again. None: they are loaded.

        Raises:
            NotReady: no models are loaded.
        """
        self.check_ready()
        self._previous, self._options = self._options, self._options | {"session": dict(session)}
        self._is_reloading, self._reload_error, self.loaded = True, None, None
        self.ready.clear()
        self._lose(NotReady("the models are being loaded: try again soon"))
        self._close()
        await self.ready.wait()
        self._previous = None
        return self._reload_error

    async def _run_process(self) -> tuple[bool, int]:
        """Run one process until it ends; return whether it loaded the models, and its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spec_local.server.engine_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # nothing but the server's own output goes to stdout
                pass_fds=[theirs.fileno()],
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # otherwise ggml starts a debugger after a crash
                process_group=0,  # Ctrl-C reaches the server, which ends this process when it has finished
            )
        self._connection = connection = Connection(ours.detach())
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        threading.Thread(
            target=_read, args=(connection, loop, self._receive, ended.set), name="engine", daemon=True
        ).start()
        self._send(self._options)
        try:
            await ended.wait()
        finally:
            was_loaded, self.loaded, self._connection = self.loaded is not None, None, None
            connection.close()
            code = await asyncio.to_thread(_reap, process)
        return was_loaded, code

    def _receive(self, kind: str, *content: Any) -> None:
        if kind == "event":
            id, event = content
            answers, index = self._answers[id]
            answers.put(index, event)
            if isinstance(event, Ended | Refused):
                del self._answers[id]
                self._count(answers, event)
        elif kind == "reply":
            id, value = content
            future = self._replies.pop(id, None)
            if future and not future.done():
                if isinstance(value, SpecLocalError):
                    future.set_exception(value)
                else:
                    future.set_result(value)
        elif kind == "loaded":
            self.loaded, self.error = content[0], None
            self.ready.set()
        elif kind == "failed":
            self.error = content[0]
        else:
            self._log(content[0])

    def _count(self, answers: Answers, event: Event) -> None:
        seconds = time.monotonic() - answers.started
        self._seconds.append(seconds)
        self.observe(event, seconds)

    def _lose(self, error: SpecLocalError) -> None:
        """End all answers after the process has ended."""
        lost, self._answers = self._answers, {}
        replies, self._replies = self._replies, {}
        for answers, index in lost.values():
            answers.put(index, Refused(error))
            self._count(answers, Refused(error))
        for future in replies.values():
            if not future.done():
                future.set_exception(error)

    def check_ready(self) -> Loaded:
        """Facts about the models.

        Raises:
            NotReady: they are not loaded.
        """
        if not self.loaded or self._stopping:
            if self._stopping:
                raise NotReady(STOPPING)
            if self.error:
                raise NotReady(f"the models are not loaded ({self.error}): try again soon")
            raise NotReady("the models are being loaded: try again soon")
        return self.loaded

    def answer(self, requests: Sequence[AnswerRequest]) -> Answers:
        """Start answers; those for which there is no row wait.

        Raises:
            NotReady: the models are not loaded.
            Busy: too many answers wait.
        """
        loaded = self.check_ready()
        if self.n_unfinished and self.n_unfinished + len(requests) > loaded.n_rows + self._max_waiting:
            usual = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
            retry_s = max(1, min(_LONGEST_WAIT_S, round(usual)))
            raise Busy(
                f"{self.n_unfinished - loaded.n_rows} answers wait already, as many as the server's option "
                f"--queue allows: try again in {retry_s} s",
                retry_s,
            )
        answers = Answers(len(requests))
        for index, request in enumerate(requests):
            id = next(self._ids)
            self._answers[id] = answers, index
            answers.ids.append(id)
            self._send(("answer", id, request))
        return answers

    def cancel(self, answers: Answers) -> None:
        """End those of the answers that have not ended, at their next step."""
        for id in answers.ids:
            if id in self._answers:
                self._send(("cancel", id))

    async def ask(self, what: str, argument: Any = None) -> Any:
        """The reply to a question: see `spec_local.server.engine_process`.

        Raises:
            NotReady: the models are not loaded.
            SpecLocalError: as the reply.
        """
        self.check_ready()
        id = next(self._ids)
        future = self._replies[id] = asyncio.get_running_loop().create_future()
        self._send(("ask", id, what, argument))
        try:
            return await future
        except asyncio.CancelledError:  # the client has gone
            self._replies.pop(id, None)
            self._send(("cancel", id))
            raise

    def cancel_all(self) -> None:
        """End all answers at their next step."""
        for id in self._answers:
            self._send(("cancel", id))

    def stop(self) -> None:
        """End the process: its answers end at their next step."""
        self._stopping = True
        self._close()

    def _close(self) -> None:
        if self._connection:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # wakes the process, and the thread that reads

    def _send(self, message: Any) -> None:
        if self._connection:
            with contextlib.suppress(OSError):  # the process has ended, which `run` handles
                self._connection.send(message)


def _read(
    connection: Connection,
    loop: asyncio.AbstractEventLoop,
    receive: Callable[..., None],
    end: Callable[[], None],
) -> None:
    """Pass on what arrives, until the process has ended."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        try:
            while True:
                loop.call_soon_threadsafe(receive, *connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(end)


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process, which ends by itself, and kill it if it does not."""
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _crash(code: int) -> BackendError:
    by = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return BackendCrash(f"the process with the models ended ({by}): it is started again")
