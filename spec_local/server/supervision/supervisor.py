"""The server's side of the process with the models: starts it, and gives each answer its events."""

import asyncio
import collections
import contextlib
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from spec_local.errors import BackendCrash, BackendError, SpecLocalError
from spec_local.server.supervision.events import AnswerRequest, Ended, Event, Loaded, Refused
from spec_local.text import counted

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0  # between two attempts to load the models
_LONGEST_WAIT_S = 60  # that a client is told to wait
_STOP_S = 10.0  # for the process to end: a call of a large model with a long prompt takes seconds
_SIGN_S = 1.0  # between two questions whether the process is there
_SILENT_S = 5.0  # without a reply to one, which takes milliseconds even on a busy machine
_MAX_UNREAD = 1 << 28  # bytes that may wait for a process that does not read: some requests of 64 MiB
ENGINE_PROCESS = "spec_local.server.supervision.engine_process"
"""The module that the process runs."""
STOPPING = "the server is stopping: try again when it has started again"


class NotReady(SpecLocalError):
    """The models are being loaded."""


class Busy(SpecLocalError):
    """Too many requests wait. retry_s: seconds after which a place is likely to be free."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class AnswerEvents:
    """The events of answers that were requested together.

    The last event of each answer is `Ended` or `Refused`.

    Attributes:
        unchecked: ids of answers that are likely to be refused before they begin, if at all: their prompt may
            be too long, or their grammar wrong.
    """

    def __init__(self, n: int) -> None:
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self._n_unfinished = n
        self.unchecked: set[int] = set()
        self.ids: list[int] = []
        self.started = time.monotonic()

    def put(self, index: int, event: Event) -> None:
        """Add an event; an answer has at most as many as the context has tokens."""
        self._events.append((index, event))
        self._arrived.set()

    def check(self, id: int) -> None:
        """Note that an answer will not be refused before it begins; `next` returns."""
        self.unchecked.discard(id)
        self._arrived.set()

    @property
    def are_done(self) -> bool:
        """True if `next` has returned all events."""
        return not self._n_unfinished

    async def next(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """All events that have arrived since the last call, each with the index of its answer.

        Args:
            seconds: that it may wait for one; an empty list: none has arrived. None: until one arrives, or
                a prompt has been checked.
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


