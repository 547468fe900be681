"""Progress of long operations: a bar on a terminal, lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from rich.text import Text

from specdec_cli import render, terminal, waiting

LINE_INTERVAL = 30.0
"""Seconds between lines of progress where stderr is not a terminal."""


def clock(seconds: float) -> str:
    """Format a time as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def live(display: Any) -> Iterator[None]:
    """Show a display of rich, above which it prints what is written to stderr: as always, made visible."""
    with display:
        printing = sys.stderr
        sys.stderr = cast(TextIO, terminal.Screen(printing))
        try:
            yield
        finally:
            sys.stderr = printing


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a spinner on a terminal, otherwise print one line."""
    if sys.stderr is None or not sys.stderr.isatty():
        render.note(what)
        yield
        return
    with live(render.console(sys.stderr).status(Text(terminal.visible(what)))):
        yield


@contextlib.contextmanager
def bar(
    description: str, total: int, *, done: int = 0, visible: bool = True
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr, or lines if it is not a terminal.

    done: units finished before the start. visible: False if the command prints lines of results meanwhile:
    then a line of `waiting`.

    Yields a function that advances it by some units.
    """
    if not visible or sys.stderr is None:
        with waiting.line(f"{description} …"):
            yield _Counted(description, total, done).say
        return
    if not sys.stderr.isatty():
        yield _Counted(description, total, done).print
        return
    from rich import progress as of_rich

    progress = of_rich.Progress(
        "{task.description}",
        of_rich.BarColumn(),
        of_rich.MofNCompleteColumn(),
        of_rich.TaskProgressColumn(),
        "time left",
        of_rich.TimeRemainingColumn(),
        console=render.console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        speed_estimate_period=1e9,  # the rate of the whole run, because the current one fluctuates
    )
    with live(progress):
        task = progress.add_task(description, total=total, completed=done)
        yield lambda units: progress.update(task, advance=units)


class _Counted:
    """Says how much is done."""

    def __init__(self, description: str, total: int, done: int) -> None:
        self._description, self._total, self._first, self._done = description, total, done, float(done)
        self._started = self._printed = time.monotonic()

    def say(self, units: float) -> None:
        """Advance, and say so in a line of `waiting`."""
        self._done += units
        waiting.say(f"{self._description}: {int(self._done)} of {self._total}")

    def print(self, units: float) -> None:
        """Advance, and print a line now and then; nothing for what ends soon."""
        self._done += units
        now = time.monotonic()
        if now - self._printed >= LINE_INTERVAL and self._done > self._first:
            self._printed = now
            left = (now - self._started) / (self._done - self._first) * (self._total - self._done)
            render.note(f"{self._description}: {int(self._done)} of {self._total} · {clock(left)} left")
