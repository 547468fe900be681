"""The end of a process whose main thread is in a call that does not return.

Python handles a signal between two instructions of the main thread, and a call of llama.cpp is one of them:
it may read a long prompt, or wait for a worker that is stopped. So a thread counts signals as well, and ends
the process at the second one if the main thread does not notice it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from specdec_cli import terminal

_NOTICE_S = 0.5  # for the main thread to handle a signal
_TOGETHER_S = 60.0  # after which a signal is a first one again
_ENDING = (signal.SIGINT, signal.SIGTERM)  # not SIGHUP, which a closed terminal sends twice
_BY_SIGNAL = 128  # plus its number

_noticed = 0.0  # when the main thread last handled a signal
_acts: list[Callable[[], None]] = []


def notice() -> None:
    """Say that the main thread handles a signal; its handlers call this."""
    global _noticed
    _noticed = time.monotonic()


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
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_count, args=[reading], name="signals", daemon=True).start()
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with before_end(terminal.restoration()):
            yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writing)  # ends the thread


def _count(reading: int) -> None:
    earlier = -_TOGETHER_S  # time of the last signal
    with open(reading, "rb", buffering=0) as numbers:
        while received := numbers.read(1):
            now = time.monotonic()
            if received[0] not in _ENDING:
                continue
            if now - earlier < _TOGETHER_S:
                while _noticed < now and time.monotonic() < now + _NOTICE_S:
                    time.sleep(_NOTICE_S / 20)
                if _noticed < now:
                    end(_BY_SIGNAL + received[0])
            earlier = now
