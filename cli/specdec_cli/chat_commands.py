"""The slash commands of a chat: their names, arguments, help and actions."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.chat import saved_chat
from spec_local.errors import InvalidRequest
from spec_local.images.media_file import MediaFile
from spec_local.installed import known_names
from spec_local.proposers import PROPOSER_NAMES
from spec_local.system.files import expanded, read_text
from spec_local.text import counted
from specdec_cli import chat_settings, clipboard, code_fences, facts, render, terminal
from specdec_cli.chat_input import EndOfChat, TypedCommand, TypedMessage
from specdec_cli.given_images import described, named_first, readable
from specdec_cli.names import nearest

if TYPE_CHECKING:
    from specdec_cli.chat_view import ChatView

_MAX_FILE_BYTES = 1 << 24  # more text than fits into any context
_SWITCHES = {"on": "auto", "off": "none"}
_PROPOSERS = (*_SWITCHES, *PROPOSER_NAMES)


@dataclass(frozen=True, slots=True)
class _SlashCommand:
    """arguments: as shown in /help, "": none. words: completions of the arguments; None: file names."""

    run: Callable[["ChatView", str], None]
    help: str
    arguments: str = ""
    words: Iterable[str] | None = ()


def run_command(view: "ChatView", command: TypedCommand) -> None:
    """Run a slash command.

    Raises:
        EndOfChat: the command leaves the chat.
        InvalidRequest: the command or its arguments are invalid.
    """
    known = COMMANDS.get(command.name)
    if not known:
        what = f"{_shortened(command.name)} is not a command{nearest(command.name, COMMANDS)}"
        raise InvalidRequest(
            f"{what}: see /help; to send a message that starts with a slash, put a space before it"
        )
    if command.rest and not known.arguments:
        raise InvalidRequest(f"{command.name} takes no arguments: remove {command.rest[:40]!r}")
    known.run(view, command.rest)


def completions() -> Mapping[str, Iterable[str] | None]:
    """See `specdec_cli.chat_input.message_reader`."""
    return {name: command.words for name, command in COMMANDS.items()}


def _help(view: "ChatView", rest: str) -> None:
    usages = {f"{name} {command.arguments}": command.help for name, command in COMMANDS.items()}
    width = max(map(len, usages)) + 2
    is_narrow = width + max(map(len, usages.values())) > terminal.width()
    for usage, help_ in usages.items():
        if is_narrow:
            render.note(usage)
        render.note(f"    {help_}" if is_narrow else f"{usage:{width}}{help_}")
    render.note(
        "@FILE in a message stands for that image or sound file, and so does its full path, which terminals "
        "write for a file that is dropped into them. A message of nothing else attaches it to the next one."
    )
    render.note(
        "Ctrl-C stops the answer and keeps the text generated so far. What you type meanwhile waits as "
        "your next message. Alt-Enter starts a new line; a multi-line message can also start and end with "
        '""".'
    )


def _exit(view: "ChatView", rest: str) -> None:
    raise EndOfChat


def _clear(view: "ChatView", rest: str) -> None:
    view.conversation.clear()
    view.discard()
    render.note("conversation cleared")


def _regenerate(view: "ChatView", rest: str) -> None:
    view.show_answer(view.chat.regenerate)


def _continue(view: "ChatView", rest: str) -> None:
    begun = reasoning = ""
    for message in view.conversation.messages[-1:]:
        begun, reasoning = message["content"], message.get("reasoning_content", "")
    view.show_answer(view.chat.continue_answer, "the answer cannot go on", begun, reasoning)


def _undo(view: "ChatView", rest: str) -> None:
    asked = [m for m in view.conversation.messages if m["role"] == "user"]
    if view.conversation.undo() is None:
        raise InvalidRequest("there is nothing to undo: send a message first")
    render.note(f"removed: {_shortened(readable(asked[-1]['content'], asked[-1].get('images', ())))}")


def _system(view: "ChatView", rest: str) -> None:
    if rest:
        view.conversation.system = None if rest == "none" else rest
    render.note("system message: ", view.conversation.system or "none")


def _draft(view: "ChatView", rest: str) -> None:
    if rest:
        proposer = _SWITCHES.get(rest, rest)
        if rest not in _PROPOSERS and rest not in (known := known_names()):
            raise InvalidRequest(f"/draft {rest} is unknown: give {', '.join([*_SWITCHES, *known])}")
        if proposer == "draft" and not view.session.draft:
            raise InvalidRequest("there is no draft model: start the chat with --draft FILE")
        policy = view.chat.settings.policy
        view.chat.settings = replace(
            view.chat.settings,
            proposer=proposer,
            policy="adaptive" if policy == "off" and proposer != "none" else policy,
        )
    render.note(view.speculation())


def _model(view: "ChatView", rest: str) -> None:
    try:
        main, draft, *more = [*shlex.split(rest), "", ""]
    except ValueError:
        raise InvalidRequest(f"/model {_shortened(rest)} has an open quotation mark: close it") from None
    if any(more):
        raise InvalidRequest(f"/model {_shortened(rest)} names more than two models: quote file names")
    if main:
        view.models.use(view.chat, main, draft or None)
        view.last = None
    render.note(view.banner())
    if main and (hint := view.models.switched_off(view.chat)):
        render.note(hint)


