"""What a person types to a chat: an editor on a terminal, lines off one."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.errors import InvalidRequest
from specdec_cli import render

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_QUOTES = '"""'


class Ended(Exception):
    """There is no more input."""


@dataclass(frozen=True, slots=True)
class Command:
    """``/name rest``, on a line of its own; what stands between triple quotes is none."""

    name: str
    rest: str

    @classmethod
    def of(cls, line: str) -> "Command":
        name, _, rest = line.strip().partition(" ")
        return cls(name, rest.strip())


def by_hand() -> bool:
    """Whether a person types: then Ctrl-C stops an answer, and not the program."""
    return sys.stdin is not None and sys.stdin.isatty()


Read = Callable[[], str | Command]


def reader(words: Mapping[str, Iterable[str] | None]) -> Read:
    """How to get the next message (a line, or several between triple quotes) or command.

    Args:
        words: commands, and for Tab the words that can follow each; None: a file's name.

    Raises (when called):
        Ended: the input has ended.
    """
    read = _line_editor(words) if by_hand() and sys.stdout.isatty() else _plain_line
    return lambda: _message(read)


def _message(read: Callable[[str], str]) -> str | Command:
    opened = False
    try:
        text = read("> ")
        if text.startswith("/"):
            return Command.of(text)
        if not text.lstrip().startswith(_QUOTES):
            return text
        opened = True
        text = text.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + read(". ")
        return text.rstrip().removesuffix(_QUOTES).strip("\n")
    except EOFError:
        if opened and not by_hand():
            raise InvalidRequest(f"the input ended within a message: close it with {_QUOTES}") from None
        raise Ended from None


def _plain_line(prompt: str) -> str:
    """The next line of standard input."""
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start} of a line): convert it first"
        ) from None


def _line_editor(words: Mapping[str, Iterable[str] | None]) -> Callable[[str], str]:
    """Editing, history, Tab, pasting of several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class Commands(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            typed = document.text_before_cursor
            name, space, rest = typed.partition(" ")
            if not typed.startswith("/") or "\n" in typed:
                return
            if space and words.get(name, ()) is None:
                yield from PathCompleter(expanduser=True).get_completions(Document(rest), event)
            else:
                known, start = (words.get(name) or (), rest) if space else (words, name)
                yield from (Completion(word, -len(start)) for word in known if word.startswith(start))

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
    )
    return session.prompt


def _history() -> "History":
    """Of this chat and the ones before; only its owner may read it."""
    import platformdirs
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Forgiving(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the message
                super().store_string(string)

    try:
        path = Path(platformdirs.user_state_dir("specdec", ensure_exists=True)) / "chat-history"
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
        return Forgiving(str(path))
    except OSError as error:
        render.note(f"what you type is not remembered ({error.strerror}: {error.filename})")
        return InMemoryHistory()
