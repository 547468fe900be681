"""Line breaks between the words of a text that arrives in parts: a terminal would break within words."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from rich.cells import cell_len

from specdec_cli import terminal
from specdec_cli.code_fences import Fences

_Part = tuple[str, str]  # a text and its style

_LONGEST = 24  # cells: only where less room is left on a line, a word is kept back until it is complete
_TAB = 8  # cells


class Unwrapped:
    """Writes a text as it is; `write` as for `Wrapped`."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write

    def __call__(self, text: str, style: str = "") -> None:
        self._write(text, style)

    def flush(self) -> None:
        """Do nothing: nothing is kept back."""


class Wrapped:
    """Writes a text, with a line break in place of the spaces before a word that does not fit.

    Lines of code between fences are left as they are. Nothing that is written changes later.

    Args:
        write: writes a text with a style (an escape sequence; "": none).
        width: returns the width of a line in cells.
        begun: the text before, of an answer that is continued; it is not written.
    """

    def __init__(
        self, write: Callable[[str, str], None], width: Callable[[], int] = terminal.width, begun: str = ""
    ) -> None:
        self._write, self._width = write, width
        self._prose = terminal.Prose()
        self._out: list[_Part] = []  # to be written at the end of the call
        self._column = 0  # after that
        self._spaces: list[_Part] = []  # before the word
        self._word: list[_Part] = []  # the beginning of a word, which waits for the rest
        self._open = False  # another part of the word precedes it
        self._line = ""  # the beginning of the line: whether it is a fence
        # In a list item, code is indented further than Markdown's fences outside of one may be.
        self._fences = Fences("\n".join(map(str.strip, begun.split("\n"))))

    def __call__(self, text: str, style: str = "") -> None:
        """Write a part of the text, except the beginning of a word that may not fit."""
        for piece in _pieces(self._prose(text)):
            if piece == "\n":
                self._end_word()
                self._break()
                self._fences.read(self._line.strip())
                self._line = ""
                continue
            self._line += piece
            if self._fences.in_code:
                self._out.append((piece, style))
            elif piece.isspace():
                self._end_word()
                self._spaces.append((piece, style))
            else:
                if _is_wide(piece):  # a line may break between the characters of these scripts
                    self._end_word()
                self._word.append((piece, style))
                self._release()
        self._write_out()

    def flush(self) -> None:
        """Write what has been kept back."""
        self._end_word()
        self._write_out()

    def _release(self) -> None:
        """Write the beginning of a word that most probably fits, or that is too long for any line."""
        left = self._width() - self._column - _cells(self._spaces)
        if self._open or left >= _LONGEST or _cells(self._word) > self._width():
            self._put()

    def _end_word(self) -> None:
        if self._word:
            if self._column and self._column + _cells(self._spaces) + _cells(self._word) > self._width():
                self._break()
            self._put()
        self._open = False

    def _break(self) -> None:
        self._spaces.clear()
        self._out.append(("\n", ""))
        self._column = 0

    def _put(self) -> None:
        self._out += self._spaces + self._word
        self._column += _cells(self._spaces) + _cells(self._word)
        self._spaces.clear()
        self._word.clear()
        self._open = True

    def _write_out(self) -> None:
        for style, parts in itertools.groupby(self._out, key=lambda part: part[1]):
            self._write("".join(text for text, _ in parts), style)
        self._out.clear()


def _pieces(text: str) -> Iterator[str]:
    """Yield newlines, spaces and wide characters one by one, and the parts between them."""
    start = 0
    for i, char in enumerate(text):
        if char.isspace() or _is_wide(char):
            if start < i:
                yield text[start:i]
            yield char
            start = i + 1
    if start < len(text):
        yield text[start:]


def _is_wide(text: str) -> bool:
    return len(text) == 1 and cell_len(text) == 2


def _cells(parts: Iterable[_Part]) -> int:
    return sum(_TAB if text == "\t" else cell_len(text) for text, _ in parts)
