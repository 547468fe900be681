"""A progress bar for long operations."""

import contextlib
import sys
from collections.abc import Callable, Iterator


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
    from rich.console import Console
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
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        speed_estimate_period=1e9,
    ) as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda units: progress.update(task, advance=units)
