"""`specdec draft versions` and `rollback`: the versions of a head that learns from the user's answers."""

import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from spec_local.errors import InvalidRequest
from spec_local.models.names import resolve
from specdec_cli import completion, exits, render
from specdec_cli.options import NeededMainOption, needed_main

if TYPE_CHECKING:
    from spec_local.models.head_versions import Data, HeadVersion, HeadVersions

_HEADINGS = ("version", "trained", "answers", "your answers", "built-in prompts", "")
_Main = Annotated[
    str | None,
    Argument(
        metavar="MAIN",
        help="Main model that the head drafts for: a file or a name.",
        autocompletion=completion.models,
    ),
]


def versions(main: _Main = None, main_option: NeededMainOption = None) -> None:
    """List the heads that have learned from your answers, and their acceptance rates.

    For each version, shows the number of answers that it has learned from, and
    the acceptance rate of its first draft token before and after training, on
    your held-out answers and on built-in prompts.

    Example:

      specdec draft versions main.gguf
    """
    with exits.guarded():
        found, name = _found(main, main_option)
        entries, current = found.all(), found.current()
        if not entries:
            raise InvalidRequest(_none(name))
        rows = [_HEADINGS, *(_row(found, entry, current) for entry in entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            render.write("  ".join(cells).rstrip() + "\n")


def rollback(main: _Main = None, main_option: NeededMainOption = None) -> None:
    """Go back to the previous head permanently.

    A running server switches to it when it is idle.

    Example:

      specdec draft rollback main.gguf
    """
    with exits.guarded():
        found, name = _found(main, main_option)
        current = found.current()
        if not current:
            raise InvalidRequest(_none(name))
        previous = found.rollback()
        now = "the head or draft model that you give, or one that is found,"
        if previous:
            now = f"version {previous.number} of {_date(previous)}"
        render.note(f"version {current.number} is no longer used for {name}; {now} is used instead")


def _found(main: str | None, main_option: str | None) -> "tuple[HeadVersions, str]":
    """The versions, and the name of the main model's file."""
    from spec_local.models.head_versions import HeadVersions

    path = resolve(needed_main(main, main_option))
    return HeadVersions(path, render.note), path.name


def _none(name: str) -> str:
    return (
        f"no head for {name} has learned from your answers yet: specdec serve --learn trains one while idle"
    )


def _row(found: "HeadVersions", entry: "HeadVersion", current: "HeadVersion | None") -> tuple[str, ...]:
    state = ""
    if entry.is_rolled_back:
        state = "rolled back"
    elif current and entry.number == current.number:
        state = "current"
    elif not found.path(entry).exists():
        state = "deleted"
    change = (_change(entry, data) for data in ("user", "built_in"))
    return (str(entry.number), _date(entry), f"{entry.n_answers:,}", *change, state)


def _change(entry: "HeadVersion", data: "Data") -> str:
    before, after = (f"{each[data]:.2f}" if data in each else "–" for each in (entry.before, entry.after))
    return f"{before} → {after}"


def _date(entry: "HeadVersion") -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.trained))
