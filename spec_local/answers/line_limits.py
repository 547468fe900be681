"""Limits that end an answer with a line, for editors that complete code."""

import time
from collections.abc import Callable


class LineLimits:
    """Ends a text before a line break, which is not part of it.

    Args:
        min_indent: spaces and tabs with which each line but the first begins; the text ends before a line
            with fewer, also an empty one. 0: lines are not limited.
        max_seconds: since the first call of `feed`; after them, the text ends at a line break. None: no
            limit.
    """

    def __init__(
        self,
        min_indent: int = 0,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ended = False
        """True if the text has ended; no more follows."""
        self._min_indent, self._max_seconds, self._clock = min_indent, max_seconds, clock
        self._started: float | None = None
        self._held = ""  # a line break, and less indentation than the line after it needs

    def feed(self, text: str) -> str:
        """What is certain to be part of the text; empty where more is needed to know."""
        if self.ended:
            return ""
        now = self._clock()
        self._started = now if self._started is None else self._started
        is_late = self._max_seconds is not None and now - self._started > self._max_seconds
        text, self._held = self._held + text, ""
        at = -1
        while not self.ended and (at := text.find("\n", at + 1)) >= 0:
            start = text[at + 1 : at + 1 + self._min_indent]
            is_complete = len(start) == self._min_indent
            is_indented = not start.strip(" \t")
            self.ended = is_late or not is_indented
            if self.ended or not is_complete:
                text, self._held = text[:at], "" if self.ended else text[at:]
        return text

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held
