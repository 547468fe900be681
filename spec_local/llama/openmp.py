"""How long the threads of GNU's OpenMP, with which llama.cpp is usually built on Linux, wait in a loop.

The loop has 300,000 rounds, which take some milliseconds; then the thread sleeps. Where a process has more of
OpenMP's threads than processors, it has 1,000 rounds. Both are fixed when the library is loaded, but the
number of threads is not: `BriefWaits` adds some that sleep.
"""

import ctypes
import os
import threading

from spec_local.llama import runtime


def is_configured() -> bool:
    """Return whether the user decided how long threads wait."""
    return any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))


class BriefWaits:
    """Makes threads wait briefly. Without GNU's OpenMP, it does nothing."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None  # None: threads wait as long as usual

    def apply(self, brief: bool) -> None:
        """Let the threads of calls from now on wait briefly, or as long as usual."""
        if brief and not self._ended:
            self._ended = threading.Event()
            threading.Thread(target=_hold_threads, args=(self._ended,), daemon=True).start()
        elif not brief and self._ended:
            self._ended.set()
            self._ended = None


def _hold_threads(ended: threading.Event) -> None:
    """Keep one thread more than there are processors, asleep, until the event; they end with this thread."""
    llama_cpp = runtime.library()._lib  # looks in the libraries that it is linked to, too
    try:
        parallel, do_nothing = llama_cpp.GOMP_parallel, llama_cpp.omp_get_thread_num
    except AttributeError:
        return
    parallel(ctypes.cast(do_nothing, ctypes.c_void_p), None, (os.cpu_count() or 1) + 1, 0)
    ended.wait()
