"""A stopwatch that divides the time of a step among its parts."""

import time
from collections import defaultdict
from collections.abc import Callable


class Timer:
    """Divides time among parts: each `lap` adds what has passed since the last one.

    Args:
        clock: seconds.

    Attributes:
        parts: seconds by part, since `start`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.parts: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """Reset all parts, and start timing."""
        self.parts.clear()
        self._last = self.clock()

    def lap(self, part: str) -> None:
        """Add the time since the last lap, or the start, to a part."""
        now = self.clock()
        self.parts[part] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """The time from the start to the last lap."""
        return sum(self.parts.values())
