"""A conversation and the session that answers it: answers, regeneration, and a full context.

If an answer is interrupted, the part generated so far is kept. If nothing was generated, the conversation
is unchanged.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import InstanceOf

from spec_local.answers.running import OnRead
from spec_local.arguments import checked, ignore
from spec_local.chat import saved_chat
from spec_local.chat.conversation import Conversation
from spec_local.chat.messages import Message
from spec_local.chat.template import ChatTemplate
from spec_local.core.sequence import common_prefix
from spec_local.engine.events import Prefilled
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.images.media import Media
from spec_local.reasoning.markers import Splitter
from spec_local.session import ChatPrompt, Done, Session, Text
from spec_local.settings import GenerationSettings
from spec_local.text import bytes_of, overlap

_SEED_STRIDE = 1_000_003  # larger than any number of regenerations in practice
WhenFull = Literal["stop", "drop-oldest"]
WHEN_FULL: tuple[WhenFull, ...] = ("stop", "drop-oldest")


@dataclass(frozen=True, slots=True)
class MessagesDropped:
    """The context was full, and the oldest `n_messages` messages were removed from the conversation."""

    n_messages: int


@dataclass(frozen=True, slots=True)
class _Generated:
    """An answer as generated, with its reasoning; is_whole: the model or a stop string ended it."""

    message: Message
    text: str
    tokens: list[int]
    is_whole: bool


ChatEvent = Prefilled | MessagesDropped | Text | Done


class ChatSession:
    """Generates the answers of a conversation, one at a time.

    Args:
        conversation: the conversation to continue; None: a new one.
        settings: settings of the next answer, which may be replaced between answers. Each `regenerate` adds 1
            to the seed. None: those of ``specdec generate``.
        when_full: ``stop``: an answer ends when the context is full, and a message that does not fit is
            rejected. ``drop-oldest``: the oldest questions and answers are dropped until half of the
            context is free. The system message is kept; everything after it must be read again.
        on_read: see `Session.generate`.
    """

    @checked
    def __init__(
        self,
        session: Session,
        conversation: Conversation | None = None,
        settings: GenerationSettings | None = None,
        when_full: WhenFull = "stop",
        on_read: OnRead | None = None,
    ) -> None:
        model = session.main.model
        self.session, self.when_full, self.on_read = session, when_full, on_read
        self.conversation = conversation or Conversation(model, ChatTemplate(model))
        self.settings = settings or GenerationSettings()
        self._attempt = self._n_drops = 0
        self._last: _Generated | None = None
        self._begun = ""  # text of the answer before its first event
        self._keep: Callable[[], None] = lambda: None
        self._generating = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measuring_costs(self) -> Iterator[None]:
        """Measure costs that are only estimated, if no text has been read yet, until the end of the block.

        Use it while the user types the first message. The block must not use the session.
        """
        settings, stopped = self.settings, threading.Event()
        wanted = settings.policy == "adaptive" and self.session.proposers(settings)

        def measure() -> None:
            with contextlib.suppress(SpecLocalError):  # an answer that fails, too, reports it
                self.session.costs(stopped=stopped.is_set)

        thread = threading.Thread(target=measure)
        if wanted and not self.session.main.cached:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            if thread.ident:
                thread.join()

    @checked
    def send(
        self,
        message: str,
        cancelled: Callable[[], bool] | None = None,
        *,
        images: Sequence[tuple[int, InstanceOf[Media]]] = (),
    ) -> Iterator[ChatEvent]:
        """Send a message and yield the answer. Closing the iterator early keeps the text generated so far.

        Args:
            images: each with its place: the index in the message of the character that it stands before.

        Raises (with the first event):
            ContextOverflow: the message does not fit; it is not added to the conversation.
            ModelError: there are images, and the model has no projector, or one that cannot be used.
            SpecLocalError: see `Session.generate`.
        """

        def ask() -> tuple[str, list[int]]:
            self.conversation.ask(message, images)
            self._attempt = 0
            return "", []

        return self._answer(ask, cancelled)

    @checked
    def regenerate(self, cancelled: Callable[[], bool] | None = None) -> Iterator[ChatEvent]:
        """Replace the last answer with another one; both models keep the KV cache of everything before it.

        Raises (with the first event):
            InvalidRequest: there is no answer to replace.
        """

        def retry() -> tuple[str, list[int]]:
            self.conversation.undo_answer()
            self._attempt += 1
            return "", []

        return self._answer(retry, cancelled)

    @checked
    def continue_answer(self, cancelled: Callable[[], bool] | None = None) -> Iterator[ChatEvent]:
        """Continue the last answer where it was cut, and yield the rest.

        The models continue its tokens as they were generated, so that the rest is distributed as that of an
        answer that was not cut; with a seed and verifier ``exact-match``, it is the same. A reasoning budget
        goes on counting. If the answer was loaded and has reasoning, its text is tokenized, and a budget
        counts only the rest. `max_tokens` limits the rest.

        Raises (with the first event):
            InvalidRequest: there is no answer, it is complete, or it cannot be continued: a grammar would
                start again, and a stop string could have begun before the cut.
            ContextOverflow: the context is full.
        """

        def resume() -> tuple[str, list[int]]:
            messages, last = self.conversation.messages, self._last
            if not messages or messages[-1]["role"] != "assistant":
                raise InvalidRequest("there is no answer to continue: ask something first")
            if self.settings.constrained:
                raise InvalidRequest("an answer under a grammar cannot be continued: generate it again")
            is_last = last is not None and last.message is messages[-1]
            text = last.text if last and is_last else messages[-1]["content"]
            if last and is_last and last.is_whole:
                raise InvalidRequest("the last answer is complete: send another message")
            if begun := [stop for stop in self.settings.stops if overlap(text, stop)]:
                raise InvalidRequest(
                    f"the answer was cut where the stop string {begun[0]!r} may begin: generate it again"
                )
            if last and is_last:
                self.conversation.undo_answer()
                return last.text, [*last.tokens]
            self.conversation.prompt()
            return "", []

        return self._answer(resume, cancelled)

    @checked
    def use(self, session: Session) -> None:
        """Go on with another session, whose models read the conversation again.

        With the same main model, the answers keep their tokens.

        Raises:
            ModelError: the model has no chat template, it rejects the messages, or it has no projector for
                their images; nothing has changed.
            InvalidRequest: an answer is being generated.
        """
        self._check_idle()
        model, before = session.main.model, self.conversation
        conversation = Conversation(model, ChatTemplate(model), before.messages)
        if conversation.messages:
            conversation.template.render(conversation.messages)
        _check_images(conversation)
        if model.path == before.model.path:
            conversation.restore(before.answer_tokens)
        self.session, self.conversation = session, conversation

    def cut(self) -> None:
        """End the answer that is being generated with the text so far, so that it can be saved.

        Another thread calls it when the one that generates is in a call that does not return. The process
        must end afterwards.
        """
        if self._generating:
            self._keep()

    def splitter(self) -> Splitter:
        """Return a new splitter for the answer that is being generated; it separates the reasoning.

        If the answer is continued, feed the splitter only the rest.
        """
        splitter = self.conversation.splitter()
        if self._begun:
            splitter.skip(self._begun)
        return splitter

    @checked
    def save(self, path: Path | str, *, with_paths: bool = False) -> None:
        """Save the conversation.

        Args:
            with_paths: also save where the models' files are, for `spec_local.chat.saved_chat.paths_of`.

        Raises:
            InvalidRequest: the file cannot be written; an existing file is unchanged.
        """
        rows = (self.session.main, self.session.draft) if with_paths else ()
        paths = dict.fromkeys(row.model.path for row in rows if row)  # a head may be in the main model's file
        saved_chat.save(self.conversation, Path(path), list(paths))

    @checked
    def load(self, path: Path | str, log: Callable[[str], None] | None = None) -> int:
        """Continue a saved conversation.

        Args:
            log: receives one line if the conversation was with another model.

        Returns:
            the number of tokens of the conversation that are in the main model's KV cache.

        Raises:
            InvalidRequest: the file cannot be read, is not a conversation, or an answer is being generated;
                nothing has changed.
            ModelError: the model rejects the messages: see `use`.
        """
        self._check_idle()
        model, template = self.session.main.model, self.conversation.template
        loaded = saved_chat.load(Path(path), model, template, log or ignore)
        _check_images(loaded)
        self.conversation = loaded
        return common_prefix(self.session.main.cached, self.conversation.tokens)

    def _answer(
        self, begin: Callable[[], tuple[str, list[int]]], cancelled: Callable[[], bool] | None
    ) -> Iterator[ChatEvent]:
        mine = False
        try:
            with self._lock:
                self._check_idle()
                self._generating = mine = True
            yield from self._events(begin, cancelled)
        finally:
            if mine:
                self._generating = False

    def _check_idle(self) -> None:
        if self._generating:
            raise InvalidRequest("an answer is still being generated: read or close its events first")

    def _events(
        self, begin: Callable[[], tuple[str, list[int]]], cancelled: Callable[[], bool] | None
    ) -> Iterator[ChatEvent]:
        """Yield the events of an answer; begin: returns the text and the tokens that it already has."""
        statistics = None  # of the part generated before messages were dropped
        before, reason = list(self.conversation.messages), None
        self.conversation.n_ctx = self.session.main.n_ctx if self.when_full == "stop" else None
        content, tokens = begin()
        is_new = self.conversation.messages[-1]["role"] != "assistant"
        n_begun, self._begun = len(tokens), content
        splitter = self.conversation.splitter()

        def keep() -> None:
            if tokens or reason not in (None, "cancelled"):
                # Join the two halves of a character that was split where the context was full.
                text = bytes_of(content).decode("utf-8", "surrogateescape")
                parts = splitter.finish(text)
                self.conversation.answer(parts.answer, tokens, parts.reasoning)
                message = self.conversation.messages[-1]
                self._last = _Generated(message, text, tokens, reason == "stop") if is_new else None
            else:
                self.conversation.messages[:] = before

        self._keep = keep
        try:
            if dropped := self._make_room(n_begun):
                yield MessagesDropped(dropped)
            while reason is None:
                prompt = ChatPrompt([*self.conversation.prompt(), *tokens], splitter, len(tokens))
                settings = self._settings(len(tokens) - n_begun)
                for event in self.session.generate(
                    prompt, settings, cancelled=cancelled, on_read=self.on_read
                ):
                    if isinstance(event, Text):
                        content += event.text
                        tokens += event.tokens
                    if isinstance(event, Done):
                        if statistics:
                            event = replace(event, statistics=statistics + event.statistics)
                        if event.reason == "context" and (dropped := self._make_room(len(tokens))):
                            yield MessagesDropped(dropped)
                            statistics = event.statistics
                            break
                        reason = event.reason
                    yield event
        finally:
            keep()

    def _settings(self, n_generated: int) -> GenerationSettings:
        settings = self.settings
        if settings.seed is not None:
            # Random numbers depend on the position, and positions repeat after messages were dropped.
            settings = replace(settings, seed=settings.seed + self._attempt + _SEED_STRIDE * self._n_drops)
        if settings.max_tokens is not None:
            settings = replace(settings, max_tokens=settings.max_tokens - n_generated)
        return settings

    def _make_room(self, n_generated: int) -> int:
        """Drop the oldest messages if the context is nearly full, and return their number.

        Half of the context is freed at once, because everything after the system message must be read again.
        """
        settings, n_ctx = self.settings, self.session.main.n_ctx
        if self.when_full == "stop":
            return 0
        if n_generated and (settings.constrained or settings.stops):
            return 0  # the state of the grammar and partly matched stop strings would be lost
        wanted = n_ctx // 4 if settings.max_tokens is None else min(n_ctx // 4, settings.max_tokens)
        length = len(self.conversation.prompt()) + n_generated
        if length + wanted <= n_ctx:
            return 0
        n_messages = 0
        while length > n_ctx // 2 and (dropped := self.conversation.drop_oldest()):
            n_messages += dropped
            length = len(self.conversation.prompt()) + n_generated
        self._n_drops += n_messages > 0
        return n_messages


def _check_images(conversation: Conversation) -> None:
    """Raise ModelError if there are images that the model cannot read."""
    if images := [image for message in conversation.messages for _, image in message.get("images", ())]:
        conversation.model.check_reads(images)
