"""A stopwatch that divides the time of a step among its parts."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple


class TimedCall(NamedTuple):
    """A model's call. part: whose, as in `Timer.parts`. n: tokens, of all requests that share it."""

    part: str
    n: int
    seconds: float


class Timer:
    """Divides time among parts: each `lap` adds what has passed since the last one.

    Args:
        clock: seconds.

    Attributes:
        parts: seconds by part, since `start`.
        calls: calls of models since `start`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.parts: dict[str, float] = defaultdict(float)
        self.calls: list[TimedCall] = []
        self._last = 0.0

    def start(self) -> None:
        """Reset all parts, and start timing."""
        self.parts.clear()
        self.calls = []
        self._last = self.clock()

    def lap(self, part: str, n: int = 0) -> None:
        """Add the time since the last lap, or the start, to a part; n: tokens, if it was a model's call."""
        now = self.clock()
        self.parts[part] += now - self._last
        if n:
            self.calls.append(TimedCall(part, n, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        """The time from the start to the last lap."""
        return sum(self.parts.values())
