"""How many threads a call uses while other programs use the processor, too.

llama.cpp's threads wait for each other some 400 times a token. A thread that has to share its core is put
aside for milliseconds at a time. All others then wait for it, in a loop that takes the time of a core, too.
One thread fewer, or shorter waits, make such calls up to twice as fast; but on an idle machine, they cost 10
to 30 %.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from spec_local.llama import openmp
from spec_local.system.machine import OtherPrograms

State = Literal["own", "fewer", "shared"]

# Seconds of calls that are judged together: the system moves threads between cores every few milliseconds.
_WINDOW = 0.25
# A machine counts as idle if other programs use less than this share of the core that one thread fewer would
# leave them, or so few cores: systems count their time in hundredths of a second. Threads lack time there,
# too, where the host of a virtual machine is busy. Waits that sleep then take the longest: 9 tokens per
# second with them, 15 to 19 without (two virtual cores of a Zen 3).
_IDLE_SHARE, _IDLE_CORES = 0.8, 0.2
# Processor time that threads with a core each may lack: cores, and shares of a core for each thread. They
# sleep or start for a part of a call.
_LACKING, _LACKING_PER_THREAD = 0.2, 0.03
# Share of the cores that threads get which wait briefly: 0.8 to 0.95 if each has its own, 0.5 beside one
# other program (measured on two cores of a Zen 3). Between the two, it is not clear.
_OWN_IF_BRIEF, _SHARED_IF_BRIEF = 0.7, 0.55
_PAUSE = 2.0  # seconds until another number of threads is tried, which takes one or two windows
# Seconds until threads are tried whose waits are long, where it is not clear. Beside other programs, such a
# call can take seconds.
_LONG_PAUSE = 30.0


class ThreadCount:
    """Chooses the number of threads by the processor time that they get: n cores, if each has one to itself.

    Without that, it tries fewer, down to half of them. If even these have to share their cores, as beside a
    compiler that uses all, the full number gets the largest share; then they wait briefly for each other
    (`openmp.BriefWaits`).

    Args:
        most: threads on an idle machine.
        others: returns how many cores other programs have used since it was last called, or since the last
            call after a pause.

    Attributes:
        n: threads of the next call.
        state: ``own``: all threads, each with its own core, as far as is known; ``fewer``: `n` of them, each
            with its own core; ``shared``: all, and they share their cores with other programs.
    """

    def __init__(self, most: int, others: Callable[[], float]) -> None:
        self.most = self.n = most
        self._others = others
        self.state: State = "shared"  # until more is known: what it costs if it is wrong is little
        self._seconds = self._processor_seconds = 0.0  # of the calls since the last judgement
        self._next_try = self._next_long_try = self._last_call = 0.0

    def begin(self, now: float) -> None:
        """Forget what was known, if there was no call for some time."""
        if now >= self._last_call + _PAUSE:
            self.state, self.n = "shared", self.most
            self._seconds = self._processor_seconds = 0.0
            self._others()

    def observe(self, now: float, seconds: float, processor_seconds: float) -> None:
        """Learn from a call.

        Args:
            now: seconds, of a clock that also counts the time between calls.
            seconds: how long the call took.
            processor_seconds: processor time of this process meanwhile, of all of its threads.
        """
        self._last_call = now
        self._seconds += seconds
        self._processor_seconds += processor_seconds
        if self._seconds < _WINDOW:
            return
        cores = self._processor_seconds / self._seconds
        self._seconds = self._processor_seconds = 0.0
        is_due = now >= self._next_try
        if self._others() < max(_IDLE_SHARE / self.most, _IDLE_CORES):
            self.state, self.n = "own", self.most
        elif self.state == "shared":
            share = cores / self.most
            if share >= (_SHARED_IF_BRIEF if now >= self._next_long_try else _OWN_IF_BRIEF):
                self.state = "own"
            elif is_due:
                self._use_fewer(now, self.most - 1)
        elif cores < self.n * (1 - _LACKING_PER_THREAD) - _LACKING:
            if self.state == "own":
                self._next_long_try = now + _LONG_PAUSE
            self._use_fewer(now, min(int(cores + _LACKING), self.n - 1))
        elif self.state == "fewer" and is_due:
            self.state, self.n = "shared", self.most

    def _use_fewer(self, now: float, n: int) -> None:
        """Use n threads, or all if these would be too few."""
        self._next_try = now + _PAUSE
        self.state, self.n = ("fewer", n) if n >= max(1, self.most / 2) else ("shared", self.most)


class Threads:
    """The threads of all contexts that have the same number of them, which follows a `ThreadCount`."""

    def __init__(self, most: int) -> None:
        self.count = ThreadCount(most, self._cores_of_others)
        self._other_programs = OtherPrograms()
        self._brief_waits = openmp.BriefWaits()

    def _cores_of_others(self) -> float:
        cores = self._other_programs.cores()
        self._other_programs = OtherPrograms()
        return cores

    @contextmanager
    def call(self) -> Iterator[int]:
        """Within the block, call llama.cpp once, with the number of threads that is yielded."""
        start, used = time.monotonic(), time.process_time()
        self.count.begin(start)
        self._brief_waits.apply(self.count.state == "shared")
        try:
            yield self.count.n
        finally:
            now = time.monotonic()
            self.count.observe(now, now - start, time.process_time() - used)


@functools.cache
def adaptive(most: int) -> Threads | None:
    """Threads whose number depends on other programs; None if it may not.

    One thread waits for no others. If the environment determines how long OpenMP's threads wait, their
    processor time does not show whether they have a core each.
    """
    return None if most == 1 or openmp.is_configured() else Threads(most)
