"""A line that says what a command is waiting for, such as ``loading main.gguf …``, on a terminal only.

It appears after half a second, below everything that has been shown, and is gone before anything else is: all
output to a terminal is written in blocks of `hidden`. It is drawn to the right of the cursor, which stays
where it is, and is cut at the margin. So it needs no width, and erasing what follows the cursor removes it,
also when the window has become narrower.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

_DELAY_S = 0.5
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_BEGIN, _END = "\x1b7\x1b[?7l", "\x1b[?7h\x1b8"  # save and restore the cursor; in between, lines do not break
_ERASE = "\x1b[J"

_lock = threading.RLock()
_lines: "list[_Line]" = []  # of the blocks; the last one is shown
_drawn: list[TextIO] = []  # the terminal, if it is on the screen now
_depth = 0  # of blocks of `hidden`


@dataclass
class _Line:
    """What is being waited for. text: "": nothing is shown. is_due: whether half a second has passed."""

    text: str
    is_due: bool = False

    def begin(self) -> None:
        with hidden():
            self.is_due = True


@contextlib.contextmanager
def line(text: str) -> Iterator[None]:
    """Show what is being waited for in the block, from half a second on; the text must be `visible`."""
    if not _terminal():
        yield
        return
    shown = _Line(text)
    timer = threading.Timer(_DELAY_S, shown.begin)
    timer.daemon = True
    with _lock:
        _lines.append(shown)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with hidden():
            _lines.remove(shown)


def say(text: str) -> None:
    """Show another text in the innermost block of `line`, if there is one; "": none."""
    if _lines:
        with hidden():
            _lines[-1].text = text


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Remove the line from the screen for the block, which writes there."""
    global _depth
    with _lock:
        if _drawn:
            _write(_drawn.pop(), _ERASE)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if not _depth and _lines and _lines[-1].is_due and _lines[-1].text:
                _draw(_lines[-1].text)


def _draw(text: str) -> None:
    if stream := _terminal():
        shown = text if os.environ.get("NO_COLOR") else f"{_DIM}{text}{_PLAIN}"
        _write(stream, f"{_BEGIN}{shown}{_END}")
        _drawn.append(stream)


def _terminal() -> TextIO | None:
    """The terminal of stderr; None: there is none, its cursor cannot be moved, or it shows a bar."""
    stream: TextIO | None = getattr(sys.stderr, "stream", sys.stderr)  # below `terminal.Screen`
    if stream is None or hasattr(stream, "rich_proxied_file") or os.environ.get("TERM") == "dumb":
        return None
    with contextlib.suppress(ValueError):  # it is closed
        return stream if stream.isatty() else None
    return None


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the window is closed
        stream.write(text)
        stream.flush()
