"""Texts that a user gives: files, or standard input."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from spec_local.system.files import limited, read_input
from specdec_cli import render

STANDARD = Path("-")
"""Standard input or standard output, given as a file."""
_SILENT_S = 1.0  # that a command waits for its input without a word


def read_given(path: Path, max_bytes: int) -> tuple[bytes, str]:
    """The content of a file that a user gave, or of standard input for -, and its name for errors.

    Raises:
        InvalidRequest: see `read_input`.
    """
    if path != STANDARD:
        return read_input(path, max_bytes), str(path)
    name = "standard input"
    if sys.stdin is None:
        return b"", name
    with _explained_wait():
        content = sys.stdin.buffer.read(max_bytes + 1)
    return limited(content, name, max_bytes), name


@contextlib.contextmanager
def _explained_wait() -> Iterator[None]:
    """Say what the command waits for if standard input does not end soon, or is typed."""
    is_typed = sys.stdin.isatty()
    text = "type the text, then press Ctrl-D" if is_typed else "add < /dev/null if nothing is piped in"
    delay = 0.0 if is_typed else _SILENT_S
    timer = threading.Timer(delay, render.note, [f"waiting for the end of standard input: {text}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
