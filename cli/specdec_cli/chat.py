"""`specdec chat`: a conversation in the terminal."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from spec_local.errors import ContextOverflow, InvalidRequest, SpecLocalError
from specdec_cli import exits, render
from specdec_cli.options import ModelOptions, SamplingOptions, flattened, generation_settings

if TYPE_CHECKING:
    from spec_local.chat import Conversation
    from spec_local.decoding import Statistics
    from spec_local.session import GenerationSettings, Session

_QUOTES = '"""'
_HELP = """\
/help     this list
/stats    figures of the last answer
/clear    forget the conversation (the system message stays)
/exit     leave (as Ctrl-D does)
Ctrl-C stops an answer; what was said of it stays. Alt-Enter starts a new line, and \"\"\" begins and ends
a message of several lines."""


class _Leave(Exception):
    """The person has had enough."""


@flattened
def chat(
    system: Annotated[str | None, Option(help="System message.")] = None,
    no_stats: Annotated[bool, Option("--no-stats", help="No line of figures after each answer.")] = False,
    verbose: Annotated[int, Option("--verbose", "-v", count=True, help="-vv: llama.cpp's own log.")] = 0,
    *,
    models: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model; each turn reads only what is new.

    Examples:

      specdec chat

      specdec chat --main llama-13b.gguf --draft tiny.gguf --system "Answer in French."
    """
    with exits.guarded():
        settings = generation_settings(models, sampling)
        from spec_local.chat import ChatTemplate, Conversation
        from spec_local.llama import runtime

        runtime.set_verbose(verbose > 1)
        render.prepare_stdout()
        with models.open(render.note) as session:
            conversation = Conversation(session.main.model, ChatTemplate(session.main.model))
            if system:
                conversation.messages.append({"role": "system", "content": system})
            talk = _Talk(session, conversation, settings, show_statistics=not no_stats)
            render.note(_greeting(session, settings))
            read = _line_editor() if _by_hand() and sys.stdout.isatty() else _plain_lines
            while True:
                try:
                    talk.hear(_message(read))
                except _Leave:
                    return
                except KeyboardInterrupt:
                    if not _by_hand():
                        raise
                    render.note("to leave: /exit or Ctrl-D")


@dataclass
class _Talk:
    """One conversation between a person and a session."""

    session: "Session"
    conversation: "Conversation"
    settings: "GenerationSettings"
    show_statistics: bool
    last: "Statistics | None" = field(default=None, init=False)

    def hear(self, message: str) -> None:
        """Do what a message asks: a command, or an answer."""
        if not message.strip():
            return
        if not message.startswith("/"):
            self._answer(message)
            return
        match message.split()[0]:
            case "/exit" | "/quit":
                raise _Leave
            case "/help":
                render.note(_HELP)
            case "/stats":
                render.note(self._figures() if self.last else "nothing has been said yet")
            case "/clear":
                self.conversation.clear()
                render.note("the conversation is forgotten")
            case unknown:
                render.note(
                    f"{unknown} is no command: /help lists them (a message cannot begin with a slash)"
                )

    def _answer(self, question: str) -> None:
        from spec_local.session import Done, Text

        said, tokens = "", list[int]()
        try:
            prompt = self.conversation.ask(question)
            try:
                with render.interruptible() as cancelled:
                    for event in self.session.generate(prompt, self.settings, cancelled=cancelled):
                        if isinstance(event, Text):
                            tokens += event.tokens
                        if isinstance(event, (Text, Done)):
                            said += event.text
                            render.say(event.text)
            except KeyboardInterrupt:  # pressed twice: what was said stays all the same
                self.conversation.answer(said, tokens)
                render.say("\n")
                raise
        except ContextOverflow:
            self.conversation.withdraw()
            render.note(
                f"the context of {self.session.main.n_ctx} tokens is full, and this message was not sent: "
                "/clear starts anew; a larger --ctx holds more"
            )
            return
        except SpecLocalError as error:
            self.conversation.withdraw()
            if said:
                render.say("\n")
            render.note(f"specdec: {error}")
            return
        render.say("\n")
        assert isinstance(event, Done)
        self.conversation.answer(said, tokens)
        self.last = event.statistics
        if self.show_statistics:
            render.note(self._figures())
        if event.reason == "context":
            render.note(f"the context of {self.session.main.n_ctx} tokens is full: /clear starts anew")
        if event.reason == "cancelled":
            render.note("(stopped)")
            if not _by_hand():
                raise KeyboardInterrupt

    def _figures(self) -> str:
        assert self.last
        return render.statistics_line(self.last)


def _greeting(session: "Session", settings: "GenerationSettings") -> str:
    main, draft = session.main.model, session.draft
    guessing = {"draft": draft and f"draft {draft.model.path.name}", "lookup": "lookup"}
    names = [guessing[name] or "draft" for name in session.proposers(settings) if name in guessing]
    guesses = f"{' and '.join(names)}, policy {settings.policy}" if names else "no guesses"
    return f"main {main.path.name} · {guesses} · context {session.main.n_ctx} · /help"


def _by_hand() -> bool:
    """Whether a person types the messages: then Ctrl-C stops an answer, and not the program."""
    return sys.stdin is not None and sys.stdin.isatty()


def _message(read: Callable[[str], str]) -> str:
    """One message: a line, or several between triple quotes.

    Raises:
        _Leave: the input has ended.
    """
    try:
        text = read("> ")
        if not text.lstrip().startswith(_QUOTES):
            return text
        text = text.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + read(". ")
        return text.rstrip().removesuffix(_QUOTES).strip("\n")
    except EOFError:
        raise _Leave from None


def _plain_lines(prompt: str) -> str:
    """Off a terminal: the next line of standard input."""
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not UTF-8 (byte {error.start} of a line): convert it first"
        ) from None


def _line_editor() -> Callable[[str], str]:
    """On a terminal: editing, history, pasting of several lines."""
    import platformdirs
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    history: History = InMemoryHistory()
    try:
        path = Path(platformdirs.user_state_dir("specdec", ensure_exists=True)) / "chat-history"
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
        history = FileHistory(str(path))
    except OSError as error:
        render.note(f"what you type is not remembered ({error.strerror}: {error.filename})")
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return session.prompt
