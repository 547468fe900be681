"""A conversation that a session answers: asking, asking again, and what becomes of a full context.

An answer that is stopped half-way stays, as far as it came; if nothing was said, all is as it was before the question.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from spec_local.chat import saved_chat
from spec_local.chat.conversation import Conversation
from spec_local.core.language_model import common_prefix
from spec_local.core.text import bytes_of
from spec_local.engine.events import Prefilled
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings

_APART = 1_000_003  # more than anybody asks again
WhenFull = Literal["stop", "forget"]
WHEN_FULL: tuple[WhenFull, ...] = ("stop", "forget")


def state_of(path: Path) -> Path:
    """Where what was read of a conversation is kept."""
    return path.with_name(path.name + ".state")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The context was full: so many of the oldest messages are no longer part of the conversation."""

    n_messages: int


ChatEvent = Prefilled | Forgotten | Text | Done


@dataclass
class ChatSession:
    """Asks a session the questions of a conversation.

    Args:
        settings: of the next answer; may be replaced between answers. With a seed, each `again` draws with the next one.
        when_full: ``stop``: an answer ends where the context does, and a question that does not fit is refused;
            ``forget``: the oldest questions and answers go, until half of the context is free. The system message
            stays, and only it need not be read again.
    """

    session: Session
    conversation: Conversation
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    when_full: WhenFull = "stop"
    _attempt: int = field(default=0, init=False)
    _forgettings: int = field(default=0, init=False)
    _answering: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.when_full not in WHEN_FULL:
            raise InvalidRequest(f"when-full {self.when_full!r} is unknown: give {' or '.join(WHEN_FULL)}")

    def say(self, question: str, cancelled: Callable[[], bool] = lambda: False) -> Iterator[ChatEvent]:
        """The answer to a question. Closing the iterator early keeps what was said.

        Raises (with the first event):
            ContextOverflow: it does not fit; the question is not part of the conversation then.
            SpecLocalError: see `Session.generate`.
        """

        def ask() -> None:
            self.conversation.ask(question)
            self._attempt = 0

        return self._answer(ask, cancelled)

    def again(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[ChatEvent]:
        """Another answer to the last question; both models keep all that they have read before the old one.

        Raises (with the first event):
            InvalidRequest: there is no answer to replace.
        """

        def retry() -> None:
            self.conversation.retry()
            self._attempt += 1

        return self._answer(retry, cancelled)

    def save(self, path: Path, *, with_state: bool = False) -> int:
        """Keep the conversation; `with_state`: also what both models have read of it, in a file beside it (`state_of`).

        Returns:
            bytes of the second.

        Raises:
            InvalidRequest: a file cannot be written; what was there still is.
            ContextOverflow: there is no memory for a copy of the KV caches.
        """
        saved_chat.save(self.conversation, path)
        return self.session.save_state(state_of(path)) if with_state else 0

    def load(self, path: Path, log: Callable[[str], None] = lambda line: None) -> int:
        """Go on with a conversation that was kept, and with what was read of it, if that was kept too.

        Args:
            log: told, in a line, why a state cannot be used; the text is then read again.

        Returns:
            tokens of the conversation that main need not read again.

        Raises:
            InvalidRequest: the file cannot be read, or holds no conversation; nothing has changed.
        """
        conversation = saved_chat.load(path, self.session.main.model, self.conversation.template)
        if (file := state_of(path)).exists():
            try:
                self.session.load_state(file)
            except SpecLocalError as error:
                log(str(error))
        self.conversation = conversation
        return common_prefix(self.session.main.cached, conversation.tokens)

    def _answer(self, begin: Callable[[], None], cancelled: Callable[[], bool]) -> Iterator[ChatEvent]:
        if self._answering:
            raise InvalidRequest("an answer is still being said: read or close its events first")
        said, tokens, reason = "", list[int](), None
        statistics = None  # of what was said before messages were forgotten
        before = list(self.conversation.messages)
        begin()
        self._answering = True
        try:
            if gone := self._make_room(0):
                yield Forgotten(gone)
            while reason is None:
                prompt = [*self.conversation.prompt(), *tokens]
                for event in self.session.generate(prompt, self._settings(len(tokens)), cancelled=cancelled):
                    if isinstance(event, (Text, Done)):
                        said += event.text
                    if isinstance(event, Text):
                        tokens += event.tokens
                    if isinstance(event, Done):
                        if statistics:
                            event = replace(event, statistics=statistics + event.statistics)
                        if event.reason == "context" and (gone := self._make_room(len(tokens))):
                            yield Text(event.text)
                            yield Forgotten(gone)
                            statistics = event.statistics
                            break
                        reason = event.reason
                    yield event
        finally:
            self._answering = False
            if tokens or reason not in (None, "cancelled"):
                # A character that was cut by the end of a context is whole again.
                text = bytes_of(said).decode("utf-8", "surrogateescape")
                self.conversation.answer(text, tokens)
            else:
                self.conversation.messages[:] = before

    def _settings(self, n_said: int) -> GenerationSettings:
        settings = self.settings
        if settings.seed is not None:
            # After forgetting, the places of the text, which chance goes by, come again.
            settings = replace(settings, seed=settings.seed + self._attempt + _APART * self._forgettings)
        if settings.max_tokens is not None:
            settings = replace(settings, max_tokens=settings.max_tokens - n_said)
        return settings

    def _make_room(self, n_said: int) -> int:
        """Forget the oldest messages if the context is full or nearly so; how many.

        Half of it at once: what comes after the system message must be read again each time.
        """
        settings, n_ctx = self.settings, self.session.main.n_ctx
        if self.when_full == "stop":
            return 0
        if n_said and (settings.constrained or settings.stops):
            return 0  # what has been said of a grammar or a stop string would be forgotten too
        wanted = n_ctx // 4 if settings.max_tokens is None else min(n_ctx // 4, settings.max_tokens)
        length = len(self.conversation.prompt()) + n_said
        if length + wanted <= n_ctx:
            return 0
        n_messages = 0
        while length > n_ctx // 2 and (gone := self.conversation.forget_oldest()):
            n_messages += gone
            length = len(self.conversation.prompt()) + n_said
        self._forgettings += n_messages > 0
        return n_messages
