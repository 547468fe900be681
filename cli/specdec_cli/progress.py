"""A progress bar for long operations."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from specdec_cli import render, terminal


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
def bar(
    description: str, total: int, *, done: int = 0, visible: bool = True
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr if it is a terminal; yields a function that advances it by some units.

    done: units finished before the start. visible: False if the command prints lines of results meanwhile.
    """
    if not visible or sys.stderr is None or not sys.stderr.isatty():
        yield lambda units: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TextColumn("time left"),
        # `speed_estimate_period`: from the rate of the whole run, because the current rate fluctuates.
        TimeRemainingColumn(),
    )
    progress = Progress(
        *columns,
        console=render.console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        speed_estimate_period=1e9,
    )
    with live(progress):
        task = progress.add_task(description, total=total, completed=done)
        yield lambda units: progress.update(task, advance=units)
