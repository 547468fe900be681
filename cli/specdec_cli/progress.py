"""A bar for what takes long."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(doing: str, total: int, *, done: int = 0, seen: bool = True) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal's stderr with how many are done and the time left; the function adds to what is done.

    doing: what the command does. done: of the total, from the start. seen: False where lines of results run through it.
    """
    if not seen or sys.stderr is None or not sys.stderr.isatty():
        yield lambda share: None
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
        # The rate is that of the whole run so far: prompts that are being read, and long answers, would make it jump.
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        speed_estimate_period=1e9,
    ) as shown:
        task = shown.add_task(doing, total=total, completed=done)
        yield lambda share: shown.update(task, advance=share)