class Supervisor:
    """Starts the process with the models, and starts it again whenever it ends by itself.

    All methods are called in the event loop, and none waits until the process reads: what it has not read is
    kept here. While the process, or a worker that it needs, gives no sign of life, `check_ready` raises.

    Args:
        session: arguments of `Session.open`.
        name: of the main model, as clients name it.
        max_waiting: answers that may wait for their turn.
        keep_headers: see `EngineProcess`.
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
        keep_headers: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._options = {"session": dict(session), "name": name, "keep_headers": keep_headers}
        self._max_waiting, self._log = max_waiting, log
        self.observe: Callable[[Event, float], None] = lambda event, seconds: None
        self.loaded: Loaded | None = None
        self.error: SpecLocalError | None = None
        self.ready = asyncio.Event()
        """Set as soon as the models are loaded or cannot be loaded."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asked: float | None = None  # when the process was asked for the sign that has not come yet
        self._ids = itertools.count()
        self._answers: dict[int, tuple[AnswerEvents, int]] = {}
        self._cancelled: set[int] = set()  # of these: they end at once or at their next step
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._seconds: collections.deque[float] = collections.deque(maxlen=32)  # of the last answers
        self._stopping = asyncio.Event()
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
        return min(len(self._answers), self.loaded.n_parallel if self.loaded else 0)

    async def run(self, *, persist: bool = False) -> None:
        """Keep a process with the models until `stop` is called.

        Args:
            persist: try again if the models cannot be loaded the first time; otherwise return.
        """
        retry = _FIRST_RETRY_S
        while not self._stopping.is_set():
            was_loaded, exit_code = await self._run_process()
            if self._stopping.is_set():
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), retry)
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
        self._close(_STOP_S)
        self._is_reloading, self._reload_error, self.loaded = True, None, None
        self.ready.clear()
        self._lose(NotReady("the models are being loaded: try again soon"))
        await self.ready.wait()
        self._previous = None
        return self._reload_error

    async def _run_process(self) -> tuple[bool, int]:
        """Run one process until it ends; return whether it loaded the models, and its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", ENGINE_PROCESS, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # nothing but the server's own output goes to stdout
                pass_fds=[theirs.fileno()],
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # otherwise ggml starts a debugger after a crash
                process_group=0,  # Ctrl-C reaches the server, which ends this process when it has finished
            )
        self._process, self._socket = process, ours
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._options)
        asking = asyncio.create_task(self._ask_for_signs())
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._receive(*await _message(reader))
        finally:
            asking.cancel()
            was_loaded, self.loaded = self.loaded is not None, None
            self._writer.transport.abort()
            self._writer = self._asked = None
            last = asyncio.get_running_loop().call_later(_STOP_S, process.kill)
            try:
                code = await asyncio.to_thread(process.wait)
            finally:
                last.cancel()
                process.kill()  # has no effect on one that has ended
        return was_loaded, code

    async def _ask_for_signs(self) -> None:
        while True:
            await asyncio.sleep(_SIGN_S)
            if self.loaded and self._asked is None:
                self._asked = time.monotonic()
                self._send(("sign", None))

    @property
    def is_silent(self) -> bool:
        """True if the process, or a worker that it needs, has not replied for a while."""
        return self._asked is not None and time.monotonic() - self._asked > _SILENT_S

    def _receive(self, kind: str, *content: Any) -> None:
        if kind == "event":
            id, event = content
            if id not in self._answers:  # given up
                return
            answers, index = self._answers[id]
            answers.put(index, event)
            if isinstance(event, Ended | Refused):
                del self._answers[id]
                self._cancelled.discard(id)
                self._count(answers, event)
        elif kind == "checked":
            if found := self._answers.get(content[0]):
                found[0].check(content[0])
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
        elif kind == "sign":
            self._asked = None
        else:
            self._log(content[0])

    def _count(self, answers: AnswerEvents, event: Event) -> None:
        seconds = time.monotonic() - answers.started
        self._seconds.append(seconds)
        self.observe(event, seconds)

    def _lose(self, error: SpecLocalError) -> None:
        """End all answers after the process has ended."""
        lost, self._answers = self._answers, {}
        self._cancelled.clear()
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
        if self._stopping.is_set():
            raise NotReady(STOPPING)
        if not self.loaded:
            if self.error:
                raise NotReady(f"the models are not loaded ({self.error}): try again soon")
            raise NotReady("the models are being loaded: try again soon")
        if self.is_silent or (self._writer and self._writer.transport.get_write_buffer_size() > _MAX_UNREAD):
            raise NotReady(
                "the process with the models, or a worker, does not reply: wait, or start the server again"
            )
        return self.loaded

    def answer(self, requests: Sequence[AnswerRequest]) -> AnswerEvents:
        """Start answers; those for which there is no slot wait.

        Raises:
            NotReady: the models are not loaded.
            Busy: too many answers wait.
        """
        loaded = self.check_ready()
        n_others = self.n_unfinished - len(self._cancelled)
        if n_others and n_others + len(requests) > loaded.n_parallel + self._max_waiting:
            usual = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
            retry_s = max(1, min(_LONGEST_WAIT_S, round(usual)))
            n_waiting = n_others - loaded.n_parallel
            raise Busy(
                f"{counted(n_waiting, 'answer')} {'waits' if n_waiting == 1 else 'wait'} already, as many as "
                f"the server's option --queue allows: try again in {retry_s} s",
                retry_s,
            )
        answers = AnswerEvents(len(requests))
        answers.ids = [next(self._ids) for _ in requests]
        self._answers |= {id: (answers, index) for index, id in enumerate(answers.ids)}
        # In one message: what they have in common, such as images, is sent once.
        size = self._send(("answers", [*zip(answers.ids, requests, strict=True)]))
        for id, request in zip(answers.ids, requests, strict=True):
            if size > loaded.n_ctx or request.settings.constrained:  # few tokens are shorter than a byte
                answers.unchecked.add(id)
        return answers

    def cancel(self, answers: AnswerEvents) -> None:
        """End those of the answers that have not ended, at their next step."""
        for id in answers.ids:
            if id in self._answers:
                self._cancelled.add(id)
                self._send(("cancel", id))

    async def ask(self, what: str, argument: Any = None) -> Any:
        """The reply to a question: see `spec_local.server.supervision.engine_process`.

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
        """End all answers at their next step, or at once if the process does not reply."""
        if self.is_silent:
            self._lose(NotReady(STOPPING))
        for id in self._answers:
            self._send(("cancel", id))

    def stop(self, seconds: float = _STOP_S) -> None:
        """End the process: its answers end at their next step.

        Args:
            seconds: after which it is killed.
        """
        self._stopping.set()
        self._close(seconds)

    def _close(self, seconds: float) -> None:
        """Let the process end, and kill it if it does not in time."""
        if not self._process or not self._socket:
            return
        if self.is_silent or (self._writer and not self.loaded):  # it would save nothing, or has nothing to
            seconds = 0.0
        asyncio.get_running_loop().call_later(seconds, self._process.kill)
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the process, and what reads here

    def _send(self, message: Any) -> int:
        """Write a message, without waiting until the process reads it; return its size in bytes."""
        data = pickle.dumps(message)
        if self._writer:
            is_long = len(data) > _LONG
            self._writer.write(_LONG_HEAD.pack(-1, len(data)) if is_long else _HEAD.pack(len(data)))
            self._writer.write(data)
        return len(data)


# What the process reads and writes with `multiprocessing.connection.Connection`, which would wait here.
_HEAD, _LONG_HEAD, _LONG = struct.Struct("!i"), struct.Struct("!iQ"), (1 << 31) - 1


async def _message(reader: asyncio.StreamReader) -> Any:
    """The next message of the process.

    Raises:
        EOFError, OSError: it has ended.
    """
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return pickle.loads(await reader.readexactly(size))


def _crash(code: int) -> BackendError:
    by = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return BackendCrash(f"the process with the models ended ({by}): it is started again")
