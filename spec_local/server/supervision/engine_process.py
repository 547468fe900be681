"""The process with the models. llama.cpp aborts its process if a worker dies: the server outlives that.

One thread decodes, one receives what the server sends, and two prepare prompts meanwhile: one of them those
that are long, for which others do not wait.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from spec_local import __version__
from spec_local.answers.marked import MarkedText
from spec_local.chat.conversation import Conversation
from spec_local.chat.meaning import same_message
from spec_local.chat.messages import Message, messages_of
from spec_local.chat.request import ChatRequest
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.chat.tool_use import ToolUse
from spec_local.engine.events import Prefilled, Statistics
from spec_local.errors import ContextOverflow, InvalidRequest, SpecLocalError, as_failure
from spec_local.llama import workers
from spec_local.llama.devices import ON_CPU
from spec_local.reasoning.markers import Splitter
from spec_local.server.supervision.events import (
    AnswerRequest,
    Delta,
    Ended,
    Event,
    Loaded,
    Reading,
    Refused,
    Started,
    Token,
)
from spec_local.server.supervision.prompt_tokens import infill_tokens, mixed_tokens, prompt_tokens
from spec_local.server.supervision.read_again import ReadAgainLog
from spec_local.server.supervision.stable_prompts import StablePrompts
from spec_local.session import ChatPrompt, Done, Session, Text
from spec_local.settings import GenerationSettings
from spec_local.system.cancellation import Abandoned, abandoned_if, check_wanted

_LONG = 1 << 15  # bytes of a request: 0.2 s for the slowest text, 10 ms for usual ones
_SAVING_S = 0.01  # between two parts of the caches that are saved while no answer runs
_CHATS_PER_SLOT = (
    4  # conversations whose tokens are known: a token takes a few bytes, a slot's cache megabytes
)

_KEPT_IMAGE_BYTES = 256 << 20  # of those conversations: as much as one request may have, and more
IN_IMAGE = -1
"""In place of a token of a prompt that is a part of an image, as in llama.cpp."""


@dataclass(slots=True)
class _Running:
    """An answer, from its prompt to its end."""

    id: int
    settings: GenerationSettings
    tokens: Sequence[int]
    chat: Conversation | None = None
    splitter: Splitter = field(default_factory=Splitter)
    parser: ToolCallParser = field(default_factory=ToolCallParser)
    marked: MarkedText | None = None
    answer: str = ""
    reasoning: str = ""
    generated: list[int] = field(default_factory=list)
    started: float = 0.0  # when it got a slot
    is_gap: bool = False  # prompts of gaps begin anew wherever the cursor is
    is_read: bool = False  # the prompt
    n_reread: int = 0


class _Sender:
    """Sends messages of several threads over a connection, one after another."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, *message: Any) -> None:
        with self._lock:
            self._connection.send(message)