def _copy(view: "ChatView", rest: str) -> None:
    answers = [m["content"] for m in view.conversation.messages if m["role"] == "assistant"]
    if not answers:
        raise InvalidRequest("there is no answer yet: send a message first")
    text, what = answers[-1], "the last answer"
    if rest:
        blocks = code_fences.code_blocks(text)
        if not (rest.isdecimal() and 1 <= int(rest) <= len(blocks)):
            raise InvalidRequest(
                f"/copy {rest[:20]}: the last answer has {counted(len(blocks), 'block')} of code"
            )
        text, what = blocks[int(rest) - 1], f"block {rest} of its code"
    clipboard.copy(text)
    render.note(f"copied {what} ({counted(len(text), 'character')})")


def _stats(view: "ChatView", rest: str) -> None:
    if not view.last:
        raise InvalidRequest("there is no answer yet: send a message first")
    render.note(facts.statistics_line(view.last, view.gain(view.last)))
    render.notes(facts.profile_lines(view.last))
    n = len(view.session.main.cached)
    messages = len(view.conversation.messages)
    render.note(f"{counted(messages, 'message')}, {n} of {view.session.main.n_ctx} tokens of context used")


def _save(view: "ChatView", rest: str) -> None:
    if option := re.search(r"(?:^|\s)--(\w\S*)", "" if rest[:1] in ("'", '"') else rest):
        raise InvalidRequest(f"/save has no option --{option[1]}: give /save FILE")
    path = _path(rest)
    if path.is_dir() or rest.rstrip("\"' ").endswith(os.sep):
        raise InvalidRequest(f"{path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent}: make it first, or give another path")
    if path.exists() and path.stat().st_size and not saved_chat.is_saved(path):
        raise InvalidRequest(f"{path} exists and is not a saved conversation: give another path")
    view.save(path)


def _load(view: "ChatView", rest: str) -> None:
    view.load(_path(rest))


def _read(view: "ChatView", rest: str) -> None:
    path = _path(rest)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise InvalidRequest(f"{path} {what}: give the path of a text file")
    text = read_text(path, _MAX_FILE_BYTES)
    view.attached += text.rstrip("\n") + "\n\n"
    render.note(
        f"{path} ({counted(len(text.encode()), 'byte')}) will be sent before your next message; "
        "/clear discards it"
    )


def _image(view: "ChatView", rest: str) -> None:
    if rest == "clear":
        view.images = []
    if rest in ("", "clear"):
        attached = [described(image) for _, image in view.images]
        render.notes(attached or ["no file is attached: /image FILE attaches one to your next message"])
        return
    name, text = named_first(rest)
    view.attach(MediaFile.open(name))
    view.enter(TypedMessage(text))


def _set(view: "ChatView", rest: str) -> None:
    name, _, text = rest.partition(" ")
    if text.strip():
        chat_settings.change(view, name, text.strip())
    render.notes(chat_settings.lines(view, name))


def _path(rest: str) -> Path:
    """The path in a command's arguments, which may be quoted, or escaped as that of a dropped file."""
    name = rest.strip()
    if "\\" in name and not os.path.exists(name):
        name = re.sub(r"\\(.)", r"\1", name)
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    if not name or "\0" in name:
        raise InvalidRequest("the file name is missing: give it after the command")
    return expanded(name)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


COMMANDS = {
    "/help": _SlashCommand(_help, "list the commands"),
    "/regen": _SlashCommand(_regenerate, "replace the last answer with another one"),
    "/continue": _SlashCommand(_continue, "go on with the last answer where it was cut"),
    "/undo": _SlashCommand(_undo, "remove the last message and its answer"),
    "/clear": _SlashCommand(_clear, "remove all messages except the system message"),
    "/system": _SlashCommand(_system, "show or change the system message", "[TEXT|none]", ["none"]),
    "/set": _SlashCommand(_set, "show or change settings", "[NAME [VALUE]]", chat_settings.SETTINGS),
    "/draft": _SlashCommand(_draft, "show or change the proposer: on, off, auto …", "[NAME]", _PROPOSERS),
    "/model": _SlashCommand(_model, "show or change the models", "[MAIN [DRAFT]]", None),
    "/copy": _SlashCommand(_copy, "copy the last answer, or its N-th block of code", "[N]"),
    "/stats": _SlashCommand(_stats, "show statistics of the last answer, and its time"),
    "/read": _SlashCommand(_read, "send a text file before the next message", "FILE", None),
    "/image": _SlashCommand(
        _image, "attach an image or sound, and send TEXT with it", "[FILE [TEXT]|clear]", None
    ),
    "/save": _SlashCommand(_save, "save the conversation", "FILE", None),
    "/load": _SlashCommand(_load, "continue a saved conversation", "FILE", None),
    "/exit": _SlashCommand(_exit, "leave the chat, like Ctrl-D"),
    "/quit": _SlashCommand(_exit, "the same as /exit"),
}
