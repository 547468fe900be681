r"""Restricts what text does to a terminal: it is shown, starts a line, or advances to a tab stop.

Texts of models, files, servers and users may contain characters that change a terminal's colours, title or
clipboard, overwrite what it shows, or reverse the order of what follows. A `Screen` shows them as escapes,
such as ``\u001b``. The program's own colours and cursor movements go to the stream below it (`raw`).

There are two levels:

- `visible`, for errors, notes, names and tables: of invisible characters, only the two joiners remain, which
  belong to letters of many languages and to emoji.
- `Prose`, for texts of a conversation: all characters that a language needs remain, also direction marks,
  embeddings and isolates, whose effect ends with the line. The two overrides are escaped: no language needs
  them, and they make text look different from what is copied.
"""

import codecs
import contextlib
import io
import os
import re
import shutil
import sys
import termios
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from specdec_cli import waiting

_JOINERS = "\u200c\u200d"
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories
_NOT_PROSE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202d\u202e]")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text with escapes in place of invisible characters other than newline, tab and joiners."""
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def _visible(char: str) -> str:
    if char.isprintable() or char in "\n\t" or char in _JOINERS:
        return char
    return _escaped(char) if unicodedata.category(char) in _INVISIBLE else char


def _escaped(char: str) -> str:
    """Return the escape of a character in JSON, so that JSON on a terminal remains valid."""
    return re.sub("....", r"\\u\g<0>", char.encode("utf-16-be", "surrogatepass").hex())


class Prose:
    """Makes a text visible that arrives in parts.

    A carriage return starts a new line instead of overwriting the current one. U+FFFD replaces bytes that are
    not UTF-8.
    """

    def __init__(self) -> None:
        self._after_return = False

    def __call__(self, part: str) -> str:
        if not part:
            return ""
        if self._after_return:
            part = part.removeprefix("\n")
        self._after_return = part.endswith("\r")
        part = part.replace("\r\n", "\n").replace("\r", "\n")
        return _NOT_UTF8.sub("\ufffd", _NOT_PROSE.sub(lambda found: _escaped(found[0]), part))


def width(stream: TextIO | None = None) -> int:
    """Return the width of a terminal in cells, by default that of standard output; windows change theirs."""
    columns = 0
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size((stream or sys.stdout).fileno()).columns
    return columns or shutil.get_terminal_size().columns


class Screen:
    """A stream that people read: a terminal, or standard error. What is written to it becomes `visible`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.prose = Prose()
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        with waiting.hidden():
            self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream to which rich writes, which Typer uses for its help."""
        return raw(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Bytes(io.RawIOBase):
    """Writes UTF-8 to a screen, as `Prose`."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with waiting.hidden():
            self._screen.stream.write(self._screen.prose(self._decoder.decode(bytes(data))))
        return len(data)

    def flush(self) -> None:
        self._screen.stream.flush()


def raw(stream: TextIO) -> TextIO:
    """Return the stream below a screen; it obeys control characters."""
    while (below := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = below
    return stream


def restoration() -> Callable[[], None]:
    """Return a function that gives the terminal its modes of now again, a cursor, and no style.

    It also erases a line of `waiting`.
    """
    number = next(filter(os.isatty, (0, 1, 2)), None)
    if number is None:
        return lambda: None
    modes = termios.tcgetattr(number)

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            if os.tcgetpgrp(number) == os.getpgrp():  # otherwise another program has the terminal
                termios.tcsetattr(number, termios.TCSANOW, modes)
                os.write(number, b"\x1b[0m\x1b[J\x1b[?25h")

    return restore


def protect() -> None:
    """Make the standard streams screens, except standard output if it is redirected: it is then exact."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = cast(TextIO, Screen(sys.stdout))
    if sys.stderr is not None:
        sys.stderr = cast(TextIO, Screen(sys.stderr))
