"""The end of a process whose main thread is in a call that does not return.

Python handles a signal between two instructions of the main thread, and a call of llama.cpp is one of them:
it may read a long prompt, or wait for a worker that is stopped. So a thread counts signals as well, and ends
the process at the second one if the main thread does not notice it.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specdec_cli import terminal

_NOTICE_S = 0.5  # for the main thread to handle a signal
_TOGETHER_S = 60.0  # after which a signal is a first one again
_ENDING = (signal.SIGINT, signal.SIGTERM)  # not SIGHUP, which a closed terminal sends twice
BY_SIGNAL = 128  # plus its number: 129 for SIGHUP, 143 for SIGTERM

_NOTICED = b"\0"  # follows the numbers of the signals that the main thread has noticed

_acts: list[Callable[[], None]] = []
_writing: list[socket.socket] = []  # to the threads that count, of which the last one counts now


@contextlib.contextmanager
def handling(signums: Iterable[int], handler: Callable[[int], None]) -> Iterator[dict[int, Any]]:
    """Handle signals in the block. Yields the handlers before, which are in use again after it."""

    def handle(signum: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            for writing in _writing[-1:]:
                writing.send(_NOTICED)
        handler(signum)

    previous = {signum: signal.signal(signum, handle) for signum in signums}
    try:
        yield previous
    finally:
        for signum, before in list(previous.items()):
            signal.signal(signum, before)


@contextlib.contextmanager
def before_end(act: Callable[[], None]) -> Iterator[None]:
    """If `end` is called within the block, it first calls this function, in its own thread."""
    _acts.insert(0, act)
    try:
        yield
    finally:
        _acts.remove(act)


def end(code: int, message: str = "") -> None:
    """End the process with an exit code, from any thread; message: of an error to show."""
    for act in list(_acts):
        with contextlib.suppress(Exception):  # whatever cannot be saved, the process ends
            act()
    if message:
        from specdec_cli import render

        render.error(message)
    os._exit(code)


@contextlib.contextmanager
def counting_signals() -> Iterator[None]:
    """Let the second signal in the block end the process. A loop of asyncio in the block ends that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    with writing:
        writing.setblocking(False)
        threading.Thread(target=_count, args=[reading], name="signals", daemon=True).start()
        previous = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        _writing.append(writing)
        try:
            with before_end(terminal.restoration()):
                yield
        finally:
            _writing.remove(writing)
            signal.set_wakeup_fd(previous)


def _count(reading: socket.socket) -> None:
    """Read the numbers of signals until the block ends."""
    earlier = -_TOGETHER_S  # time of the last signal
    with reading:
        while received := reading.recv(1):
            if received[0] in _ENDING:
                now = time.monotonic()
                if now - earlier < _TOGETHER_S and not _is_noticed(reading):
                    end(BY_SIGNAL + received[0])
                earlier = now


def _is_noticed(reading: socket.socket) -> bool:
    reading.settimeout(_NOTICE_S)
    try:
        while reading.recv(1) not in (_NOTICED, b""):  # another signal
            pass
    except TimeoutError:
        return False
    finally:
        reading.settimeout(None)
    return True
