"""Tables, bars and paragraphs of a report: as wide as necessary in a file, and as a terminal on one."""

import textwrap
from collections.abc import Iterator, Sequence

from spec_local.bench.figures import Estimate

_NARROWEST = 30  # columns; on a narrower terminal, lines are as long as on this one
_BAR = 40  # characters of the longest bar
_SHORTEST_BAR = 10  # the same; shorter ones show nothing


def document(parts: Sequence[str], width: int | None = None) -> str:
    """Join tables, bars and paragraphs; `width` wraps the paragraphs."""
    return (
        "\n\n".join(part if part.startswith(("|", " ")) else paragraph(part, width) for part in parts) + "\n"
    )


def paragraph(text: str, width: int | None = None) -> str:
    """The text, wrapped between words if a width is given. What has no spaces, as a path, stays whole."""
    if width is None:
        return text
    return textwrap.fill(text, max(width, _NARROWEST), break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A Markdown table with padded columns; columns of numbers are right-aligned.

    Args:
        width: columns of the terminal that shows it. A wider table becomes several, each with the first
            column and some of the others, and long cells are wrapped. None: as wide as necessary.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [all(not c or c[0].isdigit() for c in column[1:]) and any(column[1:]) for column in columns]
    if width is None:
        return _block(cells, range(len(columns)), widths, right)
    width = max(width, _NARROWEST)
    widths[0] = min(widths[0], width // 2)
    widths[1:] = [min(w, width - widths[0] - _FRAME * 2 - 1) for w in widths[1:]]
    return "\n\n".join(_block(cells, chosen, widths, right) for chosen in _fitting(widths, width))


_FRAME = 3  # characters between two columns; a line has one more


def _fitting(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Divide the columns into tables that fit, each with the first column."""
    chosen = [0]
    for i in range(1, len(widths)):
        if len(chosen) > 1 and sum(widths[k] + _FRAME for k in (*chosen, i)) + 1 > width:
            yield chosen
            chosen = [0]
        chosen.append(i)
    yield chosen


def _block(
    cells: Sequence[Sequence[str]], chosen: Sequence[int], widths: Sequence[int], right: Sequence[bool]
) -> str:
    lines = []
    for number, row in enumerate(cells):
        wrapped = [_lines(row[i], widths[i]) for i in chosen]
        for at in range(max(map(len, wrapped))):
            texts = [parts[at] if at < len(parts) else "" for parts in wrapped]
            padded = [
                text.rjust(widths[i]) if right[i] else text.ljust(widths[i])
                for i, text in zip(chosen, texts, strict=True)
            ]
            lines.append(" | ".join(padded))
        if number == 0:
            lines.append(" | ".join("-" * (widths[i] - 1) + "-:"[right[i]] for i in chosen))
    return "\n".join(f"| {line} |" for line in lines)


def _lines(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]


def bars(groups: Sequence[tuple[str, str, Estimate]], width: int) -> str:
    """A bar for each estimate: full below the interval, shaded inside it, with a mark at 1.

    Args:
        groups: two labels and an estimate for each bar.
        width: columns of the terminal. On a narrow one bars are short, or left out: "".
    """
    widths = [max(len(label) for label in labels) for labels in list(zip(*groups, strict=True))[:2]]
    labels = [
        " ".join(part for part in (first.ljust(widths[0]), second.ljust(widths[1])) if part)
        for first, second, _ in groups
    ]
    longest = max(len(f"    {label}  {interval(e)}") for label, (*_, e) in zip(labels, groups, strict=True))
    length = min(_BAR, width - longest)
    if length < _SHORTEST_BAR:
        return ""
    scale = length / max(1.0, *(e.high for *_, e in groups))
    mark = min(length - 1, round(scale))
    drawn = []
    for label, (*_, e) in zip(labels, groups, strict=True):
        ends = [round(scale * end) for end in (e.low, e.value, e.high)]
        bar = ("█" * ends[0] + "▓" * (ends[1] - ends[0]) + "░" * (ends[2] - ends[1])).ljust(length)
        drawn.append(f"    {label} {bar[:mark]}│{bar[mark + 1 :]} {interval(e)}")
    return "\n".join(drawn)


def interval(e: Estimate) -> str:
    """Format as ``1.23 [1.10, 1.35]``; without the interval for a single prompt."""
    return f"{e.value:.2f}" if e.n < 2 else f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]"
