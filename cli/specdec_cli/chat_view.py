"""The screen of a chat: sends messages to a ChatSession and shows the answers."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from spec_local.answers.running import OnRead
from spec_local.answers.text import Done, Text
from spec_local.chat.conversation import Conversation
from spec_local.chat.messages import Message
from spec_local.chat_session import ChatEvent, ChatSession, MessagesDropped
from spec_local.engine.events import Statistics
from spec_local.errors import ContextOverflow, InvalidRequest, SpecLocalError
from spec_local.images.media import Media
from spec_local.session import Session
from spec_local.text import counted
from specdec_cli import (
    answer_view,
    facts,
    last_resort,
    render,
    terminal,
    thinking_view,
    typed_ahead,
)
from specdec_cli.chat_input import TypedMessage, interactive
from specdec_cli.chat_models import ChatModels
from specdec_cli.given_images import Placed, described, read_message, readable

_ROOM = 1024  # tokens for an answer, in a context that is opened for a long message; and the step of its size


@dataclass
class ChatView:
    """attached: text of files that precedes the next message. images: those that it has, placed in that text.

    last: statistics of the last answer.
    kept: file to which the conversation is saved after each answer; None: none. models: of the session.
    """

    chat: ChatSession
    models: ChatModels
    _: KW_ONLY
    show_statistics: bool = True
    show_drafts: bool = False
    markdown: bool = False
    wrap: bool = True
    hide_thinking: bool = False
    attached: str = field(default="", init=False)
    images: Placed = field(default_factory=list, init=False)
    last: Statistics | None = field(default=None, init=False)
    kept: Path | None = field(default=None, init=False)
    _legend_shown: bool = field(default=False, init=False)
    _unkept: bool = field(default=False, init=False)

    @property
    def session(self) -> Session:
        return self.chat.session

    @property
    def n_ctx(self) -> int:
        """The context size in tokens. On assignment, the models are opened again.

        Raises:
            SpecLocalError: on assignment; the size is not possible, and the old one is in use.
        """
        return self.session.main.n_ctx

    @n_ctx.setter
    def n_ctx(self, n_tokens: int) -> None:
        self.models.reopen(self.chat, ctx=n_tokens)

    @property
    def conversation(self) -> Conversation:
        return self.chat.conversation

    def attach(self, image: Media) -> None:
        """Attach an image to the next message.

        Raises:
            ModelError: the model has no projector.
        """
        self.session.main.model.check_reads([image])
        self.images.append((len(self.attached), image))
        render.note(f"{described(image)}, will be sent with your next message; /image clear discards it")

    def discard(self) -> None:
        """Discard what is attached to the next message."""
        self.attached, self.images = "", []

    def enter(self, typed: TypedMessage) -> None:
        """Send a message that may name images; one with nothing but images attaches them to the next one.

        Raises:
            InvalidRequest: a named file is no valid image.
            ModelError: there are images, and the model has no projector.
        """
        text, images = (typed.text, Placed()) if typed.is_verbatim else read_message(typed.text)
        if images and not text.strip():
            for _, image in images:
                self.attach(image)
            return
        if images:
            self.session.main.model.check_reads([image for _, image in images])
            render.notes([described(image) for _, image in images])
        self.send(text, images)

    def send(self, message: str, images: Sequence[tuple[int, Media]] = ()) -> None:
        """Send a message and show the answer.

        A message that does not fit can be sent with a larger context; otherwise, files that do not fit are
        not sent with the next message again.

        Args:
            images: with their places in the message.
        """
        if not message.strip():
            return
        attached, before_it = self.attached, self.images
        content = attached + message
        placed = [*before_it, *((len(attached) + at, image) for at, image in images)]
        self.discard()
        before = self._last_message
        try:
            fits = self.show_answer(lambda cancelled: self.chat.send(content, cancelled, images=placed))
        finally:
            if self._last_message is before:  # not sent: the files precede the next message
                self.attached, self.images = attached, before_it
        if not fits and self._enlarged({"role": "user", "content": content, "images": placed}):
            self.send(message, images)
        elif not fits and (before_it or len(attached) > len(message)):
            self.discard()
            what = "what was attached" if before_it else "the text of /read"
            shorter = "attach less" if before_it else "read a shorter file"
            render.note(f"{what} was discarded: {shorter}, or open a larger context: /set ctx N")

    def _enlarged(self, asked: Message) -> bool:
        """Offer to open the models again with a context in which a message fits; return whether it does."""
        if not interactive():
            return False
        n_tokens = len(self.conversation.following([*self.conversation.messages, asked]).prompt())
        n_ctx = self.session.main.model.n_ctx((n_tokens // _ROOM + 2) * _ROOM)
        if not self.n_ctx < n_tokens < n_ctx:
            return False
        offer = f"Open the models again with a context of {n_ctx} tokens, and send it?"
        try:
            if not render.confirmed(offer, InvalidRequest("standard error is no terminal: nobody was asked")):
                return False
            self.n_ctx = n_ctx
        except KeyboardInterrupt:
            return False
        except SpecLocalError as error:
            render.note(f"specdec: {error}")
            return False
        return True

    def show_answer(
        self,
        generate: Callable[[Callable[[], bool]], Iterator[ChatEvent]],
        refusal: str = "this message was not sent",
        begun: str = "",
        reasoning: str = "",
    ) -> bool:
        """Show an answer while it is generated, then its statistics and warnings.

        Args:
            refusal: said where the context is too small.
            begun, reasoning: the answer so far, and what was written before it, if it is continued.

        Returns:
            whether the message fits into the context; if not, it was not sent.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice, or once if standard input is not a terminal.
        """

        def start(on_read: OnRead) -> Iterator[ChatEvent]:
            self.chat.on_read = on_read
            return generate(cancelled)

        answer = self._begun(begun, reasoning)
        try:
            with (
                typed_ahead.collecting(),
                last_resort.before_end(self._cut),
                render.interruptible() as cancelled,
            ):
                for event in answer_view.reading(start):
                    answer.add(event)
        except ContextOverflow as error:
            render.note(f"{refusal}: {error}")
            if self._last_message and self.chat.when_full == "stop":
                render.note(f"earlier messages also take up context: {self._ways_to_make_room()}")
            return False
        except (SpecLocalError, KeyboardInterrupt):
            if answer.started:
                answer.view.end("")
                render.answer("\n")
            raise
        assert answer.done
        render.answer("\n")
        render.notes(answer.view.notes())
        if answer.n_dropped:
            render.note(_dropped(answer.n_dropped))
        self._keep()
        self._explain(answer.done, answer.started)
        return True

    def _begun(self, begun: str, reasoning: str) -> "_Answer":
        """Prepare the screen for an answer, which may be continued: see `show_answer`."""
        begun, reasoning = terminal.Prose()(begun), terminal.Prose()(reasoning)
        end = answer_view.end_of(begun or reasoning, markdown=self.markdown) if sys.stdout.isatty() else ""
        view = answer_view.view(
            self.session.main.model.vocabulary.piece,
            show_drafts=self.show_drafts,
            markdown=self.markdown,
            wrap=self.wrap,
            begun=begun.removesuffix(end),
        )
        if isinstance(view, answer_view.DraftsView) and not self._legend_shown:
            render.note(view.legend)
            self._legend_shown = True
        splitter = self.chat.splitter
        return _Answer(thinking_view.before(view, splitter, hidden=self.hide_thinking, wrap=self.wrap), end)

    def _explain(self, done: Done, started: bool) -> None:
        """Show the statistics of an answer, and notes on how it ended.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and standard input is not a terminal.
        """
        self.last = done.statistics
        if self.show_statistics:
            render.note(facts.plain_statistics(done.statistics, self.gain(done.statistics)))
        if done.reason == "context":
            full = f"the context of {self.session.main.n_ctx} tokens is full"
            render.note(f"{full}: {self._ways_to_make_room()}; /set ctx N opens a larger one")
        if closed := facts.reasoning_note(done):
            render.note(closed)
        if cut := facts.cut_note(done, self.chat.settings):
            render.note(cut)
        elif done.reason == "length" and interactive():
            render.note(f"cut at {counted(self.chat.settings.max_tokens or 0, 'token')}: /continue")
        if done.reason == "cancelled":
            unchanged = "(stopped before the answer started; the conversation is unchanged)"
            render.note("(stopped)" if started else unchanged)
            if not interactive():
                raise KeyboardInterrupt

    def gain(self, statistics: Statistics) -> str:
        """What drafts gained in an answer, in words."""
        return facts.gain(self.session, self.chat.settings, statistics)

    def _ways_to_make_room(self) -> str:
        clear = "/clear starts a new conversation"
        if self.chat.when_full == "drop-oldest":
            return clear
        return f"/set when-full drop-oldest drops the oldest messages; {clear}"

    @property
    def _last_message(self) -> Message | None:
        messages = self.conversation.messages
        return messages[-1] if messages and messages[-1]["role"] != "system" else None

    def speculation(self) -> str:
        """The proposers and the policy in use."""
        draft, settings = self.session.draft, self.chat.settings
        shown = {"draft": f"draft {draft.model.path.name}" if draft else "draft"}
        shown |= {"suffix": "suffix lookup", "lookup": "prompt lookup"}
        names = [shown.get(name, name) for name in self.session.proposers(settings)]
        return f"{' and '.join(names)}, policy {settings.policy}" if names else "no speculation"

    def banner(self) -> str:
        """The first line of a chat: models, device, and context size."""
        main = self.session.main
        device = self.session.device
        if device == "CPU":
            device += f" ({facts.threads(main)})"
        return f"main {main.model.path.name} · {self.speculation()} · {device} · context {main.n_ctx} · /help"

    def save(self, path: Path) -> None:
        """Save the conversation."""
        self.chat.save(path)
        render.note(f"saved {counted(len(self.conversation.messages), 'message')} to {path}")

    def _keep(self) -> None:
        if not self.kept:
            return
        try:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            self.chat.save(self.kept, with_paths=True)
            self._unkept = False
        except (SpecLocalError, OSError) as error:  # the disk may be full: the next answer tries again
            if not self._unkept:
                render.note(f"until it can be saved, --continue will not find this conversation: {error}")
            self._unkept = True

    def _cut(self) -> None:
        """Keep an answer as far as it has come, when the process is ended."""
        self.chat.cut()
        self._keep()

    def load(self, path: Path) -> None:
        """Continue a saved conversation."""
        n_cached = self.chat.load(path, render.note)
        line = f"loaded {counted(len(self.conversation.messages), 'message')}"
        if n_cached:
            line += f"; {n_cached} of their tokens are in the KV cache"
        self.discard()
        self.last = None
        render.note(line)
        if self.conversation.messages:
            last = self.conversation.messages[-1]
            render.note(f"{last['role']}: ", readable(last["content"], last.get("images", ())))


@dataclass
class _Answer:
    """An answer on the screen.

    end: shown before it, of an answer that is continued. n_dropped: messages that were dropped meanwhile.
    """

    view: answer_view.AnswerView
    end: str
    started: bool = False
    done: Done | None = None
    n_dropped: int = 0

    def add(self, event: ChatEvent) -> None:
        if isinstance(event, Text):
            if self.end and not self.started:
                self.view.show(Text(self.end))
            self.view.show(event)
            self.started = True
        elif isinstance(event, Done):
            self.view.end("")
            self.done = event
        elif isinstance(event, MessagesDropped) and not self.started:
            render.note(_dropped(event.n_messages))
        elif isinstance(event, MessagesDropped):
            self.n_dropped += event.n_messages  # shown after the answer


def _dropped(n: int) -> str:
    dropped = "oldest message was" if n == 1 else f"oldest {n} messages were"
    return f"(the context was full: the {dropped} dropped)"
