"""Show lists of models: tables that fit the terminal, or lines of tab-separated values for programs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from spec_local.system.files import format_size
from specdec_cli import render, terminal

_GAP = 2  # columns between two cells
_NAME_SHARE = 0.4  # of the width; a longer name stands on a line of its own
_TEXT_WIDTH = 28  # columns at least for the last cell; if there are fewer, the third cell is left out


@dataclass(frozen=True)
class ListedModel:
    """A model or pair.

    size: bytes, None if unknown. state: where it is. kind: its licence, or the names of a pair's models.
    """

    name: str
    size: int | None
    state: str
    kind: str
    text: str


@dataclass(frozen=True)
class Section:
    """Rows under a title. third: the attribute of a row in the third column of the table."""

    title: str
    rows: Sequence[ListedModel]
    third: str


def show(groups: Sequence[Section]) -> None:
    """Write the groups to stdout: tables on a terminal, and lines of five values elsewhere."""
    if sys.stdout.isatty():
        _show_tables([group for group in groups if group.rows])
        return
    for row in (row for group in groups for row in group.rows):
        values = (row.name, row.state, row.kind, row.text, "" if row.size is None else str(row.size))
        render.write("\t".join(map(_one_line, values)) + "\n")


def _show_tables(groups: Sequence[Section]) -> None:
    width = terminal.width()
    styles = {} if render.coloured(sys.stdout) else {"color_system": None}
    console = render.console(sys.stdout, width=width, **styles)
    for i, group in enumerate(groups):
        console.print(*([""] if i else []), Text(group.title, style="bold"), sep="\n", soft_wrap=True)
        cells = [[row.name, _size(row.size), getattr(row, group.third), row.text] for row in group.rows]
        for line in lines([[terminal.visible(_one_line(cell)) for cell in row] for row in cells], width):
            console.print(Text(line), soft_wrap=True)


def lines(rows: list[list[str]], width: int) -> list[str]:
    """Lay out rows of name, size, a less important cell, and a text, which is wrapped; no cell is cut."""
    names = [cell_len(row[0]) for row in rows]
    limit = max(int(width * _NAME_SHARE), min(names))
    widths = [max(n for n in names if n <= limit), *(max(cell_len(row[i]) for row in rows) for i in (1, 2))]
    if width - sum(widths) - 3 * _GAP < _TEXT_WIDTH:
        del widths[2]
    left = sum(widths) + len(widths) * _GAP
    found = []
    for name, size, third, text in rows:
        padded = [name, size.rjust(widths[1]), third][: len(widths)]
        if cell_len(name) > widths[0]:
            found.append(name)
            padded[0] = ""
        start = "".join(set_cell_size(cell, n + _GAP) for cell, n in zip(padded, widths, strict=True))
        wrapped = _wrapped(text, max(width - left, _TEXT_WIDTH))
        found += [f"{start if i == 0 else ' ' * left}{line}".rstrip() for i, line in enumerate(wrapped)]
    return found


def _wrapped(text: str, width: int) -> list[str]:
    wrapped = Text(text).wrap(render.console(sys.stdout), width, overflow="fold")
    return [line.plain for line in wrapped] or [""]


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def _one_line(text: str) -> str:
    return " ".join(text.split())
