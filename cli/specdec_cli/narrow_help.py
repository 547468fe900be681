"""The help of a command on a narrow terminal: each description stands below its name.

Typer's tables would cut names and words there.
"""

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from specdec_cli import render

_NARROW = 72  # columns from which tables cut nothing


def show(command: Any, ctx: Any) -> bool:
    """Write the help of a command if the terminal is narrow; return whether it is."""
    width = shutil.get_terminal_size().columns
    if width >= _NARROW:
        return False
    render.write("".join(f"{line}\n" for line in _lines(command, ctx, width)))
    return True


def _lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    yield from _wrapped(command.get_usage(ctx), width, 0, 7)
    for paragraph in (command.help or "").split("\n\n"):
        yield ""
        if paragraph.startswith("  "):  # examples
            for line in paragraph.splitlines():
                yield from _wrapped(line.strip(), width, 2, 4)
        else:
            yield from _wrapped(paragraph, width, 0, 0)
    for title, rows in _panels(command, ctx).items():
        yield from ("", f"{title}:")
        for name, text in rows:
            yield from _wrapped(name, width, 2, 4)
            yield from _wrapped(text, width, 6, 6)
    if command.epilog:
        yield ""
        yield from _wrapped(command.epilog, width, 0, 0)


def _panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return names and descriptions of all parameters and commands, by the titles of the tables."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if not getattr(param, "hidden", False):
            usual = "Options" if param.param_type_name == "option" else "Arguments"
            title = getattr(param, "rich_help_panel", None) or usual
            panels.setdefault(title, []).append(param.get_help_record(ctx))
    panels["Commands"] = [
        (name, (each.short_help or each.help or "").partition("\n\n")[0])
        for name, each in getattr(command, "commands", {}).items()
    ]
    return {title: rows for title, rows in panels.items() if rows}


def _wrapped(text: str, width: int, first: int, rest: int) -> list[str]:
    """Break a text between words; first, rest: the spaces before its first line and the others."""
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_on_hyphens=False,
    )
