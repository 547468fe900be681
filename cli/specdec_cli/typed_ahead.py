"""What is typed or pasted while a chat is busy: it is not shown, and waits as the beginning of a message."""

import contextlib
import os
import re
import select
import sys
import termios
import threading
import time
from collections.abc import Iterator

_PASTED = re.compile("(\x1b\\[200~.*?(?:\x1b\\[201~|$))", re.DOTALL)  # as terminals mark it
_ESCAPED = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O?[ -~])?")  # a key that moves the cursor, or with Alt
_KEYS = re.compile("[^\x00-\x1f\x7f]+|[\x00-\x1f\x7f]")
_LAST_WORD = re.compile(r"\S*\s*\Z")
_PAUSE_S, _LONGEST_S = 0.05, 2.0  # a paste that is coming has no longer pauses; a key may be held down

_received = bytearray()
_is_reading = False


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Read the keyboard in the block. Ctrl-C and Ctrl-Z act as always, and lose nothing that was typed."""
    global _is_reading
    editing = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if _is_reading or not editing:
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    own = [*before[:6], list(before[6])]
    own[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    own[3] = own[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
    own[6][termios.VMIN], own[6][termios.VTIME] = 1, 0
    is_over, over = os.pipe()
    reader = threading.Thread(target=_read, args=(keyboard, is_over), daemon=True)
    _is_reading = True
    try:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, own)
        reader.start()
        yield
    finally:
        os.close(over)
        if reader.ident:
            reader.join()
        os.close(is_over)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        _is_reading = False


def take() -> tuple[str, bool]:
    """Return what has been typed as text, and whether a part of it was pasted; forget it.

    Raises:
        EOFError: Ctrl-D was pressed before anything else.
    """
    received = _received.decode("utf-8", "replace")
    _received.clear()
    text, is_pasted = "", False
    for part in _PASTED.split(received):
        if part.startswith("\x1b[200~"):
            text += _lines(part.removeprefix("\x1b[200~").removesuffix("\x1b[201~"))
            is_pasted = True
        else:
            text = _typed(text, _lines(_ESCAPED.sub("", part)))
    return text.rstrip("\n"), is_pasted


def _read(keyboard: int, is_over: int) -> None:
    """Read until the other end of the pipe is closed, and then what is still coming."""
    last, deadline = 0.0, 0.0
    while True:
        if deadline:
            ready, _, _ = select.select([keyboard], [], [], _PAUSE_S * (10 if _is_within_paste() else 1))
            if not ready or time.monotonic() > deadline:
                return
        else:
            ready, _, _ = select.select([keyboard, is_over], [], [])
        if is_over in ready:
            if keyboard not in ready and time.monotonic() - last > _PAUSE_S:
                return
            deadline = time.monotonic() + _LONGEST_S
        if keyboard in ready:
            last = time.monotonic()
            try:
                if os.tcgetpgrp(keyboard) != os.getpgrp():  # in the background, reading would stop the chat
                    time.sleep(_PAUSE_S)
                elif part := os.read(keyboard, 1 << 16):
                    _received.extend(part)
                else:
                    return
            except OSError:  # the window is closed
                return


def _is_within_paste() -> bool:
    return _received.rfind(b"\x1b[200~") > _received.rfind(b"\x1b[201~")


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _typed(text: str, keys: str) -> str:
    """Return a text after more keys; those that move the cursor are ignored."""
    for key in _KEYS.findall(keys):
        if key in "\x7f\b":
            text = text[:-1]
        elif key == "\x15":  # Ctrl-U
            text = text[: text.rfind("\n") + 1]
        elif key == "\x17":  # Ctrl-W
            text = _LAST_WORD.sub("", text, count=1)
        elif key == "\x04" and not text:
            raise EOFError
        elif key.isprintable() or key in "\n\t":
            text += key
    return text
