"""The input of a chat: a line editor on a terminal, else plain lines of standard input."""

import contextlib
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.errors import InvalidRequest
from specdec_cli import render, terminal, typed_ahead, waiting

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


def last_chat() -> Path:
    """The file of the last conversation on a terminal, in a folder that may not exist."""
    from spec_local.system.folders import user_folder

    return user_folder("state") / "last-chat.json"


def message_reader(completions: Mapping[str, Iterable[str] | None]) -> Callable[[], str | Command]:
    """A function that reads the next command or message: a line, or several lines between triple quotes.

    Args:
        completions: the commands, with the words that Tab completes after each; None: file names.

    Raises (when called):
        EndOfChat: the input ended.
    """
    read = _editor(completions) if interactive() and sys.stdout.isatty() else _quoted_lines
    return lambda: _message(read)


def _message(read: Callable[[], tuple[str, bool]]) -> str | Command:
    """Read a message; read: returns its text, and whether it was pasted: then its quotes are text."""
    try:
        text, is_pasted = read()
    except EOFError:
        raise EndOfChat from None
    if text.startswith("/") and not (is_pasted and "\n" in text):
        return Command.parse(text)
    if is_pasted or not text.lstrip().startswith(_QUOTES):
        return text
    return text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def _is_open(text: str) -> bool:
    """Return whether a message begins with quotes that it does not end with yet."""
    quotes, rest = text.lstrip()[: len(_QUOTES)], text.lstrip()[len(_QUOTES) :]
    return quotes == _QUOTES and not rest.rstrip().endswith(_QUOTES)


def _quoted_lines() -> tuple[str, bool]:
    """Read a message from standard input."""
    text = _line().removeprefix("\ufeff")  # a byte order mark would hide a command
    try:
        while _is_open(text):
            text += "\n" + _line()
    except EOFError:
        if not interactive():
            raise InvalidRequest(f"the input ended within a message: close it with {_QUOTES}") from None
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


def _editor(completions: Mapping[str, Iterable[str] | None]) -> Callable[[], tuple[str, bool]]:
    """A line editor with history and completion. Its message begins with what was typed meanwhile.

    A paste is a part of one message, also in a terminal that does not mark where it begins and ends: keys
    then follow Enter at once.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import Condition, has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys
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

    keys, pasted = KeyBindings(), False
    typing = has_focus(DEFAULT_BUFFER)  # not searching the history

    def is_open(text: str) -> bool:
        return not pasted and _is_open(text)

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        nonlocal pasted
        buffer = event.current_buffer
        follows = any(key.key != Keys.CPRResponse for key in event.key_processor.input_queue)
        follows = follows or bool(select.select([sys.stdin], [], [], 0)[0])  # keys are read 1,024 at a time
        if follows or is_open(buffer.text):
            pasted |= follows
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:
        nonlocal pasted
        pasted |= not event.current_buffer.text
        event.current_buffer.insert_text(event.data.replace("\r\n", "\n").replace("\r", "\n"))

    @keys.add("c-c", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text:
            buffer.append_to_history()
        kept = "the up arrow brings the message back; " if buffer.text else ""
        event.app.exit(exception=KeyboardInterrupt(kept), style="class:aborting")

    @keys.add("c-d", filter=typing & Condition(lambda: is_open(session.default_buffer.text)))
    def _(event: KeyPressEvent) -> None:
        hint = f"the message ends with {_QUOTES}; Ctrl-C discards it"
        run_in_terminal(lambda: render.note(hint))

    session: PromptSession[str] = PromptSession(
        history=_history(),
        key_bindings=keys,
        completer=Commands(),
        complete_while_typing=False,
        enable_suspend=True,
        input_processors=[NoOverrides()],
        prompt_continuation=". ",
        output=create_output(terminal.raw(sys.stdout)),  # the editor makes control characters visible itself
    )

    def read() -> tuple[str, bool]:
        nonlocal pasted
        text, pasted = typed_ahead.take()
        return session.prompt("> ", default=text).removeprefix("\ufeff"), pasted

    return read


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
