"""A main model, a way to guess, and their caches: what a program that writes text holds on to.

with Session.open("main.gguf", "draft.gguf") as session:
    for event in session.generate("Once upon a time"):
        print(event.text, end="")
"""

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spec_local.assembly import ProposerFactory
from spec_local.calibration import cost_store
from spec_local.core.constraint import Constraint
from spec_local.core.language_model import LanguageModel, common_prefix
from spec_local.core.proposal import Proposal
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
from spec_local.lookups import Lookup
from spec_local.policies.cost_model import CostModel, measure
from spec_local.proposers.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.settings import MAX_DRAFT, MAX_STAGED, GenerationSettings, ProposerName
from spec_local.verifiers import VERIFIERS

if TYPE_CHECKING:  # llguidance is loaded at its first use
    from spec_local.grammar.matcher import Grammar

_USUAL_CONTEXT = 4096
_BEFORE = 256  # tokens of a prompt that are kept with its answer: by them a like question is known, and what differs in it
_USUAL = GenerationSettings()


@dataclass(frozen=True, slots=True)
class Text:
    """Text that has become certain with one step, or with the end; may be empty.

    tokens: said in this step, without the one that ends the answer. proposal: what had been guessed.
    n_accepted: the first so many of the tokens had been. logprobs: of each of the tokens, if they were asked for.
    """

    text: str
    tokens: Sequence[int] = ()
    proposal: Proposal = field(default_factory=Proposal)
    n_accepted: int = 0
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The last event. `text` is what was still held back; `stopping_word` the stop string that ended the answer."""

    text: str
    reason: FinishReason
    statistics: Statistics
    stopping_word: str = ""


_Answer = Generator[Prefilled | Text | Done, None, None]


class Session:
    """Models and caches of one conversation at a time.

    Close it (or use it in a ``with``) to free the models' memory.
    """

    def __init__(self, main: Context, draft: Context | None = None) -> None:
        self.guesser: LanguageModel | None = draft
        """The draft, speaking main's vocabulary."""
        self.vocabulary_map: VocabularyMap | None = None
        """Where the draft has another vocabulary than main."""
        if draft:
            ours, theirs = main.model.vocabulary, draft.model.vocabulary
            if difference(ours, theirs):
                self.vocabulary_map = VocabularyMap(ours, theirs)
                self.guesser = IntersectionModel(draft, self.vocabulary_map, main.n_vocab)
            for context in (main, draft):
                context.model.check_can_roll_back()
        self.main = main
        self.draft = draft
        self._costs: tuple[CostModel, CostModel | None] | None = None
        self._staging: CostModel | None = None
        self._factory = ProposerFactory(
            main, draft, self.guesser, self.vocabulary_map, self.costs, self._staging_costs
        )
        self._grammar: tuple[object, Grammar] | None = None  # the last one; most answers reuse it
        self._log: Callable[[str], None] = lambda line: None
        self._answer: Callable[[], _Answer | None] = lambda: None
        self._resources = ExitStack()

    @classmethod
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
        log: Callable[[str], None] = lambda line: None,
    ) -> "Session":
        """Load a main model, and a draft if one is given.

        Args:
            main, draft: GGUF files; a file that this machine has not loaded before is tried in a
                child process first.
            n_ctx: tokens of the context, at most what the model was trained for; None: that, up to 4096.
            branches: how many guesses the models may read side by side; the draft reads more of them than it
                proposes, so give several times the nodes of a tree, such as 64. 1: chains only, which takes
                the least memory.
            datastore: keep what is said on disk, for those who guess in this and later sessions with main's vocabulary (see
                `spec_local.datastore.datastore`), and guess from what was kept.
            log: told, in a line, what takes time and what was decided.

        Raises:
            SpecLocalError: one of its kinds; whatever was loaded has been freed.
        """
        with ExitStack() as stack:
            contexts: list[Context] = []
            for path in [main, draft] if draft else [main]:
                check_model_file(Path(path), gpu_layers=gpu_layers, log=log)
                model = Model(path, gpu_layers=gpu_layers)
                stack.callback(model.close)
                length = model.n_ctx(_USUAL_CONTEXT if n_ctx is None else n_ctx)
                context = Context(
                    model,
                    n_ctx=length,
                    # A row of logits takes memory: a draft needs as many as it reads side by side, or along.
                    max_logits=max(branches, MAX_STAGED + 1) if contexts else MAX_DRAFT + 1,
                    max_branches=branches,
                    threads=threads,
                    cache_type=cache_type,
                )
                stack.callback(context.close)
                contexts.append(context)
            session = cls(*contexts)
            if n_ctx is not None and contexts[0].n_ctx < n_ctx:
                log(f"context: {contexts[0].n_ctx} tokens, which is what the model was trained for")
            if session.vocabulary_map:
                share = session.vocabulary_map.share
                log(f"draft: another vocabulary, in which it can guess {share:.0%} of main's tokens")
            if datastore:
                session.datastore = open_datastore(session.main.model, log)
            session._log = log
            session._resources = stack.pop_all()
            return session

    def close(self) -> None:
        self._end_answer()
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

    def generate(
        self,
        prompt: str | Sequence[int],
        settings: GenerationSettings = _USUAL,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Iterator[Prefilled | Text | Done]:
        """Continue a prompt, a text or tokens, with exactly main's distribution.

        Yields:
            `Prefilled`, `Text` per step, and `Done`. Closing the iterator early is fine.

        Raises:
            InvalidRequest: also a grammar that cannot be used, or is too ambiguous.
            BackendError: also a grammar that leaves the model no token.
            see `spec_local.engine.decoding.decode`.
        """
        vocabulary = self.main.model.vocabulary
        tokens = vocabulary.tokenize(prompt, add_special=True) if isinstance(prompt, str) else prompt
        unknown = [t for t in settings.sampling.logit_bias if not 0 <= t < vocabulary.n_tokens]
        if unknown:
            raise InvalidRequest(f"logit bias names token {unknown[0]}: give 0 to {vocabulary.n_tokens - 1}")
        check_prompt(self.main, tokens)  # before anything is measured
        self._end_answer()
        if self.datastore:
            self.datastore.refresh()
        cached = self.main.cached
        if not self.main.model.can_roll_back and common_prefix(cached, list(tokens[:-1])) < len(cached):
            self.main.truncate(0)  # another text: a recurrent model can forget all, and no less
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
            cancelled=cancelled,
            clock=clock,
            logprobs=settings.logprobs,
        )
        answer = self._texts(events, settings.stops, tokens[-_BEFORE:])
        self._answer = weakref.ref(answer)
        return answer

    def _end_answer(self) -> None:
        """Of answers there is one at a time: an older one would roll back the caches of the next, or caches that are gone."""
        if answer := self._answer():
            answer.close()

    def state_size(self) -> int:
        """Bytes that `save_state` would write now."""
        return state.size(self._contexts)

    def save_state(self, path: Path | str) -> int:
        """Write what main and draft have read to a file, so that `load_state` need not read it again.

        Returns:
            bytes of the file.

        Raises:
            InvalidRequest: it cannot be written; a file that was there still is.
            ContextOverflow: there is no memory for a copy of the KV cache.
        """
        return state.save(Path(path), self._contexts)

    def load_state(self, path: Path | str) -> int:
        """Go on from what `save_state` has written; a draft that was not saved, or is another, reads the text again.

        Returns:
            tokens that main now holds.

        Raises:
            InvalidRequest: the file is damaged, or of another model, build or setting; nothing has changed.
            ContextOverflow: the context is too short, or there is no memory; nothing has changed.
        """
        loaded = state.load(Path(path), self._contexts)
        if "draft" in loaded and isinstance(self.guesser, IntersectionModel):
            self.guesser.recall(self.main.cached)
        return len(self.main.cached)

    @property
    def _contexts(self) -> dict[str, Context]:
        return {"main": self.main} | ({"draft": self.draft} if self.draft else {})

    @property
    def datastore(self) -> Datastore | None:
        """Texts of other sessions, which may be guessed, and into which go this one's answers."""
        return self._factory.datastore

    @datastore.setter
    def datastore(self, datastore: Datastore | None) -> None:
        self._factory.datastore = datastore

    def proposers(self, settings: GenerationSettings) -> list[ProposerName]:
        """Who may guess: what the settings say, and what ``auto`` means with these models."""
        return self._factory.names(settings)

    def lookups(self, settings: GenerationSettings) -> list[Lookup]:
        """Those among them that ask no model."""
        return self._factory.lookups(settings)

    def costs(self) -> tuple[CostModel, CostModel | None]:
        """Seconds a call of main and of the draft: what is known from earlier, or else measured now, in a second or two.

        Generating with policy adaptive keeps them up to date, and closing the session keeps them on disk.
        """
        if not self._costs:
            draft = self._known(self.draft, 0.5) if self.draft else None
            self._costs = self._known(self.main, 1.5), draft
        return self._costs

    def _staging_costs(self) -> CostModel | None:
        """Seconds a call of the draft that gives its opinion after each token; measured once a session."""
        room = self.draft.n_ctx - len(self.draft.cached) if self.draft else 0
        if not self._staging and self.draft and room > 4:
            self._staging = measure(self.draft, (1, 2, 4), 2)
        return self._staging

    def _known(self, context: Context, budget: float) -> CostModel:
        rows = 1 if context is self.draft else None
        if context.n_ctx - len(context.cached) < MAX_DRAFT:
            context.truncate(0)  # a poor table would be kept for long; the text is read again
        known = cost_store.load(context)
        if known:
            # What was kept may be of a machine that was busy or had no plug, and what seems dear would never be tried again.
            for _ in range(2):
                now = measure(context, (1, 8), 1, rows)
                if known.agrees_with(now):
                    known.observe(1, now.seconds(1))  # all sizes become as dear as this one is today
                    return known
        else:
            self._log(f"measuring {context.model.path.name} (first use with these settings)")
        return measure(context, rows=rows, budget=budget)

    def _texts(self, events: Iterator[Event], stops: Sequence[str], before: Sequence[int]) -> _Answer:
        vocabulary = self.main.model.vocabulary
        said: list[int] = []
        stream = TextStream(vocabulary.piece, stops)
        statistics = Statistics()
        for event in events:
            if isinstance(event, Prefilled):
                statistics = event.statistics
                yield event
            elif isinstance(event, Finished):
                self._remember(before, said)
                yield Done(stream.finish(), event.reason, event.statistics)
            else:
                text, tokens = "", [t for t in event.tokens if not vocabulary.is_end(t)]
                for i, token in enumerate(tokens):
                    text += stream.feed(token)
                    if stream.stopped:
                        statistics.predicted_n -= len(event.tokens) - i - 1
                        tokens = tokens[: i + 1]
                        break
                said += tokens
                n_accepted, logprobs = min(event.n_accepted, len(tokens)), event.logprobs[: len(tokens)]
                yield Text(text, tokens, event.proposal, n_accepted, logprobs)
                if stream.stopped:
                    self._remember(before, said)
                    yield Done("", "stop", statistics, stream.stopping_word)
                    break

    def _remember(self, before: Sequence[int], said: Sequence[int]) -> None:
        if self.datastore:
            self.datastore.add_answer(said, before)

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
