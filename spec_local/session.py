"""A session: a main model, an optional draft model, and their caches.

with Session.open("main.gguf", "draft.gguf") as session:
    for event in session.chat([{"role": "user", "content": "Why is the sky blue?"}]):
        if isinstance(event, Text):
            print(event.text, end="")
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeGuard, Unpack, cast

from pydantic import BeforeValidator, InstanceOf
from pydantic_core import PydanticCustomError

from spec_local import kernels
from spec_local.answers.assembly import ProposerFactory, Slot
from spec_local.answers.gain import Gain, best_parallel, gain_of
from spec_local.answers.lock import Answer, SessionLock
from spec_local.answers.running import ChatPrompt, OnRead, Prompt, RunningAnswers
from spec_local.answers.saving import PromptSaver, memory_budget
from spec_local.answers.text import Done, NumberedEvent, Text
from spec_local.arguments import Int32, checked, ignore
from spec_local.calibration import experience_store
from spec_local.calibration.known_costs import KnownCosts
from spec_local.chat.conversation import AnswerReader, Conversation
from spec_local.chat.messages import Message, Tool
from spec_local.chat.template import ChatTemplate
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.chat.tool_use import ToolUse
from spec_local.core.sequence import ModelSequence
from spec_local.datastore.answer_store import AnswerStore, start_keeping
from spec_local.datastore.datastore import Datastore, open_datastore
from spec_local.engine.engine import Engine
from spec_local.engine.events import Failed, Prefilled, Statistics
from spec_local.errors import InvalidRequest
from spec_local.llama.compatibility import difference
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.llama.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.llama.workers import parse as parse_workers
from spec_local.lookups.base import Lookup
from spec_local.lookups.recycling import Recycling
from spec_local.models.names import is_pair
from spec_local.opening.arguments import OpenArguments
from spec_local.opening.open_models import OpenOptions, open_models
from spec_local.opening.vocabulary_store import vocabulary_map
from spec_local.policies.cost_model import CostModel
from spec_local.prompt_cache.cache import PromptCache
from spec_local.prompt_cache.folder import default_folder
from spec_local.reasoning.markers import Splitter
from spec_local.settings import GenerationSettings

__all__ = ["ChatPrompt", "Done", "NumberedEvent", "Session", "Text"]

Messages = Sequence[Mapping[str, object]]
"""The messages of a chat."""
_DEFAULTS = GenerationSettings()


def _loaded(main: object) -> object:
    if isinstance(main, str | Path):
        raise PydanticCustomError("name", "it to Session.open, which loads the model")
    return main


class Session:
    """Models and their caches, for one answer at a time, or for several that share each call of the models.

    `Session.open` loads the models; the arguments below are for programs that have loaded them. Close the
    session, or use it in a ``with`` statement, to free the models' memory.

    Any thread may use a session, but only one at a time: while a thread reads an answer, every use by another
    thread raises InvalidRequest. Only `close` may be called at any time; it ends the answer at its next step
    and waits for that. In the same thread, a new answer ends an unfinished one. The last event of an answer
    that was ended is `Done` with reason ``cancelled``. For several answers at the same time, use
    `generate_many` or open several sessions. A process that was forked after llama.cpp was loaded cannot use
    it.

    Args:
        main, draft: contexts; a draft may also be a head, which reads the main model's hidden states.
        more: further sequences of both models, for several answers at the same time.
    """

    @checked
    def __init__(
        self,
        main: Annotated[LlamaSequence, BeforeValidator(_loaded)],
        draft: LlamaSequence | HeadSequence | None = None,
        more: Sequence[tuple[LlamaSequence, LlamaSequence | HeadSequence | None]] = (),
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self.vocabulary_map: VocabularyMap | None = None
        """Maps between the vocabularies of the two models, if they differ."""
        if isinstance(draft, LlamaSequence) and difference(main.model.vocabulary, draft.model.vocabulary):
            self.vocabulary_map = vocabulary_map(main.model, draft.model)
        self.main = main
        self.draft = draft
        self.mmproj: Path | None = None
        """The file of the main model's projector, with which it sees images or hears."""
        recycling = Recycling()
        self._slots = [
            Slot(m, d, self._drafter(m, d), Recycling(recycling) if i else recycling)
            for i, (m, d) in enumerate([(main, draft), *more])
        ]
        self.drafter = self._slots[0].drafter
        """The draft model; it reads and drafts tokens of the main model's vocabulary."""
        self._costs = KnownCosts()
        self._factory = ProposerFactory(
            self._slots,
            lambda slot: self._costs.of(slot.main, slot.draft),
            lambda: experience_store.load(main, draft),
        )
        self._resources = ExitStack()
        self._lock = SessionLock[Any](_is_left, Done, self._free)
        self._saver = PromptSaver(self._slots, prompt_cache)
        self._answers = RunningAnswers(self._slots, self._factory, self._saver, self._lock.is_ending)
        self._chat: Conversation | None = None  # the last one, whose tokens the next one may begin with

    def _drafter(
        self, main: LlamaSequence, draft: LlamaSequence | HeadSequence | None
    ) -> ModelSequence | None:
        if not draft or not self.vocabulary_map:
            return draft
        model = IntersectionModel(draft, self.vocabulary_map, main.limits.n_vocab)
        drafted = model.limits.draft_tokens
        if drafted is not None and not len(drafted):
            draft.limit(None)  # no token that is shared is among the first ones
        return model

    @property
    def n_parallel(self) -> int:
        """Maximum number of answers at the same time."""
        return len(self._slots)

    @property
    def device(self) -> str:
        """Where the main model runs, such as ``CPU`` or ``vulkan0``; if it differs, also the draft."""
        names = [sequence.model.device for sequence in (self.main, self.draft) if sequence]
        return f"{names[0]} (draft: {names[1]})" if len(set(names)) > 1 else names[0]

    @property
    def logits_vary(self) -> list[str]:
        """What makes the main model's logits depend on the number of tokens in a call, on this machine.

        If the list is empty, their bits do not, so that a text depends neither on drafts nor on other
        answers.
        """
        if self.main.pad_to:  # opened for reproducible output
            return []
        if self.main.model.is_on_gpu:
            return ["layers on other devices"]
        return kernels.status().varying(self.main.model.types, self.main.cache_type)

    @classmethod
    @checked
    def open(
        cls,
        main: Path | str,
        draft: Path | str | None = None,
        *,
        datastore: bool = False,
        prompt_cache: int | Literal["off"] = 0,
        log: Callable[[str], None] | None = None,
        **options: Unpack[OpenArguments],
    ) -> "Session":
        """Load a main model, and a draft model if one is given or the main model's name is that of a pair.

        Args:
            main, draft: GGUF files, or names as on the command line: of models.toml, or user/repo:quant. A
                file that exists takes precedence, and a `Path` is always a file. A file that is new on this
                machine is first tested in a child process. The draft is a model, or a head that was made for
                the main model; ``none``: use neither the draft model of a pair nor the main model's layers
                for multi-token prediction; ``auto``, the default on the command line: if there are none of
                these, use a head or a small model with the same vocabulary that is found on this machine (see
                `spec_local.opening.drafters`), and do without one where it cannot be used.
            options: see `OpenArguments`.
            datastore: add answers to the datastore on disk, and draft from it (see `spec_local.datastore`).
            prompt_cache: bytes on disk, in the user's cache folder, for what the models have read: a prompt
                that begins like an earlier one, even of an earlier session, is read only from the first
                difference on. 0: keep it in memory only, in a quarter of what is free; ``off``: reuse only
                the caches of the last answers, as with workers. See docs/prompt-cache.md.
            log: called with one line for each slow operation and each decision.

        Raises:
            DownloadError: a named model has not been downloaded; `spec_local.models.catalog.pull` does it.
            SpecLocalError: another subclass; everything loaded before the error has been freed.
        """
        log = log or ignore
        workers, learn = tuple(parse_workers(options["workers"])), options["learn"]
        opened = open_models(main, draft, OpenOptions(**cast(Any, options) | {"workers": workers}), log)
        first, *more = opened.sequences
        with opened.resources as resources:
            cache = None
            if prompt_cache != "off" and not workers:  # what workers hold would be sent back and forth
                cache = PromptCache(memory_budget(), folder=default_folder(), limit=prompt_cache, log=log)
            session = cls(*first, more, cache)
            session.mmproj = opened.projector.path if opened.projector else None
            session._log_notices(opened.draft, log)
            if datastore or learn:
                session.datastore = open_datastore(session.main.model, log)
            if learn:
                session._answers.answer_store = start_keeping(session.main.model, log)
            session._costs.log = log
            session._resources = resources.pop_all()
            return session

    def _log_notices(self, draft: Path | None, log: Callable[[str], None]) -> None:
        """Log what makes the session slower than it could be, and what is special about its draft model.

        draft: the draft model that was given.
        """
        main = self.main.model
        if (notice := self._notice_of_draft(given=draft is not None)) and not (
            draft and is_pair(main.path, draft)  # chosen for what it gains
        ):
            log(notice)
        if not main.is_on_gpu and (reason := kernels.missing()):
            log(f"slower than it could be: the CPU kernels are not used ({reason})")

    def _notice_of_draft(self, *, given: bool) -> str | None:
        """What is obviously wrong with a draft model that was given, or, once, that it has other tokens."""
        main, draft, vocabulary_map = self.main.model, self.draft, self.vocabulary_map
        coverage = vocabulary_map.share if vocabulary_map else 1.0
        if given and isinstance(draft, LlamaSequence):
            from spec_local.models.pairs import advice  # takes 30 ms

            sizes = main.size, draft.model.size
            if wrong := advice(main.path, draft.model.path, sizes, coverage):
                return wrong
        if vocabulary_map and vocabulary_map.is_new:
            return (
                f"draft model: different vocabulary, which covers {coverage:.0%} of the main model's tokens"
            )
        return None

    def close(self) -> None:
        """End the answer that any thread is reading, and free the models' memory; later uses raise errors."""
        self._lock.close()

    def check_open(self) -> None:
        """Raise InvalidRequest if the session is closed, or this process was forked."""
        self._lock.check_open()

    def _free(self) -> None:
        self._saver.close()
        if learned := self._factory.learned():
            experience_store.save(self.main, self.draft, learned)
        self._costs.save(self.main, self.draft)
        self._resources.close()

    def __repr__(self) -> str:
        names = " + ".join(sequence.model.path.name for sequence in (self.main, self.draft) if sequence)
        return f"<Session: {names}{', closed' if self._lock.is_closed else ''}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Session cannot be copied or sent to another process: open one there")

    def __enter__(self) -> "Session":
        self.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checked
    def generate(
        self,
        prompt: Prompt | Messages,
        settings: GenerationSettings | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        cancelled: Callable[[], bool] | None = None,
        on_read: OnRead | None = None,
        clock: Callable[[], float] | None = None,
        **changes: Any,
    ) -> Answer[Prefilled | Text | Done]:
        """Generate an answer with exactly the main model's distribution.

        Args:
            prompt: text or token ids, which are continued as they are; or the messages of a chat, as for
                `chat`. For programs that render messages themselves, a `ChatPrompt`: its grammar holds after
                the reasoning only, and a reasoning budget knows what the answer begins with.
            settings: settings of this answer; None: those of ``specdec generate``.
            tools, tool_choice: as for `chat`, which needs messages.
            cancelled: called between model calls; True ends the answer.
            on_read: called before each model call that reads the prompt, with three numbers of its tokens:
                those that the main model has read, all of them, and those that the draft model has read,
                which follows the main model.
            clock: returns the time in seconds; None: `time.perf_counter`.
            changes: single settings by name, also of sampling, such as ``max_tokens=5, temperature=0``.

        Yields:
            `Prefilled`, one `Text` per step, perhaps one more for what was held back, and `Done`. Joined, the
            texts are the whole answer. The iterator may be closed early.

        Raises:
            InvalidRequest: a setting is not possible with these models, the grammar cannot be used, or the
                session is closed or in use.
            BackendError: a model call failed, or the grammar allows no token.
            ContextOverflow: the prompt is too long; see `spec_local.engine.request.Request`.
        """
        if _is_chat(prompt):
            return self.chat(
                prompt,
                settings,
                tools=tools,
                tool_choice=tool_choice,
                cancelled=cancelled,
                on_read=on_read,
                clock=clock,
                **changes,
            )
        if tools:
            raise InvalidRequest("tools need a chat: give a list of messages")
        changed = (settings or _DEFAULTS).changed(**changes)
        return self._lock.run(
            lambda: self._start(cast(Prompt, prompt), changed, cancelled, clock, on_read=on_read)
        )

    @checked
    def complete(
        self,
        prompt: Prompt | Messages,
        settings: GenerationSettings | None = None,
        **options: Any,
    ) -> str:
        """Return a whole answer as one text.

        Args:
            prompt, settings: as for `generate`. The answer to a chat is without its reasoning and tool calls,
                which `answer` has.
            options: as for `generate`, such as ``max_tokens=5, temperature=0``.

        Raises:
            SpecLocalError: see `generate` and `chat`.
        """
        text, message = "", None
        for event in self.generate(prompt, settings, **options):
            if isinstance(event, Text):
                text += event.text
            elif isinstance(event, Done):
                message = event.message
        return text if message is None else str(message["content"])

    @checked
    def chat(
        self,
        messages: Messages,
        settings: GenerationSettings | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        cancelled: Callable[[], bool] | None = None,
        on_read: OnRead | None = None,
        clock: Callable[[], float] | None = None,
        **changes: Any,
    ) -> Answer[Prefilled | Text | Done]:
        """Answer the last message of a chat with exactly the main model's distribution.

        The caches keep the last chat: what a chat has in common with it is not evaluated again. For a chat
        whose messages are kept, saved, or dropped where the context is full, see `ChatSession`.

        Args:
            messages: the whole chat, each a dict with ``role`` (``system``, ``user``, ``assistant`` or
                ``tool``) and ``content``, as in OpenAI's API. If the last message is the assistant's, it is
                continued. The model's chat template is applied.
            tools: the tools that the model may call, in the form of OpenAI's API; see `tool_call_parser`.
            tool_choice: ``auto``, ``none``, ``required`` or the name of a tool; see
                `spec_local.chat.tool_use.ToolUse`.
            settings, cancelled, on_read, clock, changes: see `generate`.

        Yields:
            `Prefilled`, `Text` and `Done`, as `generate` does.

        Raises:
            ModelError: the model has no chat template, or its template has no tools or rejects these
                messages.
            InvalidRequest, BackendError, ContextOverflow: see `generate`.
        """
        changed = (settings or _DEFAULTS).changed(**changes)

        def start() -> Answer[Prefilled | Text | Done]:
            chat, own = self._read_chat(messages, changed, tools, tool_choice)
            prompt = ChatPrompt(chat.prompt(), chat.splitter())
            answer = self._start(prompt, own, cancelled, clock, chat, on_read)
            self._chat = chat
            return answer

        return self._lock.run(start)

    def splitter(self) -> Splitter:
        """Return a new splitter for the answer to the last `chat`, which separates the reasoning from it."""
        return self._chat.splitter() if self._chat else Splitter()

    def tool_call_parser(self) -> ToolCallParser:
        """Return a new parser for the answer to the last `chat`, which separates tool calls from the text.

        Feed it the answer without the reasoning, as `splitter` returns it.
        """
        return self._chat.parser() if self._chat else ToolCallParser()

    @property
    def answer(self) -> Message | None:
        """The answer to the last `chat` as a message, with its calls and reasoning; None: it has not ended.

        Appended to the messages, with a message of role ``tool`` for each call, it continues the chat.
        """
        return self._chat.last_answer if self._chat else None

    def _read_chat(
        self, messages: Messages, settings: GenerationSettings, tools: Sequence[Tool], tool_choice: str
    ) -> tuple[Conversation, GenerationSettings]:
        """The conversation, with the tokens that it has in common with the last one, and its settings."""
        model = self.main.model
        last = self._chat or Conversation(model, ChatTemplate(model), n_ctx=self.main.n_ctx)
        tool_use = ToolUse(last.template, tools, tool_choice, json_schema=settings.json_schema)
        return last.following(messages, tool_use), tool_use.settings(settings)

    def _start(
        self,
        prompt: Prompt,
        settings: GenerationSettings,
        cancelled: Callable[[], bool] | None,
        clock: Callable[[], float] | None,
        chat: Conversation | None = None,
        on_read: OnRead | None = None,
    ) -> Answer[Prefilled | Text | Done]:
        clock = clock or time.perf_counter
        prepared = self._answers.check(0, prompt, settings, cancelled)
        self._end_answer()
        running = self._answers.begin(prepared, self._slots[0], clock)
        events = self._answers.generate(running, clock, on_read or ignore)
        if chat:
            events = chat.answered(events, chat.splitter())
        return self._lock.start(events)

    @checked
    def generate_many(
        self,
        prompts: InstanceOf[Iterable[Prompt | Messages | None]],
        settings: GenerationSettings | InstanceOf[Iterable[GenerationSettings]] | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        n_parallel: Int32 | None = None,
        keep_caches: bool = False,
        totals: Statistics | None = None,
        cancelled: Callable[[int], bool] | None = None,
        on_read: Callable[[int, int, int], None] | None = None,
        clock: Callable[[], float] | None = None,
        **changes: Any,
    ) -> Answer[NumberedEvent]:
        """Generate answers to several prompts, up to `n_parallel` at the same time.

        Each answer has exactly the main model's distribution. All of them share each call of the models, so
        that the weights are read once for all. A beginning that prompts share is evaluated once.

        Args:
            prompts: each as for `generate`: the messages of a chat, text or token ids. The next one is taken
                when there is a free slot. A None stands for a prompt that is not known yet: the running
                answers go on, and the iterator is asked again after their next step. It may block only if no
                answer is running.
            settings: the settings of all answers, whose seed increases by one from answer to answer; or an
                iterable with those of each answer, which advances together with `prompts`.
            tools, tool_choice: of the prompts that are chats, as for `chat`.
            n_parallel: maximum number of answers at the same time; None: as many as the session allows.
            keep_caches: leave the tokens of each answer in the caches until a slot is needed for another one,
                for later prompts that begin with them.
            totals: receives the counts over all answers, and the time of the calls that they share.
            cancelled: called with the index of an answer between model calls; True ends that answer.
            on_read: called after each model call with the index of an answer whose prompt is being read, the
                number of its tokens that have been read, and of those that were in the cache.
            clock: returns the time in seconds.
            changes: single settings by name, as for `generate`, unless each answer has its own.

        Yields:
            `NumberedEvent`: for each answer the events of `generate`, in the order in which they happen. The
            `message` of `Done` is the answer to a chat. An answer that cannot be generated ends with
            `Failed`; the others go on.

        Raises:
            InvalidRequest: the session is closed or in use, or `n_parallel` is out of range.
            BackendError: a model call failed.
        """
        _check_several(prompts)
        n_parallel = self._checked_parallel(n_parallel)
        clock, chats = clock or time.perf_counter, dict[int, AnswerReader]()

        def read(
            index: int, prompt: Prompt | Messages, settings: GenerationSettings
        ) -> tuple[Prompt, GenerationSettings]:
            prompt, settings = _item(prompt, settings)
            if not _is_chat(prompt):
                return cast(Prompt, prompt), settings
            chat, settings = self._read_chat(prompt, settings, tools, tool_choice)
            chats[index] = AnswerReader(chat, chat.splitter())
            return ChatPrompt(chat.prompt(), chat.splitter()), settings

        many = self._answers.generate_many(
            Engine(self._factory.planner, clock, totals),
            zip(prompts, _of_each(settings, changes), strict=False),
            read,
            n_parallel,
            cancelled,
            on_read or ignore,
            clock,
            keep_caches=keep_caches,
        )

        def start() -> Answer[NumberedEvent]:
            self._end_answer()
            return self._lock.start(_answered(many, chats))

        return self._lock.run(start)

    def _checked_parallel(self, wanted: int | None) -> int:
        """The number of answers at the same time that is wanted, which must be possible."""
        n = self.n_parallel if wanted is None else wanted
        if not 1 <= n <= self.n_parallel:
            raise InvalidRequest(
                f"n_parallel is {n}: give 1 to {self.n_parallel}, as the session was opened for"
            )
        return n

    def compile_grammar(self, settings: GenerationSettings) -> None:
        """Compile the grammar or schema of an answer, which can take a second, before the answer begins.

        Any thread may call it, even while other answers are generated.

        Raises:
            InvalidRequest: the grammar cannot be used.
        """
        self._answers.compile_grammar(settings)

    def _end_answer(self) -> None:
        self._lock.end()  # ended later, it would roll back the caches of the new answer
        if self.datastore:
            self.datastore.refresh()

    @property
    def is_saved(self) -> bool:
        """Whether the prompt cache has all that was read; `generate_many` saves a part at each None."""
        return self._saver.is_done

    def expect_prompt(self, expected: bool) -> None:
        """Note whether a prompt for `generate_many` is being prepared: meanwhile, nothing is written to disk.

        Any thread may call it.
        """
        self._saver.pause(expected)

    @property
    def datastore(self) -> Datastore | None:
        """The datastore to draft from, to which this session's answers are added."""
        return self._factory.datastore

    @datastore.setter
    @checked
    def datastore(self, datastore: Datastore | None) -> None:
        self._factory.datastore = datastore

    @property
    def answer_store(self) -> AnswerStore | None:
        """Where this session keeps whole prompts and answers; None: nowhere."""
        return self._answers.answer_store

    @checked
    def proposers(self, settings: GenerationSettings) -> list[str]:
        """Names of the proposers in use; resolves ``auto``."""
        return self._factory.names(settings)

    @checked
    def lookups(self, settings: GenerationSettings) -> list[Lookup]:
        """The lookups among the proposers in use."""
        return self._lock.run(lambda: self._factory.lookups(settings))

    def best_parallel(self) -> int:
        """The number of answers at the same time, up to `n_parallel`, that gives the most tokens per second.

        Measures the cost of calls, or reads it from disk. The result is the smallest number within 5 % of the
        best, because more answers at the same time make each one take longer.
        """
        return best_parallel(self.costs()[0], self.n_parallel) if self.n_parallel > 1 else 1

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a step without draft tokens, as the adaptive policy knows them; None: not measured."""
        main, _ = self.known_costs
        return main.seconds(1) if main else None

    def gain(self, settings: GenerationSettings, statistics: Statistics) -> Gain | None:
        """What drafts gained in an answer with these settings, if that may be stated: see `gain_of`."""
        return gain_of(
            statistics,
            self.plain_seconds,
            settings.policy,
            is_asked=bool(self.proposers(settings)),
            has_draft=self.draft is not None or settings.proposer not in ("auto", "suffix", "lookup"),
        )

    @property
    def known_costs(self) -> tuple[CostModel | None, CostModel | None]:
        """`costs` if they are known; any thread may read them while another one uses the session."""
        return self._costs.calls or (None, None)

    @checked
    def costs(self, *, stopped: Callable[[], bool] | None = None) -> tuple[CostModel, CostModel | None]:
        """Seconds per call of the main and the draft model, from disk or measured now, in a second or two.

        Answers do not need them: they begin with estimates, which their calls correct. The adaptive policy
        keeps the costs up to date; closing the session writes them to disk.

        Args:
            stopped: called between calls; True ends the measurement, and the rest are estimates.
        """
        return self._lock.run(lambda: self._costs.measured(self.main, self.draft, stopped))


def _check_several(prompts: object) -> None:
    """Raise InvalidRequest for what looks like several prompts, and is one."""
    if isinstance(prompts, str):
        raise InvalidRequest("prompts is text: give a list of prompts")
    if isinstance(prompts, Sequence) and _is_chat(prompts):
        raise InvalidRequest("prompts is one chat: give a list of chats, each a list of messages")


def _is_chat(prompt: object) -> TypeGuard[Messages]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


@checked
def _item(
    prompt: Prompt | Messages, settings: GenerationSettings
) -> tuple[Prompt | Messages, GenerationSettings]:
    """Check the types of a prompt and its settings, which come from an iterable."""
    return prompt, settings


def _answered(
    events: Generator[NumberedEvent, None, None], chats: dict[int, AnswerReader]
) -> Generator[NumberedEvent, None, None]:
    """The events of several answers; those of chats end with a message."""
    with closing(events):
        for each in events:
            chat = chats.get(each.number)
            yield NumberedEvent(each.number, chat.read(each.event)) if chat else each
            if isinstance(each.event, Done | Failed):
                chats.pop(each.number, None)


def _is_left(event: object) -> bool:
    """True for the events with which answers end: the last text, and the end."""
    return isinstance(event.event if isinstance(event, NumberedEvent) else event, Text | Done | Failed)


def _of_each(
    settings: GenerationSettings | Iterable[GenerationSettings] | None, changes: Mapping[str, Any]
) -> Iterable[GenerationSettings]:
    """The settings of the first, second, … answer; see `Session.generate_many`."""
    if settings is None or isinstance(settings, GenerationSettings):
        changed = (settings or _DEFAULTS).changed(**changes)
        if changed.seed is None:
            return itertools.repeat(changed)
        return (replace(changed, seed=seed) for seed in itertools.count(changed.seed))
    if changes:
        raise InvalidRequest(f"each answer has settings of its own: set {', '.join(changes)} there")
    return settings