class EngineProcess:
    """Answers the requests that arrive on a connection; started by a `Supervisor`.

    It receives ``("answers", [(id, AnswerRequest), …])`` and ``("ask", id, what, argument)``,
    ``("cancel", id)`` for both, and ``("sign", None)``. It sends ``("checked", id)`` of a prompt,
    ``("event", id, Event)``, ``("reply", id, value or SpecLocalError)`` and ``("sign",)`` if all workers
    answer.

    Args:
        keep_headers: system messages stay as they are: see `StablePrompts`.
    """

    def __init__(
        self,
        connection: Connection,
        send: _Sender,
        session: Session,
        name: str,
        *,
        keep_headers: bool = False,
    ) -> None:
        self._connection, self._sender = connection, send
        self._session, self._name = session, name
        self._model = session.main.model
        self._chats: deque[Conversation] = deque(maxlen=_CHATS_PER_SLOT * session.n_parallel)
        """Those that were answered last, with the tokens of their answers as generated: the cache has those,
        and to tokenize the text of an answer again could split it differently. Empty: no chat template."""
        if self._model.chat_template:
            template = ChatTemplate(self._model)
            self._chats.append(Conversation(self._model, template, n_ctx=session.main.n_ctx))
        self._stable_prompts = None if keep_headers else StablePrompts()
        self._ready: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        self._preparing = [ThreadPoolExecutor(1, name) for name in ("prepare", "prepare-long")]
        self._running: dict[int, _Running] = {}  # by number of the prompt
        self._waiting: set[int] = set()  # answers without a slot; to remove one is to claim it
        self._asked: set[int] = set()  # questions without a reply
        self._unfinished: set[int] = set()  # these, and the running ones
        self._cancelled: set[int] = set()
        self._settings = GenerationSettings()  # of the last prompt
        self._read_again = ReadAgainLog(
            self._model.vocabulary.detokenize, lambda line: self._send("log", line)
        )
        self._closing = False

    def run(self) -> None:
        """Answer until the server has closed the connection."""
        self._send("loaded", self._loaded())
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        while not self._closing:
            try:
                events = self._session.generate_many(
                    self._prompts(),
                    iter(lambda: self._settings, None),
                    keep_caches=True,
                    cancelled=self._is_over,
                    on_read=self._report,
                )
                for number, event in events:
                    try:
                        self._handle(number, event)
                    except Exception as error:  # a defect, which ends this answer only
                        self._refuse(number, error)
            except Exception as error:  # a call of a model failed
                if not self._running:
                    raise  # it would fail again: the server starts this process again
                for number in list(self._running):
                    self._refuse(number, error)
        for thread in self._preparing:
            thread.shutdown(wait=False, cancel_futures=True)

    def _loaded(self) -> Loaded:
        session = self._session
        return Loaded(
            name=self._name,
            draft=session.draft.model.name if session.draft else None,
            n_ctx=session.main.n_ctx,
            n_parallel=session.n_parallel,
            template=self._model.chat_template,
            properties={"version": __version__, "n_vocab": session.main.limits.n_vocab},
            draft_path=session.draft.model.path if session.draft else None,
            offload=str(self._model.offload) if self._model.is_on_gpu else str(ON_CPU),
            reads=self._model.projector.reads if self._model.projector else (),
        )

    # Receiving and preparing

    def _receive(self) -> None:
        try:
            while True:
                message = self._connection.recv_bytes()
                kind, *rest = pickle.loads(message)
                prepare = self._preparing[len(message) > _LONG].submit
                if kind == "cancel":
                    self._cancel(*rest)
                elif kind == "sign":
                    if not workers.unanswered():  # without them, no answer goes on
                        self._send("sign")
                elif kind == "answers":
                    self._session.expect_prompt(True)
                    ids = [id for id, _ in rest[0]]
                    self._unfinished.update(ids)
                    self._waiting.update(ids)
                    for id, request in rest[0]:
                        prepare(self._prepare, id, request)
                else:
                    self._asked.add(rest[0])
                    prepare(self._reply, *rest)
        except (EOFError, OSError):  # the server has ended
            self._closing = True
            self._ready.put(None)

    def _cancel(self, id: int) -> None:
        self._asked.discard(id)
        if self._claim(id):  # its place in the queue is free at once
            self._finish(id, Ended(Delta(), "cancelled", Statistics()))
        elif id in self._unfinished:
            self._cancelled.add(id)

    def _claim(self, id: int) -> bool:
        """Take an answer out of the queue; False: another thread has, or it was never in it.

        The threads that receive, prepare and decode all do; one of them gets it.
        """
        try:
            self._waiting.remove(id)
        except KeyError:
            return False
        return True

    def _prepare(self, id: int, request: AnswerRequest) -> None:
        """Make the tokens of a prompt."""
        try:
            with abandoned_if(lambda: self._closing or id not in self._waiting):
                check_wanted()
                running = self._prepared(id, request)
                self._send("checked", id)
                self._ready.put(running)
        except Abandoned:
            pass  # its client has left
        except Exception as error:
            if self._claim(id):
                self._finish(id, Refused(as_failure(error)))

    def _prepared(self, id: int, request: AnswerRequest) -> _Running:
        running = self._chat(id, request) if request.messages else self._text(id, request)
        self._check(running)
        running.settings = self._biased(running.settings, request.text_bias)
        self._session.compile_grammar(running.settings)  # here, so that answers that are running do not wait
        if request.ignore_end:
            running.settings = running.settings.without(self._model.vocabulary.ends)
        if request.marks:
            running.marked = MarkedText(self._model.vocabulary.piece)
        return running

    def _biased(self, settings: GenerationSettings, texts: Sequence[tuple[str, float]]) -> GenerationSettings:
        """The settings with the bias of each token of the texts; unknown tokens have none."""
        vocabulary = self._model.vocabulary
        biases = {t: bias for t, bias in settings.sampling.logit_bias.items() if t < vocabulary.n_tokens}
        for text, bias in texts:
            for token in vocabulary.tokenize(text):
                biases[token] = biases.get(token, 0.0) + bias
        return replace(settings, sampling=replace(settings.sampling, logit_bias=biases))

    def _check(self, running: _Running) -> None:
        """Refuse at once what would be refused when a slot is free, and in the terms of a request."""
        n, n_ctx = len(running.tokens), self._session.main.n_ctx
        if n > n_ctx:
            raise ContextOverflow(
                f"the prompt has {n} tokens but the context has {n_ctx}: shorten it", n, n_ctx
            )
        if running.settings.proposer == "draft" and not self._session.draft:
            raise InvalidRequest('"proposer": "draft" needs a server with a draft model: leave it out')
        shape = running.settings.shape
        if (
            shape in ("tree", "beam")
            and self._session.main.limits.max_branches < 2 <= running.settings.tree_nodes
        ):
            raise InvalidRequest(f'this server drafts chains: leave "shape": "{shape}" out')

    def _chat(self, id: int, request: AnswerRequest) -> _Running:
        chat = self._conversation(request)
        settings = chat.tool_use.settings(request.settings) if chat.tool_use else request.settings
        tokens, parser = chat.prompt(), chat.parser(partial=True)
        return _Running(id, settings, tokens, chat, chat.splitter(), parser)

    def _conversation(self, request: AnswerRequest) -> Conversation:
        """The messages of a request, with the tokens of what they have in common with an earlier one."""
        if not self._chats:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, which continues a text"
            )
        template = self._chats[0].template.with_variables(request.variables)
        tool_use = ToolUse(
            template,
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls,
            json_schema=request.settings.json_schema,
        )
        given = self._stable_prompts.stable(request.messages) if self._stable_prompts else request.messages
        messages = messages_of(given)
        recent = [*self._chats][::-1]  # of equal ones the last: it has the most answers
        most_in_common = max(recent, key=lambda chat: _n_common(chat.messages, messages))
        return most_in_common.following(messages, tool_use, as_generated=True)

    def _text(self, id: int, request: AnswerRequest) -> _Running:
        vocabulary, n_ctx = self._model.vocabulary, self._session.main.n_ctx
        if request.infill:
            tokens = infill_tokens(vocabulary, request.infill, n_ctx, request.settings.max_tokens)
        elif request.suffix is not None:
            assert isinstance(request.prompt, str)
            gap = ChatRequest(prompt=request.prompt, suffix=request.suffix, raw=True)
            tokens = gap.tokens(self._model, n_ctx)
        else:
            tokens = prompt_tokens(
                vocabulary,
                request.prompt,
                n_ctx,
                parse_special=request.parse_special,
                image_tokens=self._model.image_tokens,
            )
        is_gap = request.infill is not None or request.suffix is not None
        return _Running(id, request.settings, tokens, is_gap=is_gap)

    def _reply(self, id: int, what: str, argument: Any) -> None:
        try:
            with abandoned_if(lambda: self._closing or id not in self._asked):
                check_wanted()
                self._send("reply", id, self._value(what, argument))
        except Abandoned:
            pass  # its client has left
        except Exception as error:
            self._send("reply", id, as_failure(error))
        finally:
            self._asked.discard(id)

    def _value(self, what: str, argument: Any) -> Any:
        vocabulary = self._model.vocabulary
        match what:
            case "tokenize":
                text, add_special, parse_special = argument
                tokens = mixed_tokens(
                    vocabulary,
                    text,
                    add_special=add_special,
                    parse_special=parse_special,
                    image_tokens=self._model.image_tokens,
                )
                return [max(token, IN_IMAGE) for token in tokens]
            case "pieces":
                if unknown := [token for token in argument if not IN_IMAGE <= token < vocabulary.n_tokens]:
                    raise InvalidRequest(
                        f"token {unknown[0]} is unknown: give 0 to {vocabulary.n_tokens - 1}"
                    )
                return [b"" if t == IN_IMAGE else vocabulary.piece(t, special=True) for t in argument]
            case "prompt":
                chat = self._conversation(argument)
                return str(chat.rendered), len(chat.prompt())
            case "slots":
                running = [_slot(running) for running in list(self._running.values())]
                return [*running, *[None] * (self._session.n_parallel - len(running))]
            case "costs":
                return {
                    name: table and sorted(table.costs.items())
                    for name, table in zip(("main", "draft"), self._session.known_costs, strict=True)
                }
        raise InvalidRequest(f"{what!r} is unknown")

    # Decoding

    def _prompts(self) -> Iterator[ChatPrompt | Sequence[int] | None]:
        """The prompts that are ready, in the order in which they came; None: there is none now."""
        for number in range(sys.maxsize):
            running = None
            while running is None:
                try:
                    is_prepared = bool(self._waiting)  # it comes soon, or is refused
                    if not self._running and not is_prepared:
                        self._session.expect_prompt(False)
                    wait = None if self._session.is_saved and not is_prepared else _SAVING_S
                    running = self._ready.get(block=not self._running, timeout=wait)
                except queue.Empty:
                    if self._running or not is_prepared:
                        yield None  # between answers, `generate_many` then saves a part of the caches
                    continue
                if running is None:
                    return
                if not self._claim(running.id):
                    running = None  # its client has left
            running.started = time.monotonic()
            self._running[number] = running
            self._settings = running.settings
            yield ChatPrompt(running.tokens, running.splitter) if running.chat else running.tokens

    def _is_cancelled(self, id: int) -> bool:
        return self._closing or id in self._cancelled

    def _is_over(self, number: int) -> bool:
        running = self._running.get(number)
        return not running or running.parser.is_full or self._is_cancelled(running.id)

    def _refuse(self, number: int, error: Exception) -> None:
        """End an answer that failed; its later events are ignored."""
        if running := self._running.pop(number, None):
            self._finish(running.id, Refused(as_failure(error)))

    def _handle(self, number: int, event: Any) -> None:
        if not (running := self._running.get(number)):
            return
        if isinstance(event, Prefilled):
            running.is_read = True
            if not running.is_gap:
                running.n_reread = self._read_again.check(running.tokens, event.statistics.cached_n)
            self._report(number, len(running.tokens), event.statistics.cached_n)
            self._send("event", running.id, Started(len(running.tokens), event.statistics.cached_n))
        elif isinstance(event, Text):
            self._send("event", running.id, self._delta(running, event))
        elif isinstance(event, Done):
            self._end(running, event)
            del self._running[number]
        else:
            self._refuse(number, event.error)

    def _report(self, number: int, n_read: int, n_cached: int) -> None:
        """Send how much of a prompt has been read."""
        if running := self._running.get(number):
            seconds = time.monotonic() - running.started
            self._send("event", running.id, Reading(len(running.tokens), n_read, n_cached, seconds))

    def _delta(self, running: _Running, event: Text) -> Delta:
        running.generated += event.tokens
        piece = self._model.vocabulary.piece
        tokens = [Token(token, piece(token)) for token in event.tokens]
        if event.logprobs:
            tokens = [
                replace(
                    token,
                    logprob=each.logprob,
                    top=[Token(other, piece(other), value) for other, value in each.top],
                )
                for token, each in zip(tokens, event.logprobs, strict=True)
            ]
        proposal = event.proposal
        if running.marked:
            running.marked.add(event)
        return replace(
            self._parts(running, event.text),
            tokens=tokens,
            n_drafted=len(proposal.tokens),
            n_accepted=event.n_accepted,
            draft_depth=proposal.depth,
            source=proposal.source if proposal.tokens else "none",
        )

    def _parts(self, running: _Running, text: str, *, is_last: bool = False) -> Delta:
        """The next text of an answer as reasoning, content and calls."""
        parts = (running.splitter.finish if is_last else running.splitter.feed)(text)
        running.reasoning += parts.reasoning
        running.answer += parts.answer
        found = (running.parser.finish if is_last else running.parser.feed)(parts.answer)
        spans = []
        if running.marked:
            spans = [
                span for part in (parts.reasoning, found.text) if part for span in running.marked.take(part)
            ]
        return Delta(found.text, parts.reasoning, found.calls, found.arguments, spans=spans)

    def _end(self, running: _Running, event: Done) -> None:
        rest = self._parts(running, "", is_last=True)
        if running.chat and running.generated:
            # Before the last event: the next turn is prepared after it.
            running.chat.answer(running.answer, running.generated, running.reasoning)
            self._keep(running.chat)
        if running.is_read and not running.is_gap:
            self._read_again.add([*running.tokens, *running.generated])
        reason = event.reason
        if reason == "cancelled" and running.parser.is_full and not self._is_cancelled(running.id):
            reason = "stop"
        self._finish(
            running.id,
            Ended(
                rest,
                reason,
                event.statistics,
                event.stopping_word,
                self._session.plain_seconds,
                self._session.gain(running.settings, event.statistics),
                running.n_reread,
                event.reasoning_closed_at,
            ),
        )

    def _keep(self, chat: Conversation) -> None:
        """Keep a conversation that was answered; for the images of many, others are forgotten earlier."""
        self._chats.append(chat)
        for n in range(1, len(self._chats)):
            if sum(map(_image_bytes, list(self._chats)[-n - 1 :])) > _KEPT_IMAGE_BYTES:
                for _ in range(len(self._chats) - n):
                    self._chats.popleft()
                break

    # Sending

    def _finish(self, id: int, event: Event) -> None:
        self._unfinished.discard(id)
        self._cancelled.discard(id)
        self._send("event", id, event)

    def _send(self, *message: Any) -> None:
        try:
            self._sender(*message)
        except (BrokenPipeError, ConnectionResetError):  # the server has ended
            self._closing = True


