"""The answers that a session is generating: from prompts and settings to events."""

import copy
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import InstanceOf

from spec_local.answers.assembly import ProposerFactory, Slot
from spec_local.answers.saving import PromptSaver
from spec_local.answers.text import AnswerText, Done, NumberedEvent, Text
from spec_local.arguments import Tokens, checked_fields
from spec_local.core.constraint import Constraint, State
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.core.sequence import common_prefix
from spec_local.core.span import text_of
from spec_local.datastore.answer_store import AnswerStore
from spec_local.engine.engine import Engine
from spec_local.engine.events import Event, Failed, Prefilled, Statistics
from spec_local.engine.prefill import check_prompt
from spec_local.engine.request import Request, RequestOptions
from spec_local.errors import InvalidRequest, as_failure
from spec_local.llama.breakers import breaker_tokens
from spec_local.reasoning.markers import Markers, Splitter, markers_of, splitter_after
from spec_local.reasoning.thought import Thought, ThoughtTokens
from spec_local.settings import GenerationSettings
from spec_local.text import bytes_of
from spec_local.verifiers import VERIFIERS

if TYPE_CHECKING:  # llguidance is loaded at its first use
    from spec_local.grammar.matcher import Grammar

_MAX_GRAMMARS = 16  # a large one takes megabytes, and a second to make: agents in parallel have one each
_REASONING_SHARE = 0.5
"""Of the tokens that an answer under a grammar may have, the reasoning takes at most this share, unless a
budget is given: as many are left for what the grammar describes."""
BEFORE = 256
"""Number of prompt tokens that the datastore keeps with an answer, to find similar prompts."""


