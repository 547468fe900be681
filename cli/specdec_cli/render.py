"""Output: the answer on stdout, exact unless it is a terminal; everything else on stderr.

All output passes through here, and on a terminal through `specdec_cli.terminal`, which makes it safe.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from spec_local.errors import InvalidRequest, SpecLocalError
from specdec_cli import last_resort, names, terminal, waiting

if TYPE_CHECKING:
    from rich.console import Console


def prepare_stdout() -> None:
    """Make stdout write the model's bytes unchanged in any locale."""
    stdout: Any = sys.stdout
    stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")


def discard(stream: TextIO) -> None:
    """Discard the buffered output of a broken stream, which would otherwise fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write(text: str) -> None:
    """Write results other than an answer to stdout."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_object(content: Mapping[str, object]) -> None:
    """Write an object to stdout, as a line of JSON."""
    write(json.dumps(content, ensure_ascii=False) + "\n")


def confirmed(question: str, refusal: SpecLocalError) -> bool:
    """Ask a question on the terminal, and return whether the answer is yes.

    Raises:
        SpecLocalError: `refusal`; nobody can answer.
        KeyboardInterrupt: Ctrl-C or Ctrl-D was pressed.
    """
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        raise refusal
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None


def confirmed_deletion(what: str, yes: bool) -> bool:
    """Ask whether to delete something, unless `yes`, as of --yes, says so; raises as `confirmed` does."""
    refusal = InvalidRequest(f"this would delete {what}: pass --yes to confirm")
    return yes or confirmed(f"Delete {what}?", refusal)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write lines with aligned cells to stdout; right: columns that are aligned on their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row))
        write("  ".join(cells).rstrip() + "\n")


def date(seconds: float) -> str:
    """Return a time since the epoch as date and time of this place."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


_unfinished: Any = None  # stdout, if the last line of the answer has no end yet


def answer(text: str, style: str = "") -> None:
    """Write a part of an answer to stdout; style: an escape sequence, for terminals only."""
    global _unfinished
    stream: Any = sys.stdout
    if isinstance(stream, terminal.Screen):
        text, stream = stream.prose(text), stream.stream
    if text:
        _unfinished = None if text.endswith("\n") else sys.stdout
    with waiting.hidden():
        stream.write(f"{style}{text}{_PLAIN}" if style else text)
        stream.flush()


def line_is_open() -> bool:
    """Return whether the last line of the answer has no end yet."""
    return _unfinished is sys.stdout


def end_answer() -> None:
    """End the last line of the answer, if it has no end yet."""
    if _unfinished is sys.stdout:
        answer("\n")


DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def coloured(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with styles, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Return the columns of the terminal that shows stdout; None for a file or a pipe."""
    return terminal.width() if sys.stdout.isatty() else None


def note(line: str, text: str = "") -> None:
    """Write a line to stderr, dim and broken between words on a terminal.

    text: of a conversation, appended to the line.
    """
    _write_error(_fitting(_one_line(line) + terminal.Prose()(text)), DIM)


def notes(lines: Iterable[str]) -> None:
    """Write lines to stderr, as `note` does."""
    for line in lines:
        note(line)


def error(message: str) -> None:
    """Write an error to stderr, as one line."""
    _write_error(_one_line(f"specdec: {' '.join(message.split())}"))


def _fitting(line: str) -> str:
    """Break a line between words if standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return line
    from specdec_cli.wrapping import Wrapped

    parts: list[str] = []
    wrapped = Wrapped(lambda text, style: parts.append(text), lambda: terminal.width(sys.stderr))
    wrapped(line)
    wrapped.flush()
    return "".join(parts)


def _one_line(text: str) -> str:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a file name may be no UTF-8
    return terminal.visible(names.with_options(text.replace("\n", " ")))


def _write_error(text: str, style: str = "") -> None:
    global _unfinished
    stream: Any = sys.stderr
    if stream is None:  # closed
        return
    if isinstance(stream, terminal.Screen):
        stream = stream.stream
    if style and coloured(stream):
        text = f"{style}{text}{_PLAIN}"
    if _follows_unfinished_line(stream):
        text, _unfinished = "\n" + text, None
    try:
        with waiting.hidden():
            stream.write(text + "\n")
            stream.flush()
    except OSError:  # a failed note must not end the answer
        discard(stream)


def _follows_unfinished_line(stderr: TextIO) -> bool:
    """Return whether the answer is in the same file, pipe or terminal, and its last line has no end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or no file
        if _unfinished is sys.stdout:
            return os.path.sameopenfile(sys.stdout.fileno(), stderr.fileno())
    return False


def console(stream: TextIO, **options: Any) -> "Console":
    """Return a rich console, which writes its escape sequences to a terminal: make texts visible first."""
    from rich.console import Console

    return Console(file=terminal.raw(stream), markup=False, emoji=False, highlight=False, **options)


ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process. A closed terminal sends SIGHUP."""


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C, SIGTERM and SIGHUP in the block; yields a function that returns whether one has arrived.

    A second signal is not delayed, except SIGHUP, which terminals send twice; if a call of the model does not
    end, the process does. After the block, a delayed SIGTERM or SIGHUP is raised again, and `exits.guarded`
    ends the command.
    """
    received: list[int] = []

    def on_signal(signum: int) -> None:
        if received and signum != signal.SIGHUP:
            received.clear()
            for each, handler in previous.items():
                signal.signal(each, handler)
            signal.raise_signal(signum)
        received.append(signum)

    # Under nohup, SIGHUP is ignored.
    handled = [s for s in (signal.SIGINT, *ENDING) if signal.getsignal(s) != signal.SIG_IGN]
    try:
        with last_resort.handling(handled, on_signal) as previous, last_resort.counting_signals():
            yield lambda: bool(received)
    finally:
        for signum in set(received).intersection(ENDING):
            signal.raise_signal(signum)