def _image_bytes(chat: Conversation) -> int:
    return sum(len(image.data) for message in chat.messages for _, image in message.get("images", ()))


def _slot(running: _Running) -> tuple[int, int, int, GenerationSettings]:
    """What is told of a slot in use: id of the answer, tokens of the prompt and of the answer, settings."""
    return running.id, len(running.tokens), len(running.generated), running.settings


def _n_common(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Number of messages with the same meaning that both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, pair in pairs if not same_message(*pair)), min(len(a), len(b)))


def main() -> None:
    """Run in the process that `Engine` starts; the argument is the number of the connection's file."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)  # the server ends this process by closing the connection
    connection = Connection(int(sys.argv[1]))
    send = _Sender(connection)

    def on_silence(address: str) -> None:
        send("log", workers.no_answer(address))
        os._exit(1)

    workers.watch.on_silence = on_silence
    try:
        options: Mapping[str, Any] = connection.recv()
        try:
            session = Session.open(**options["session"], log=lambda line: send("log", line))
        except SpecLocalError as error:
            send("failed", error)
            return
        with session:
            session.costs()  # measured now if they are unknown: the first answer need not wait for it
            name, keep_headers = options["name"], options["keep_headers"]
            EngineProcess(connection, send, session, name, keep_headers=keep_headers).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    os._exit(0)  # threads that wait on the connection end with the process


if __name__ == "__main__":
    main()
