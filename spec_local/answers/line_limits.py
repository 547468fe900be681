"""Limits that end an answer with a line, for editors that complete code."""

import time
from collections.abc import Callable

from spec_local.text import TextStream


class LineLimits:
    """A stream whose text ends before a line break, which is not part of it; used as a `TextStream`.

    Args:
        stream: the text, and the stop strings that may end it earlier.
        min_indent: spaces and tabs with which each line but the first begins; the text ends before a line
            with fewer, also an empty one. 0: lines are not limited.
        max_seconds: since the first call of `feed`; after them, the text ends at a line break. None: no
            limit.
    """

    def __init__(
        self,
        stream: TextStream,
        min_indent: int = 0,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stopped = False
        """Whether a line or a stop string has ended the text; if so, no more follows."""
        self.stopping_word = ""
        """The stop string that has ended the text, if any."""
        self._stream, self._min_indent, self._max_seconds = stream, min_indent, max_seconds
        self._clock = clock
        self._started: float | None = None
        self._held = ""  # a line break, and less indentation than the line after it needs

    def feed(self, token: int) -> str:
        """What is certain to be part of the text; empty where more is needed to know."""
        text = self._limited(self._stream.feed(token))
        if self._stream.stopped and not self.stopped:
            self.stopped, self.stopping_word = True, self._stream.stopping_word
            return text + self._held
        return text

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._limited(self._stream.finish())
        return text if self.stopped else text + self._held

    def _limited(self, text: str) -> str:
        if self.stopped:
            return ""
        now = self._clock()
        self._started = now if self._started is None else self._started
        is_late = self._max_seconds is not None and now - self._started > self._max_seconds
        text, self._held = self._held + text, ""
        at = -1
        while not self.stopped and (at := text.find("\n", at + 1)) >= 0:
            start = text[at + 1 : at + 1 + self._min_indent]
            is_complete = len(start) == self._min_indent
            is_indented = not start.strip(" \t")
            self.stopped = is_late or not is_indented
            if self.stopped or not is_complete:
                text, self._held = text[:at], "" if self.stopped else text[at:]
        return text
