"""The input of a chat: a line editor on a terminal, else plain lines of standard input."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.errors import InvalidRequest
from specdec_cli import render, terminal

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_QUOTES = '"""'
_MAX_HISTORY = 1 << 24  # bytes; a message has a hundred


class EndOfChat(Exception):
    """The input ended, or a command leaves the chat."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line ``/name rest``. Text between triple quotes is never a command."""

    name: str
    rest: str

    @classmethod
    def parse(cls, line: str) -> "Command":
        name, _, rest = line.strip().partition(" ")
        return cls(name, rest.strip())


def interactive() -> bool:
    """Return whether standard input is a terminal; Ctrl-C then stops an answer, not the program."""
    return sys.stdin is not None and sys.stdin.isatty()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Do not show on the terminal what is typed in the block; it is read after it, even after Ctrl-C."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    if not interactive():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    hidden = list(before)
    hidden[3] = before[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(keyboard, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def last_chat() -> Path:
    """The file of the last conversation on a terminal, in a folder that may not exist."""
    from spec_local.system.folders import user_folder

    return user_folder("state") / "last-chat.json"


Read = Callable[[], str | Command]


def message_reader(completions: Mapping[str, Iterable[str] | None]) -> Read:
    """A function that reads the next command or message: a line, or several lines between triple quotes.

    Args:
        completions: the commands, with the words that Tab completes after each; None: file names.

    Raises (when called):
        EndOfChat: the input ended.
    """
    read = _line_editor(completions) if interactive() and sys.stdout.isatty() else _plain_line
    return lambda: _message(read)


def _message(read: Callable[[str], str]) -> str | Command:
    in_quotes = False
    try:
        text = read("> ").removeprefix("\ufeff")  # a byte order mark would hide a command
        if text.startswith("/"):
            return Command.parse(text)
        if not text.lstrip().startswith(_QUOTES):
            return text
        in_quotes = True
        text = text.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + read(". ")
        return text.rstrip().removesuffix(_QUOTES).strip("\n")
    except EOFError:
        if in_quotes and not interactive():
            raise InvalidRequest(f"the input ended within a message: close it with {_QUOTES}") from None
        raise EndOfChat from None


def _plain_line(prompt: str) -> str:
    """Read a line of standard input."""
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start} of a line): convert it first"
        ) from None


def _line_editor(completions: Mapping[str, Iterable[str] | None]) -> Callable[[str], str]:
    """A line editor with history, completion and bracketed paste."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
    from prompt_toolkit.output import create_output

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            typed = document.text_before_cursor
            name, space, rest = typed.partition(" ")
            if not typed.startswith("/") or "\n" in typed:
                return
            if space and completions.get(name, ()) is None:
                for each in PathCompleter(expanduser=True).get_completions(Document(rest), event):
                    yield Completion(each.text, each.start_position, terminal.visible(each.display_text))
            else:
                known, start = (completions.get(name) or (), rest) if space else (completions, name)
                yield from (Completion(word, -len(start)) for word in known if word.startswith(start))

    class NoOverrides(Processor):
        """Replaces the characters that the editor shows as they are but that reverse what follows."""

        def apply_transformation(self, given: TransformationInput) -> Transformation:
            return Transformation(
                [(f[0], re.sub("[\u202d\u202e]", "\ufffd", f[1]), *f[2:]) for f in given.fragments]
            )

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=_history(),
        key_bindings=keys,
        completer=Commands(),
        complete_while_typing=False,
        enable_suspend=True,
        input_processors=[NoOverrides()],
        output=create_output(terminal.raw(sys.stdout)),  # the editor makes control characters visible itself
    )
    return session.prompt


def _history() -> "History":
    """The history of this and earlier chats, in a file that only the user can read."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from spec_local.system.files import read_bytes
    from spec_local.system.folders import user_folder

    class TolerantHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # the message must not be lost if the disk is full
                super().store_string(string)

    try:
        path = user_folder("state") / "chat-history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
        read_bytes(path, _MAX_HISTORY)  # prompt_toolkit would wait for a pipe, and read any size
        return TolerantHistory(str(path))
    except OSError as error:
        render.note(f"the input history is not saved ({error.strerror}: {error.filename})")
        return InMemoryHistory()
