"""One conversation between a person and a session: what is said to it, and what is shown of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.errors import ContextOverflow, SpecLocalError
from spec_local.files import format_size
from specdec_cli import answer_view, render
from specdec_cli.chat_input import by_hand

if TYPE_CHECKING:
    from spec_local.chat.chat_session import ChatEvent, ChatSession
    from spec_local.chat.conversation import Conversation
    from spec_local.chat.template import Message
    from spec_local.engine.events import Statistics
    from spec_local.session import Session

_LARGE = 5e8  # bytes that take a while to write


@dataclass
class Talk:
    """attached: text of files that goes before the next message. last: the figures of the last answer."""

    chat: "ChatSession"
    show_statistics: bool = True
    show_drafts: bool = False
    markdown: bool = False
    attached: str = field(default="", init=False)
    last: "Statistics | None" = field(default=None, init=False)
    _explained: bool = field(default=False, init=False)

    @property
    def session(self) -> "Session":
        return self.chat.session

    @property
    def conversation(self) -> "Conversation":
        return self.chat.conversation

    def hear(self, message: str) -> None:
        """Answer a message."""
        if not message.strip():
            return
        question, attached = self.attached + message, self.attached
        self.attached = ""
        before = self._last_message
        try:
            self.answer(lambda cancelled: self.chat.send(question, cancelled))
        finally:
            if self._last_message is before:  # it is no part of the conversation: nor is what goes before it
                self.attached = attached

    def answer(self, ask: Callable[[Callable[[], bool]], "Iterator[ChatEvent]"]) -> None:
        """Show an answer as it comes, and what there is to say about it.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice, or once where nobody types.
        """
        from spec_local.chat.chat_session import MessagesDropped
        from spec_local.session import Done, Text

        view = answer_view.view(
            self.session.main.model.vocabulary.piece, show_drafts=self.show_drafts, markdown=self.markdown
        )
        if isinstance(view, answer_view.Drafts) and not self._explained:
            render.note(view.legend)
            self._explained = True
        begun, done, n_forgotten = False, None, 0
        try:
            with render.interruptible() as cancelled:
                for event in ask(cancelled):
                    if isinstance(event, Text):
                        view.show(event)
                        begun = True
                    elif isinstance(event, Done):
                        view.end(event.text)
                        done = event
                    elif isinstance(event, MessagesDropped) and not begun:
                        render.note(_forgotten(event.n_messages))
                    elif isinstance(event, MessagesDropped):
                        n_forgotten += event.n_messages  # to be told when the answer is out of the way
        except ContextOverflow as error:
            render.note(f"this message was not sent: {error}")
            if self._last_message and self.chat.when_full == "stop":
                render.note(f"what was said before takes room, too: {self._way_on()}")
            return
        except (SpecLocalError, KeyboardInterrupt):
            if begun:
                view.end("")
                render.say("\n")
            raise
        assert done
        render.say("\n")
        if n_forgotten:
            render.note(_forgotten(n_forgotten))
        self.last = done.statistics
        if self.show_statistics:
            render.note(render.statistics_line(done.statistics))
        if done.reason == "context":
            full = f"the context of {self.session.main.n_ctx} tokens is full"
            render.note(f"{full}: {self._way_on()}; a larger --ctx holds more")
        if cut := render.cut_note(done, self.chat.settings):
            render.note(cut)
        if done.reason == "cancelled":
            render.note("(stopped)" if begun else "(stopped before an answer began: all is as it was before)")
            if not by_hand():
                raise KeyboardInterrupt

    def _way_on(self) -> str:
        forget = (
            ""
            if self.chat.when_full == "drop-oldest"
            else "/set when-full drop-oldest drops the oldest messages; "
        )
        return forget + "/clear starts anew"

    @property
    def _last_message(self) -> "Message | None":
        messages = self.conversation.messages
        return messages[-1] if messages and messages[-1]["role"] != "system" else None

    def guesses(self) -> str:
        """Who guesses, and how far."""
        draft, settings = self.session.draft, self.chat.settings
        guessing = {"draft": f"draft {draft.model.path.name}" if draft else "draft", "suffix": "lookup"}
        names = [guessing.get(name, name) for name in self.session.proposers(settings)]
        return f"{' and '.join(names)}, policy {settings.policy}" if names else "no guesses"

    def greeting(self) -> str:
        main = self.session.main
        device = render.device(main)
        if device == "CPU":
            device += f" ({render.threads(main)})"
        return f"main {main.model.path.name} · {self.guesses()} · {device} · context {main.n_ctx} · /help"

    def save(self, path: Path, *, with_state: bool) -> None:
        """Keep the conversation; `with_state`: also what both models have read of it, beside it."""
        from spec_local.chat.chat_session import state_path

        if with_state and (size := self.session.state_size()) > _LARGE:
            render.note(f"writing {format_size(size)} …")
        size = self.chat.save(path, with_state=with_state)
        said = f"saved: {len(self.conversation.messages)} messages in {path}"
        if with_state:
            said += f", and what was read of them in {state_path(path)} ({format_size(size)})"
        render.note(said)

    def load(self, path: Path) -> None:
        """Go on with a conversation that was kept, and with what was read of it if that was kept too."""
        n_read = self.chat.load(path, render.note)
        said = f"loaded: {len(self.conversation.messages)} messages"
        if n_read:
            said += f", {n_read} tokens of them read already"
        self.attached, self.last = "", None
        render.note(said)
        if self.conversation.messages:
            last = self.conversation.messages[-1]
            render.note(f"{last['role']}: {last['content']}")


def _forgotten(n: int) -> str:
    return f"(the context was full: the oldest {n} messages are forgotten)"
