"""The line editor of a chat on a terminal, with history and completion."""

import contextlib
import os
import re
import select
import sys
from collections.abc import Iterable, Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output import create_output

from spec_local.system.files import read_bytes
from spec_local.system.folders import user_folder
from specdec_cli import render, terminal, typed_ahead
from specdec_cli.chat_input import QUOTES, is_open
from specdec_cli.given_images import SUFFIXES

_MENTION = re.compile(r"(?<!\S)@((?:\\.|[^\s\\])*)$")
_IMAGES = PathCompleter(
    expanduser=True, file_filter=lambda name: os.path.isdir(name) or name.lower().endswith(SUFFIXES)
)
_MAX_HISTORY = 1 << 24  # bytes; a message has a hundred


class Editor:
    """Reads messages. Each begins with what was typed meanwhile.

    A paste is a part of one message, also in a terminal that does not mark where it begins and ends: keys
    then follow Enter at once.
    """

    def __init__(self, completions: Mapping[str, Iterable[str] | None]) -> None:
        self._pasted = False
        self._session: PromptSession[str] = PromptSession(
            history=input_history(),
            key_bindings=self._keys(),
            completer=_Commands(completions),
            complete_while_typing=False,
            enable_suspend=True,
            input_processors=[_NoOverrides()],
            prompt_continuation=". ",
            output=create_output(terminal.raw(sys.stdout)),  # it makes control characters visible itself
        )

    def read(self) -> tuple[str, bool]:
        """Return a message, and whether it was pasted.

        Raises:
            EOFError, KeyboardInterrupt: Ctrl-D, Ctrl-C was pressed.
        """
        text, self._pasted = typed_ahead.take()
        return self._session.prompt("> ", default=text).removeprefix("\ufeff"), self._pasted

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)  # not searching the history
        unfinished = Condition(lambda: self._is_open(self._session.default_buffer.text))
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        keys.add("enter", filter=typing)(self._enter)
        keys.add(Keys.BracketedPaste)(self._paste)
        keys.add("c-c", filter=typing)(_discard)
        keys.add("c-d", filter=typing & unfinished)(_explain_quotes)
        return keys

    def _is_open(self, text: str) -> bool:
        return not self._pasted and is_open(text)

    def _enter(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        follows = any(key.key != Keys.CPRResponse for key in event.key_processor.input_queue)
        follows = follows or bool(select.select([sys.stdin], [], [], 0)[0])  # keys are read 1,024 at a time
        if follows or self._is_open(buffer.text):
            self._pasted |= follows
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    def _paste(self, event: KeyPressEvent) -> None:
        self._pasted |= not event.current_buffer.text
        event.current_buffer.insert_text(event.data.replace("\r\n", "\n").replace("\r", "\n"))


def _discard(event: KeyPressEvent) -> None:
    buffer = event.current_buffer
    if buffer.text:
        buffer.append_to_history()
    kept = "the up arrow brings the message back; " if buffer.text else ""
    event.app.exit(exception=KeyboardInterrupt(kept), style="class:aborting")


def _explain_quotes(event: KeyPressEvent) -> None:
    hint = f"the message ends with {QUOTES}; Ctrl-C discards it"
    run_in_terminal(lambda: render.note(hint))


class _Commands(Completer):
    """Completes commands, their arguments, and ``@FILE``; completions: see `chat_input.message_reader`."""

    def __init__(self, completions: Mapping[str, Iterable[str] | None]) -> None:
        self._completions = completions

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        typed, completions = document.text_before_cursor, self._completions
        name, space, rest = typed.partition(" ")
        if word := _MENTION.search(typed):
            begun = re.sub(r"\\(.)", r"\1", word[1])
            for each in _IMAGES.get_completions(Document(begun), event):
                text = re.sub(r"([\s\\'\"])", r"\\\1", each.text)
                yield Completion(text, each.start_position, terminal.visible(each.display_text))
            return
        if not typed.startswith("/") or "\n" in typed:
            return
        if space and completions.get(name, ()) is None:
            for each in PathCompleter(expanduser=True).get_completions(Document(rest), event):
                yield Completion(each.text, each.start_position, terminal.visible(each.display_text))
        else:
            known, start = (completions.get(name) or (), rest) if space else (completions, name)
            yield from (Completion(word, -len(start)) for word in known if word.startswith(start))


class _NoOverrides(Processor):
    """Replaces the characters that the editor shows as they are but that reverse what follows."""

    def apply_transformation(self, given: TransformationInput) -> Transformation:
        return Transformation(
            [(f[0], re.sub("[\u202d\u202e]", "\ufffd", f[1]), *f[2:]) for f in given.fragments]
        )


def input_history() -> History:
    """The history of this and earlier chats, in a file that only the user can read."""
    try:
        path = user_folder("state") / "chat-history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
        read_bytes(path, _MAX_HISTORY)  # prompt_toolkit would wait for a pipe, and read any size
        return _TolerantHistory(str(path))
    except OSError as error:
        render.note(f"the input history is not saved ({error.strerror}: {error.filename})")
        return InMemoryHistory()


class _TolerantHistory(FileHistory):
    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):  # the message must not be lost if the disk is full
            super().store_string(string)