@checked_fields
@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a conversation, with what its answer begins with.

    Args:
        tokens: of the conversation, and of the answer so far.
        splitter: of the answer's text; not changed.
        n_answered: number of the last tokens, which the model generated and the splitter has not read.
    """

    tokens: Tokens
    splitter: Splitter
    n_answered: int = 0


Prompt: TypeAlias = str | Tokens | InstanceOf[ChatPrompt]

OnRead = Callable[[int, int, int], None]
"""Receives tokens of a prompt: read by the main model; all of them; and read by the draft model after it."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt to answer.

    index: its number. cancelled: called between calls; True ends the answer. chat: None for other text.
    """

    index: int
    tokens: Sequence[int]
    chat: ChatPrompt | None
    settings: GenerationSettings
    cancelled: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Running:
    """An answer that is being generated."""

    prompt: CheckedPrompt
    slot: Slot
    request: Request
    text: AnswerText


class RunningAnswers:
    """Generates answers in the slots of a session, one or several at the same time.

    Args:
        slots: the session's.
        factory: creates the proposers.
        saver: saves what the slots have read.
        ending: whether all answers are to end at their next step.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        factory: ProposerFactory,
        saver: PromptSaver,
        ending: Callable[[], bool],
    ) -> None:
        self.answer_store: AnswerStore | None = None
        """Where whole prompts and answers are kept, to learn from them."""
        self._slots, self._factory, self._saver, self._ending = slots, factory, saver, ending
        self._main = slots[0].main
        self._breakers = functools.lru_cache(4)(
            lambda texts: breaker_tokens(slots[0].main.model.vocabulary, texts)
        )
        self._markers: dict[Markers, ThoughtTokens] = {}
        self._grammars: dict[object, Grammar] = {}  # the most recent ones, which most answers reuse
        self._grammars_lock = threading.Lock()

    def check(
        self,
        index: int,
        prompt: Prompt,
        settings: GenerationSettings,
        cancelled: Callable[[], bool] | None = None,
    ) -> CheckedPrompt:
        """Check a prompt and its settings, before costs are measured.

        Raises:
            InvalidRequest: a setting is not possible with these models, or the prompt is empty.
            ContextOverflow: the prompt is too long.
        """
        vocabulary = self._main.model.vocabulary
        chat = prompt if isinstance(prompt, ChatPrompt) else None
        given = prompt.tokens if isinstance(prompt, ChatPrompt) else prompt
        if isinstance(given, str):
            vocabulary.check_length(bytes_of(given), self._main.n_ctx)
            tokens: Sequence[int] = vocabulary.tokenize(given, add_special=True)
        else:
            tokens = given
        unknown = [t for t in settings.sampling.logit_bias if not 0 <= t < vocabulary.n_tokens]
        if unknown:
            raise InvalidRequest(f"logit bias names token {unknown[0]}: give 0 to {vocabulary.n_tokens - 1}")
        drawn = not settings.sampling.is_greedy and VERIFIERS[settings.rule].drawing != "chosen"
        if self._main.pad_to and drawn:
            raise InvalidRequest(
                "reproducible output above temperature 0 needs the verifier exact-match: give it"
            )
        check_prompt(self._main, tokens)
        ends = (lambda: self._ending() or cancelled()) if cancelled else self._ending
        return CheckedPrompt(index, tokens, chat, settings, ends)

    def begin(self, prompt: CheckedPrompt, slot: Slot, clock: Callable[[], float]) -> Running:
        """Prepare an answer in a slot that is not in use.

        Raises:
            InvalidRequest, ModelError: the settings are not possible, or the grammar cannot be used.
        """
        vocabulary = self._main.model.vocabulary
        settings = prompt.settings
        if vocabulary.suppressed:
            settings = settings.without(vocabulary.suppressed)
        state, closed_at = self._thought(settings, prompt, self._grammar_start(settings))
        constraint = Constraint(state) if state else None
        sampling = settings.sampling
        breakers = self._breakers(sampling.dry_sequence_breakers) if sampling.has_dry else None
        sampler = Sampler(sampling, constraint, n_prompt=len(text_of(prompt.tokens)), breakers=breakers)
        started = clock()
        proposer = self._factory.proposer(settings, sampler, clock, slot)
        measured = clock()  # the costs, at first use
        request = Request(
            slot.main,
            prompt.tokens,
            RequestOptions(
                sampler=sampler,
                rng=SeededRng(settings.seed),
                proposer=proposer,
                verifier=VERIFIERS[settings.rule],
                draft_max=settings.longest_path,
                max_tokens=settings.max_tokens,
                is_end=vocabulary.is_end,
                cancelled=prompt.cancelled,
                clock=clock,
                logprobs=settings.logprobs,
                sampled_logprobs=settings.sampled_logprobs,
            ),
        )
        if request.plain_s is not None:
            request.statistics.saved_s["measuring"] = started - measured
        store = functools.partial(self._store, prompt)
        text = AnswerText(vocabulary, settings, clock, store, closed_at)
        return Running(prompt, slot, request, text)

    def generate(
        self, running: Running, clock: Callable[[], float], on_read: OnRead
    ) -> Generator[Prefilled | Text | Done, None, None]:
        """The events of one answer; its errors are raised."""
        if self._ending():  # before the first event was read
            yield Done("cancelled", Statistics())
            return
        engine = Engine(self._factory.planner, clock)
        self._saver.begin()
        try:
            engine.add(running.request)
            prefill, drafter = running.request.prefill, running.slot.drafter
            while not running.text.is_done:
                if not prefill.is_done:
                    n_drafter = len(drafter.cached) if drafter and prefill.draft_is_reading else 0
                    on_read(prefill.n_read, len(running.prompt.tokens), n_drafter)
                for _, event in engine.step():
                    for each in running.text.feed(event):
                        if isinstance(each, Failed):
                            raise each.exception
                        yield each
        finally:
            engine.close()
            self._saver.end()
            self._saver.finish()

    def generate_many(
        self,
        engine: Engine,
        prompts: Iterator[tuple[Any, GenerationSettings]],
        read: Callable[[int, Any, GenerationSettings], tuple[Prompt, GenerationSettings]],
        n_parallel: int,
        cancelled: Callable[[int], bool] | None,
        on_read: Callable[[int, int, int], None],
        clock: Callable[[], float],
        *,
        keep_caches: bool = False,
    ) -> Generator[NumberedEvent, None, None]:
        """The events of several answers, in the order in which they happen: see `Session.generate_many`.

        Args:
            engine: without requests.
            prompts: prompt and settings of each answer; taken when a slot is free.
            read: converts them, with the number of the answer; its errors end that answer.
            n_parallel: number of slots to use.
            cancelled: called with the number of an answer.
            on_read: called with the number of an answer, and tokens of its prompt: read, and cached.
        """
        free = list(self._slots[:n_parallel])  # the one that was used last is the last one
        running: dict[Request, Running] = {}
        n_started, ready = 0, True
        try:
            while True:
                while free and not self._ending() and (item := next(prompts, None)):
                    prompt, settings = item
                    if not (ready := prompt is not None):
                        break
                    index, n_started = n_started, n_started + 1
                    try:
                        ends = functools.partial(cancelled, index) if cancelled else None
                        prepared = self.check(index, *read(index, prompt, settings), ends)
                        slot = _best_slot(free, list(prepared.tokens))
                        started = self.begin(prepared, slot, clock)
                        engine.add(started.request)
                    except Exception as error:
                        yield NumberedEvent(index, Failed(as_failure(error), Statistics()))
                        continue
                    free.remove(slot)
                    running[started.request] = started
                    self._saver.begin(saves=keep_caches)
                if not keep_caches:  # only now: a new request reuses the cache of the one that ended
                    self._release(free)
                if not running:
                    if ready or self._ending():
                        return
                    ready = True
                    self._saver.step()
                    continue
                for request, event in engine.step():
                    if not (answer := running.get(request)):
                        continue  # a stop string has ended it in this step
                    yield from _fed(answer, event)
                    if answer.text.is_done:
                        engine.remove(request)
                        free.append(running.pop(request).slot)
                        if not running:
                            self._saver.end()
                for request, answer in running.items():
                    prefill, n_new = request.prefill, request.statistics.prompt_n
                    if n_new and not prefill.is_done:
                        on_read(answer.prompt.index, prefill.n_read, prefill.n_read - n_new)
        finally:
            engine.close()
            self._saver.end()
            if not keep_caches:
                self._release([answer.slot for answer in running.values()])

    def _release(self, slots: Sequence[Slot]) -> None:
        """Free the slots' parts of the cache; other sequences have what they share with them."""
        if len(self._slots) > 1:
            with suppress(InvalidRequest):  # closed in the meantime, which has freed them
                for slot in slots:
                    slot.clear()

    def _store(self, prompt: CheckedPrompt, output: Sequence[int]) -> None:
        text = text_of(prompt.tokens)
        if self._factory.datastore:
            self._factory.datastore.add_answer(output, text[-BEFORE:])
        if self.answer_store and len(text) == len(prompt.tokens):  # a head could not be trained on pictures
            self.answer_store.add(prompt.tokens, output, prompt.settings.sampling.temperature)

    def _thought(
        self, settings: GenerationSettings, prompt: CheckedPrompt, answer: State | None
    ) -> tuple[State | None, Callable[[Sequence[int]], int]]:
        """The constraint of reasoning and answer; outside a chat, a grammar holds from the first token.

        Returns:
            the constraint; None: any token may follow.
            a function that returns after how many tokens the usual budget has closed the reasoning of an
                output; 0: it has not.
        """
        model, chat = self._main.model, prompt.chat
        markers = markers_of(model.chat_template or "")
        limits = settings.reasoning_budget is not None and settings.reasoning_budget < self._main.n_ctx
        if not markers or not (chat if answer else limits):
            return answer, lambda output: 0
        if settings.call_grammar:
            markers = markers.before_calls
        tokens = self._thought_tokens(markers)
        if chat:
            splitter = copy.copy(chat.splitter)
        else:
            splitter = splitter_after(model.chat_template or "", tokens.piece, text_of(prompt.tokens))
        splitter.feed("")  # the prompt may have opened the reasoning
        if markers.header and settings.call_grammar and not splitter.is_past_reasoning:
            splitter = Splitter(markers, markers.openings[0] if splitter.is_reasoning else markers.header)
            splitter.feed("")
        answered = prompt.tokens[len(prompt.tokens) - chat.n_answered :] if chat else ()
        closing = model.vocabulary.continuation(markers.closed)
        budget = settings.reasoning_budget
        if budget is None:
            room = min(settings.max_tokens or sys.maxsize, self._main.n_ctx - len(prompt.tokens))
            budget = max(1, int(room * _REASONING_SHARE))
        state = Thought(splitter, tokens, closing, budget, answer).start(answered)

        def closed_at(output: Sequence[int]) -> int:
            following, n = copy.copy(splitter), 0
            for token in output:  # those of the closing are the first ones beyond the budget
                n += following.is_reasoning
                following.feed(tokens.text(token))
            return budget if settings.reasoning_budget is None and n > budget else 0

        return state, closed_at

    def _thought_tokens(self, markers: Markers) -> ThoughtTokens:
        if markers not in self._markers:
            vocabulary = self._main.model.vocabulary

            def piece(token: int) -> bytes:  # a grammar has read those without the names of control tokens
                return vocabulary.piece(token) or vocabulary.piece(token, special=True)

            tokens = ThoughtTokens(markers, piece, vocabulary.n_tokens, vocabulary.is_end)
            self._markers[markers] = tokens
        return self._markers[markers]

    def _grammar_start(self, settings: GenerationSettings) -> State | None:
        grammar = self.compile_grammar(settings)
        return grammar.start() if grammar else None

    def compile_grammar(self, settings: GenerationSettings) -> "Grammar | None":
        """The grammar of an answer, kept until the answer begins; None: it has none. Any thread may call it.

        Raises:
            InvalidRequest: it cannot be used.
        """
        if not settings.constrained:
            return None
        from spec_local.grammar.matcher import Grammar

        key = settings.grammar, settings.json_schema, settings.call_grammar
        with self._grammars_lock:
            grammar = self._grammars.pop(key, None)
        if not grammar:  # outside the lock: it can take a second
            vocabulary = self._main.model.vocabulary
            if settings.grammar is not None:
                grammar = Grammar.from_gbnf(vocabulary, settings.grammar)
                grammar.start().allowed()  # fails now, and not in the first step, if no text follows
            elif settings.call_grammar is None:
                grammar = Grammar.from_json_schema(vocabulary, settings.json_schema or "")
            else:
                grammar = Grammar.from_rules(vocabulary, settings.call_grammar)
        with self._grammars_lock:
            self._grammars[key] = grammar
            if len(self._grammars) > _MAX_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return grammar


def _fed(answer: Running, event: Event) -> Sequence[NumberedEvent]:
    """The events that follow from one of the engine; a defect in their making ends this answer only."""
    try:
        return [NumberedEvent(answer.prompt.index, each) for each in answer.text.feed(event)]
    except Exception as error:
        answer.text.is_done = True
        return [NumberedEvent(answer.prompt.index, Failed(as_failure(error), Statistics()))]


def _best_slot(free: Sequence[Slot], tokens: Sequence[int]) -> Slot:
    """The slot for a prompt: one whose cache the prompt continues, or else the least recently used one.

    A beginning that is shorter than half of a slot's cache, such as a system message, is shared with that
    slot, which keeps the rest for its own conversation.

    Args:
        free: the least recently used one first.
    """
    best = max(free, key=lambda slot: common_prefix(slot.main.cached, tokens))
    continues = 2 * common_prefix(best.main.cached, tokens) >= len(best.main.cached) > 0
    return best if continues else free[0]
