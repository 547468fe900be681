"""A session: a main model, an optional draft model, and their caches.

with Session.open("main.gguf", "draft.gguf") as session:
    for event in session.generate("Once upon a time"):
        print(event.text, end="")
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.arguments import checked
from spec_local.assembly import ProposerFactory
from spec_local.calibration import cost_store
from spec_local.calibration.measure import measure
from spec_local.core.constraint import Constraint
from spec_local.core.language_model import LanguageModel, common_prefix
from spec_local.core.proposal import MAX_DRAFT, MAX_STAGED, Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, TokenLogprob
from spec_local.core.text import TextStream
from spec_local.datastore.datastore import Datastore, open_datastore
from spec_local.engine.decoding import check_prompt, decode
from spec_local.engine.events import Event, Finished, FinishReason, Prefilled, Statistics
from spec_local.errors import InvalidRequest
from spec_local.llama import state
from spec_local.llama.compatibility import difference
from spec_local.llama.context import Context
from spec_local.llama.model import Model
from spec_local.llama.probe import check_model_file
from spec_local.llama.reproducible import reproducible_context
from spec_local.lookups import Lookup
from spec_local.policies.cost_model import CostModel
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.settings import GenerationSettings
from spec_local.turns import Answer, Turns
from spec_local.verifiers import VERIFIERS

if TYPE_CHECKING:  # llguidance is loaded at its first use
    from spec_local.grammar.matcher import Grammar

_USUAL_CONTEXT = 4096
_BEFORE = 256  # tokens of the prompt stored with its answer in the datastore, to find similar prompts
_USUAL = GenerationSettings()


@dataclass(frozen=True, slots=True)
class Text:
    """The text of one step; may be empty, as an incomplete character or a possible stop string is held back.

    Attributes:
        tokens: generated in this step, without the end token.
        proposal: the draft tokens of this step.
        n_accepted: number of accepted draft tokens at the start of `tokens`.
        logprobs: log probability of each token, if requested.
    """

    text: str
    tokens: Sequence[int] = ()
    proposal: Proposal = field(default_factory=Proposal)
    n_accepted: int = 0
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The last event, with the text still held back, and the stop string that ended the answer, if any."""

    text: str
    reason: FinishReason
    statistics: Statistics
    stopping_word: str = ""

    @property
    def cut_short(self) -> bool:
        """Whether something other than the model ended the answer."""
        return self.reason != "stop" or bool(self.stopping_word)


_Events = Generator[Prefilled | Text | Done, None, None]


