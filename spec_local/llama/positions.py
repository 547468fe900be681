"""The positions of a history: of its tokens, and of spans that take more or fewer positions than cells."""

from collections.abc import Sequence

from spec_local.core.span import Cell


class Positions:
    """Positions of the entries of a history. All cells of the first n entries are before position `at(n)`.

    Attributes:
        start: of the first entry.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        # Of each span: its first entry, the next one after it, and the position of that.
        self._spans: list[tuple[int, int, int]] = []

    def at(self, n: int) -> int:
        """The position of entry number `n`, which does not split a span."""
        for _, end, position in reversed(self._spans):
            if end <= n:
                return position + n - end
        return self.start + n

    def n_before(self, position: int) -> int:
        """The number of entries, whole spans only, whose cells are before a position."""
        for first, end, next_ in reversed(self._spans):
            if next_ <= position:
                return end + position - next_
            if position <= self.at(first):
                continue
            return first  # within the span
        return max(0, position - self.start)

    def add(self, entries: Sequence[int], n_before: int) -> None:
        """Note that these entries follow the first `n_before`."""
        for i, cell in enumerate(entries):
            if isinstance(cell, Cell) and not cell.index and cell.span.n_positions != len(cell.span):
                first = n_before + i
                end = first + len(cell.span)
                self._spans.append((first, end, self.at(first) + cell.span.n_positions))

    def cut(self, n: int) -> None:
        """Keep only the first n entries."""
        while self._spans and self._spans[-1][1] > n:
            self._spans.pop()
        if not n:
            self.start = 0
