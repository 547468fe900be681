"""The input of a chat: a line editor on a terminal, else plain lines of standard input."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spec_local.errors import InvalidRequest
from spec_local.system.folders import user_folder
from specdec_cli import waiting
from specdec_cli.given_images import begins_with_image

QUOTES = '"""'


class EndOfChat(Exception):
    """The input ended, or a command leaves the chat."""


@dataclass(frozen=True, slots=True)
class TypedMessage:
    """A message; is_verbatim: pasted lines, or text between triple quotes, in which nothing is an image."""

    text: str
    is_verbatim: bool = False


@dataclass(frozen=True, slots=True)
class TypedCommand:
    """A line ``/name rest``. Text between triple quotes is never a command."""

    name: str
    rest: str


def interactive() -> bool:
    """Return whether standard input is a terminal; Ctrl-C then stops an answer, not the program."""
    return sys.stdin is not None and sys.stdin.isatty()


def last_chat() -> Path:
    """The file of the last conversation on a terminal, in a folder that may not exist."""
    return user_folder("state") / "last-chat.json"


def message_reader(
    completions: Mapping[str, Iterable[str] | None],
) -> Callable[[], TypedMessage | TypedCommand]:
    """A function that reads the next command or message: a line, or several lines between triple quotes.

    Args:
        completions: the commands, with the words that Tab completes after each; None: file names.

    Raises (when called):
        EndOfChat: the input ended.
    """
    if not (interactive() and sys.stdout.isatty()):
        return partial(_message, _quoted_lines)
    from specdec_cli.chat_editor import (
        Editor,  # prompt_toolkit takes a tenth of a second, and needs a terminal
    )

    return partial(_message, Editor(completions).read)


def _message(read: Callable[[], tuple[str, bool]]) -> TypedMessage | TypedCommand:
    """Read a message; read: returns its text, and whether it was pasted: then its quotes are text."""
    try:
        text, is_pasted = read()
    except EOFError:
        raise EndOfChat from None
    is_verbatim = is_pasted and "\n" in text
    if text.startswith("/") and not is_verbatim and not begins_with_image(text):
        name, _, rest = text.strip().partition(" ")
        return TypedCommand(name, rest.strip())
    if is_pasted or not text.lstrip().startswith(QUOTES):
        return TypedMessage(text, is_verbatim)
    return TypedMessage(text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), is_verbatim=True)


def is_open(text: str) -> bool:
    """Return whether a message begins with quotes that it does not end with yet."""
    quotes, rest = text.lstrip()[: len(QUOTES)], text.lstrip()[len(QUOTES) :]
    return quotes == QUOTES and not rest.rstrip().endswith(QUOTES)


def _quoted_lines() -> tuple[str, bool]:
    """Read a message from standard input."""
    text = _line().removeprefix("\ufeff")  # a byte order mark would hide a command
    try:
        while is_open(text):
            text += "\n" + _line()
    except EOFError:
        if not interactive():
            raise InvalidRequest(f"the input ended within a message: close it with {QUOTES}") from None
    return text, False


def _line() -> str:
    """Read a line of standard input."""
    with (
        contextlib.nullcontext() if interactive() else waiting.line("waiting for a line of standard input …")
    ):
        line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start} of a line): convert it first"
        ) from None