class Session:
    """Models and their caches, for one answer at a time.

    Close it, or use it in a ``with`` statement, to free the models' memory.

    Any thread may use a session, but only one at a time: while a thread reads an answer, every use by another
    thread raises InvalidRequest. Only `close` may be called at any time; it ends the answer at its next step
    and waits for that. In the same thread, a new answer ends an unfinished one. The last event of an answer
    that was ended is `Done` with reason ``cancelled``. For several answers at the same time, open several
    sessions. A process that was forked after llama.cpp was loaded cannot use it.
    """

    @checked
    def __init__(self, main: Context, draft: Context | None = None) -> None:
        self.drafter: LanguageModel | None = draft
        """The draft model; it reads and drafts tokens of the main model's vocabulary."""
        self.vocabulary_map: VocabularyMap | None = None
        """Maps between the vocabularies of the two models, if they differ."""
        if draft:
            ours, theirs = main.model.vocabulary, draft.model.vocabulary
            if difference(ours, theirs):
                self.vocabulary_map = VocabularyMap(ours, theirs)
                self.drafter = IntersectionModel(draft, self.vocabulary_map, main.n_vocab)
            for context in (main, draft):
                context.model.check_can_roll_back()
        self.main = main
        self.draft = draft
        self._costs: tuple[CostModel, CostModel | None] | None = None
        self._staging: CostModel | None = None
        self._factory = ProposerFactory(
            main, draft, self.drafter, self.vocabulary_map, self._known_costs, self._staging_costs
        )
        self._grammar: tuple[object, Grammar] | None = None  # the most recent one, which most answers reuse
        self._log: Callable[[str], None] = lambda line: None
        self._resources = ExitStack()
        self._turns = Turns[Prefilled | Text | Done](lambda event: isinstance(event, Done), self._free)

    @classmethod
    @checked
    def open(
        cls,
        main: Path | str,
        draft: Path | str | None = None,
        *,
        n_ctx: int | None = None,
        threads: int | None = None,
        gpu_layers: int = -1,
        cache_type: str = "f16",
        branches: int = 1,
        datastore: bool = False,
        reproducible: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> "Session":
        """Load a main model, and a draft model if one is given.

        Args:
            main, draft: GGUF files; a file that is new on this machine is first tested in a child process.
            n_ctx: context length in tokens, limited to the model's training context; None: the training
                context, up to 4096.
            threads: number of threads for each model; None: the number of physical cores.
            gpu_layers: number of layers to offload to the GPU; −1: all.
            cache_type: element type of the KV caches.
            branches: maximum number of branches of a tree in the caches. The draft model evaluates more
                branches than it proposes, so use several times the number of a tree's nodes, such as 64. 1:
                chains only, which takes the least memory.
            datastore: add answers to the datastore on disk, and draft from it (see `spec_local.datastore`).
            reproducible: make the same seed give the same text whatever is drafted, with any draft model,
                proposer, policy and shape, and with none; slower without specdec's CPU kernels. On the CPU
                only. See `spec_local.llama.reproducible`.
            log: called with one line for each slow operation and each decision.

        Raises:
            SpecLocalError: one of its subclasses; everything loaded before the error has been freed.
        """
        with ExitStack() as stack:
            contexts: list[Context] = []
            for path in [main, draft] if draft else [main]:
                check_model_file(Path(path), gpu_layers=gpu_layers, log=log)
                model = Model(path, gpu_layers=gpu_layers)
                stack.callback(model.close)
                length = model.n_ctx(_USUAL_CONTEXT if n_ctx is None else n_ctx)
                if n_ctx is not None and not contexts and length < n_ctx:
                    log(f"context: {length} tokens, which is what the model was trained for")
                create = reproducible_context if reproducible and not contexts else Context
                context = create(
                    model,
                    n_ctx=length,
                    # Rows of logits take memory: the draft model needs one per branch or per staged token.
                    max_logits=max(branches, MAX_STAGED + 1) if contexts else MAX_DRAFT + 1,
                    max_branches=branches,
                    threads=threads,
                    cache_type=cache_type,
                )
                stack.callback(context.close)
                contexts.append(context)
            session = cls(*contexts)
            if session.vocabulary_map:
                share = session.vocabulary_map.share
                log(f"draft model: different vocabulary, which covers {share:.0%} of the main model's tokens")
            if datastore:
                session.datastore = open_datastore(session.main.model, log)
            session._log = log
            session._resources = stack.pop_all()
            return session

    def close(self) -> None:
        """End the answer that any thread is reading, and free the models' memory; later uses raise errors."""
        self._turns.close()

    def check_open(self) -> None:
        """Raise InvalidRequest if the session is closed, or this process was forked."""
        self._turns.check_open()

    def _free(self) -> None:
        if self._costs:
            for context, table in zip((self.main, self.draft), self._costs, strict=True):
                if context and table:
                    cost_store.save(context, table)
            self._costs = None
        self._resources.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checked
    def generate(
        self,
        prompt: str | Sequence[int],
        settings: GenerationSettings = _USUAL,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Answer[Prefilled | Text | Done]:
        """Generate an answer with exactly the main model's distribution.

        Args:
            prompt: text or token ids.
            settings: settings of this answer.
            cancelled: called between model calls; True ends the answer.
            clock: returns the time in seconds.

        Yields:
            `Prefilled`, one `Text` per step, and `Done`. The iterator may be closed early.

        Raises:
            InvalidRequest: a setting is not possible with these models, the grammar cannot be used, or the
                session is closed or in use.
            BackendError: a model call failed, or the grammar allows no token.
            ContextOverflow: the prompt is too long; see `spec_local.engine.decoding.decode`.
        """
        return self._turns.run(lambda: self._start(prompt, settings, cancelled, clock))

    def _start(
        self,
        prompt: str | Sequence[int],
        settings: GenerationSettings,
        cancelled: Callable[[], bool],
        clock: Callable[[], float],
    ) -> Answer[Prefilled | Text | Done]:
        vocabulary = self.main.model.vocabulary
        tokens = vocabulary.tokenize(prompt, add_special=True) if isinstance(prompt, str) else prompt
        unknown = [t for t in settings.sampling.logit_bias if not 0 <= t < vocabulary.n_tokens]
        if unknown:
            raise InvalidRequest(f"logit bias names token {unknown[0]}: give 0 to {vocabulary.n_tokens - 1}")
        drawn = settings.sampling.temperature > 0 and VERIFIERS[settings.rule].drawing != "chosen"
        if self.main.pad_to and drawn:
            raise InvalidRequest(
                "reproducible output above temperature 0 needs the verifier exact-match: give it"
            )
        check_prompt(self.main, tokens)  # fail before costs are measured
        self._turns.end()  # ended later, it would roll back the caches of the new answer
        if self.datastore:
            self.datastore.refresh()
        cached = self.main.cached
        if not self.main.model.can_roll_back and common_prefix(cached, list(tokens[:-1])) < len(cached):
            self.main.truncate(0)  # a recurrent model can only start from the beginning
        sampler = Sampler(settings.sampling, self._constraint(settings))
        events = decode(
            self.main,
            tokens,
            sampler=sampler,
            rng=SeededRng(settings.seed),
            proposer=self._factory.proposer(settings, sampler, clock),
            verifier=VERIFIERS[settings.rule],
            draft_max=settings.longest_path,
            max_tokens=settings.max_tokens,
            is_end=vocabulary.is_end,
            cancelled=lambda: self._turns.ending or cancelled(),
            clock=clock,
            logprobs=settings.logprobs,
        )
        return self._turns.start(self._texts(events, settings.stops, tokens[-_BEFORE:]))

    def state_size(self) -> int:
        """Number of bytes that `save_state` would write now."""
        return self._turns.run(lambda: state.size(self._contexts))

    @checked
    def save_state(self, path: Path | str) -> int:
        """Write the caches of both models to a file.

        Returns:
            size of the file in bytes.

        Raises:
            InvalidRequest: the file cannot be written; an existing file is unchanged.
            ContextOverflow: there is not enough memory for a copy of the KV cache.
        """
        return self._turns.run(lambda: state.save(Path(path), self._contexts))

    @checked
    def load_state(self, path: Path | str) -> int:
        """Restore the caches from a file written by `save_state`; an unfinished answer ends.

        A draft model whose state is not in the file evaluates the tokens again.

        Returns:
            number of tokens in the main model's cache.

        Raises:
            InvalidRequest: the file is damaged, or was saved with another model, build or setting; nothing
                has changed.
            ContextOverflow: the context is too short, or there is not enough memory; nothing has changed.
        """
        return self._turns.run(lambda: self._load_state(Path(path)))

    def _load_state(self, path: Path) -> int:
        self._turns.end()
        loaded = state.load(path, self._contexts)
        if "draft" in loaded and isinstance(self.drafter, IntersectionModel):
            self.drafter.restore(self.main.cached)
        return len(self.main.cached)

    @property
    def _contexts(self) -> dict[str, Context]:
        return {"main": self.main} | ({"draft": self.draft} if self.draft else {})

    @property
    def datastore(self) -> Datastore | None:
        """The datastore to draft from, to which this session's answers are added."""
        return self._factory.datastore

    @datastore.setter
    @checked
    def datastore(self, datastore: Datastore | None) -> None:
        self._factory.datastore = datastore

    @checked
    def proposers(self, settings: GenerationSettings) -> list[str]:
        """Names of the proposers in use; resolves ``auto``."""
        return self._factory.names(settings)

    @checked
    def lookups(self, settings: GenerationSettings) -> list[Lookup]:
        """The lookups among the proposers in use."""
        return self._turns.run(lambda: self._factory.lookups(settings))

    def costs(self) -> tuple[CostModel, CostModel | None]:
        """Seconds per call of the main and the draft model, from disk or measured now, in a second or two.

        The adaptive policy keeps them up to date; closing the session writes them to disk.
        """
        return self._turns.run(self._known_costs)

    def _known_costs(self) -> tuple[CostModel, CostModel | None]:
        if not self._costs:
            draft = self._known(self.draft, 0.5) if self.draft else None
            self._costs = self._known(self.main, 1.5), draft
        return self._costs

    def _staging_costs(self) -> CostModel | None:
        """Seconds per draft model call that returns logits for every token; measured once per session."""
        room = self.draft.n_ctx - len(self.draft.cached) if self.draft else 0
        if not self._staging and self.draft and room > 4:
            self._staging = measure(self.draft, (1, 2, 4), 2)
        return self._staging

    def _known(self, context: Context, budget: float) -> CostModel:
        rows = 1 if context is self.draft else None
        if context.n_ctx - len(context.cached) < MAX_DRAFT:
            context.truncate(0)  # too little room for a good measurement; the history is evaluated again
        known = cost_store.load(context)
        if known:
            # The machine may have been busy or on battery then, and sizes that seem expensive are not tried
            # again.
            for _ in range(2):
                now = measure(context, (1, 8), 1, rows)
                if known.agrees_with(now):
                    known.observe(1, now.seconds(1))  # scales the costs of all sizes to the current speed
                    return known
        else:
            self._log(f"measuring {context.model.path.name} (first use with these settings)")
        return measure(context, rows=rows, budget=budget)

    def _texts(self, events: Iterator[Event], stops: Sequence[str], before: Sequence[int]) -> _Events:
        vocabulary = self.main.model.vocabulary
        output: list[int] = []
        stream = TextStream(vocabulary.piece, stops)
        statistics = Statistics()
        if self._turns.ending:  # before the first event was read
            yield Done("", "cancelled", statistics)
            return
        for event in events:
            if isinstance(event, Prefilled):
                statistics = event.statistics
                yield event
            elif isinstance(event, Finished):
                self._store(before, output)
                yield Done(stream.finish(), event.reason, event.statistics)
            else:
                text, tokens = "", [t for t in event.tokens if not vocabulary.is_end(t)]
                for i, token in enumerate(tokens):
                    text += stream.feed(token)
                    if stream.stopped:
                        statistics.predicted_n -= len(event.tokens) - i - 1
                        tokens = tokens[: i + 1]
                        break
                output += tokens
                n_accepted, logprobs = min(event.n_accepted, len(tokens)), event.logprobs[: len(tokens)]
                yield Text(text, tokens, event.proposal, n_accepted, logprobs)
                if stream.stopped:
                    self._store(before, output)
                    yield Done("", "stop", statistics, stream.stopping_word)
                    break

    def _store(self, before: Sequence[int], output: Sequence[int]) -> None:
        if self.datastore:
            self.datastore.add_answer(output, before)

    def _constraint(self, settings: GenerationSettings) -> Constraint | None:
        if not settings.constrained:
            return None
        from spec_local.grammar.matcher import Grammar

        key = settings.grammar, settings.json_schema
        if not self._grammar or self._grammar[0] != key:
            vocabulary = self.main.model.vocabulary
            self._grammar = (
                key,
                (
                    Grammar.from_gbnf(vocabulary, settings.grammar)
                    if settings.grammar is not None
                    else Grammar.from_json_schema(vocabulary, settings.json_schema or "")
                ),
            )
        return Constraint(self._grammar[1].start())
