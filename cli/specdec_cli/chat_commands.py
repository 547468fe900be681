"""The slash commands of a chat: what they are called, what follows them, and what they do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.errors import InvalidRequest
from spec_local.files import expanded, read_text
from specdec_cli import chat_settings, render
from specdec_cli.chat_input import Command, Ended

if TYPE_CHECKING:
    from spec_local.settings import ProposerName
    from specdec_cli.talk import Talk

_LARGEST_FILE = 1 << 24  # bytes; more is more than any tokenizer takes
_STATE = "--state"
_GUESSERS: "dict[str, ProposerName]" = {
    "on": "auto",
    "off": "none",
    "auto": "auto",
    "draft": "draft",
    "suffix": "suffix",
    "lookup": "lookup",
    "recycling": "recycling",
}


@dataclass(frozen=True, slots=True)
class _Slash:
    """takes: how its help calls what follows; words: for Tab, None for files."""

    run: Callable[["Talk", str], None]
    help: str
    takes: str = ""
    words: Iterable[str] | None = ()


def obey(talk: "Talk", command: Command) -> None:
    """Do what a slash command says.

    Raises:
        Ended: it says to leave.
        InvalidRequest: there is no such command, or it makes no sense.
    """
    known = COMMANDS.get(command.name)
    if not known:
        raise InvalidRequest(
            f"{_shortened(command.name)} is no command: /help lists them (a message that begins with a slash: a space before it)"
        )
    if command.rest and not known.takes:
        raise InvalidRequest(f"{command.name} takes nothing after it: leave out {command.rest[:40]!r}")
    known.run(talk, command.rest)


def words() -> Mapping[str, Iterable[str] | None]:
    """For Tab: see `specdec_cli.chat_input.reader`."""
    return {name: command.words for name, command in COMMANDS.items()}


def _help(talk: "Talk", rest: str) -> None:
    width = max(len(f"{name} {command.takes}") for name, command in COMMANDS.items()) + 2
    for name, command in COMMANDS.items():
        render.note(f"{f'{name} {command.takes}':{width}}{command.help}")
    render.note(
        "Ctrl-C stops an answer, and what was said of it stays. Alt-Enter starts a new line; "
        'a message of several lines can also stand between """ and """.'
    )


def _leave(talk: "Talk", rest: str) -> None:
    raise Ended


def _clear(talk: "Talk", rest: str) -> None:
    talk.conversation.clear()
    talk.attached = ""
    render.note("the conversation is forgotten")


def _again(talk: "Talk", rest: str) -> None:
    talk.answer(talk.chat.regenerate)


def _undo(talk: "Talk", rest: str) -> None:
    question = talk.conversation.undo()
    if question is None:
        raise InvalidRequest("there is nothing to take back: nothing has been said yet")
    render.note(f"taken back: {_shortened(question)}")


def _system(talk: "Talk", rest: str) -> None:
    if rest:
        talk.conversation.system = None if rest == "none" else rest
    render.note(f"system message: {talk.conversation.system or 'none'}")


def _draft(talk: "Talk", rest: str) -> None:
    if rest:
        guesser = _GUESSERS.get(rest)
        if not guesser:
            raise InvalidRequest(f"/draft {rest} is not understood: give {', '.join(_GUESSERS)}")
        if guesser == "draft" and not talk.session.draft:
            raise InvalidRequest("there is no draft model: start the chat with --draft FILE")
        policy = talk.chat.settings.policy
        talk.chat.settings = replace(
            talk.chat.settings,
            proposer=guesser,
            policy="adaptive" if policy == "off" and guesser != "none" else policy,
        )
    render.note(talk.guesses())


def _stats(talk: "Talk", rest: str) -> None:
    if not talk.last:
        raise InvalidRequest("nothing has been said yet: ask something")
    render.note(render.statistics_line(talk.last))
    for line in render.profile_lines(talk.last):
        render.note(line)
    n = len(talk.session.main.cached)
    messages = len(talk.conversation.messages)
    render.note(f"{messages} messages, {n} of {talk.session.main.n_ctx} tokens of context")


def _save(talk: "Talk", rest: str) -> None:
    first, _, name = rest.partition(" ")
    if first != _STATE and (first.startswith("--") or rest.endswith(f" {_STATE}")):
        raise InvalidRequest(f"/save {_shortened(rest)} is not understood: give /save [{_STATE}] FILE")
    talk.save(_path(name if first == _STATE else rest), with_state=first == _STATE)


def _load(talk: "Talk", rest: str) -> None:
    talk.load(_path(rest))


def _read(talk: "Talk", rest: str) -> None:
    path = _path(rest)
    if not path.is_file():
        raise InvalidRequest(f"{path} is no file: give the name of a text file")
    text = read_text(path, _LARGEST_FILE)
    talk.attached += text.rstrip("\n") + "\n\n"
    render.note(f"{path} ({len(text.encode())} bytes) goes before your next message; /clear drops it")


def _set(talk: "Talk", rest: str) -> None:
    name, _, text = rest.partition(" ")
    if text.strip():
        chat_settings.change(talk, name, text.strip())
    for line in chat_settings.shown(talk, name):
        render.note(line)


def _path(rest: str) -> Path:
    """The file that a command names, with quotes round it or not."""
    name = rest.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    if not name or "\0" in name:
        raise InvalidRequest("which file? give its name after the command")
    return expanded(name)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


COMMANDS = {
    "/help": _Slash(_help, "this list"),
    "/regen": _Slash(_again, "another answer to the last message"),
    "/undo": _Slash(_undo, "take the last message and its answer back"),
    "/clear": _Slash(_clear, "forget the conversation (the system message stays)"),
    "/system": _Slash(_system, "show or change the system message (none: without one)", "[TEXT]", ["none"]),
    "/set": _Slash(_set, "show or change settings", "[NAME [VALUE]]", chat_settings.SETTINGS),
    "/draft": _Slash(_draft, "show or change who guesses", f"[{'|'.join(_GUESSERS)}]", _GUESSERS),
    "/stats": _Slash(_stats, "figures of the last answer, and where its time went"),
    "/read": _Slash(_read, "put a text file before the next message", "FILE", None),
    "/save": _Slash(
        _save,
        f"keep the conversation; with {_STATE} also what the models have read",
        f"[{_STATE}] FILE",
        None,
    ),
    "/load": _Slash(_load, "go on with a conversation that was kept", "FILE", None),
    "/exit": _Slash(_leave, "leave (as Ctrl-D does)"),
    "/quit": _Slash(_leave, "the same"),
}
