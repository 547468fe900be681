"""A main model, a way to guess, and their caches: what a program that writes text holds on to.

with Session.open("main.gguf", "draft.gguf") as session:
    for event in session.generate("Once upon a time"):
        print(event.text, end="")
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from spec_local.costs import CostTable, measure
from spec_local.decoding import Event, Finished, FinishReason, Prefilled, Statistics, decode
from spec_local.dice import SeededDice
from spec_local.errors import InvalidRequest, ModelError
from spec_local.language_model import common_prefix
from spec_local.llama.context import Context
from spec_local.llama.model import Model
from spec_local.llama.probe import check_model_file
from spec_local.planning import plan, plan_chain
from spec_local.proposal import Proposal
from spec_local.proposers import Beam, BestFirst, Chain, DraftModel, Drawn, PromptLookup, Proposer, Shape
from spec_local.sampling import Sampler, SamplingSettings
from spec_local.text import TextStream
from spec_local.verifiers import VERIFIERS
from spec_local.vocabulary import check_same

ShapeName = Literal["chain", "tree", "beam", "auto"]
SHAPES: tuple[ShapeName, ...] = ("chain", "tree", "beam", "auto")
ProposerName = Literal["auto", "draft", "lookup", "none"]
PROPOSERS: tuple[ProposerName, ...] = ("auto", "draft", "lookup", "none")
MAX_DRAFT = 64
"""Most tokens that may be guessed a step: main's context reserves one row of logits for each."""
CHAIN_VERIFIERS = [name for name, verifier in VERIFIERS.items() if verifier.drawing == "one"]
_USUAL_CONTEXT = 4096
_USUAL_ACCEPTANCE = (0.65, 0.12, 0.05, 0.03)
"""How often main goes to the most probable guess of a good draft, to the second, …: what ``auto`` plans with."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What a program or a person chooses for one answer.

    Args:
        sampling: shapes main's and the draft's distributions alike.
        seed: repeats an answer; None: a new one each time.
        max_tokens: most tokens to say; None: until the model ends its answer or the context is full.
        stops: strings that end the answer and are not part of it.
        proposer: ``draft`` (the draft model), ``lookup`` (prompt lookup), ``none``; ``auto`` takes the draft
            model where there is one, else lookup.
        draft_max: most tokens to guess a step, one after the other.
        shape: what a draft model guesses: a ``chain``, a ``tree`` or ``beam`` search; ``auto``: see `Session.planned`.
        tree_nodes: most guesses of a tree or of beams a step.
        beam_width: how many beams.
        verifier: a name of `spec_local.verifiers.VERIFIERS`, all of them exact; ``auto`` takes the one that
            accepts most: ``block`` for a chain, ``membership`` for beams and at temperature 0, ``traversal`` for a tree.
        greedy_draft: guess the draft's most probable token instead of drawing from it.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    seed: int | None = None
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    proposer: ProposerName = "auto"
    draft_max: int = 4
    shape: ShapeName = "chain"
    tree_nodes: int = 16
    beam_width: int = 4
    verifier: str = "auto"
    greedy_draft: bool = False

    def __post_init__(self) -> None:
        if self.proposer not in PROPOSERS:
            raise InvalidRequest(f"proposer {self.proposer!r} is unknown: give {', '.join(PROPOSERS)}")
        if self.shape not in SHAPES:
            raise InvalidRequest(f"shape {self.shape!r} is unknown: give {', '.join(SHAPES)}")
        if self.verifier != "auto" and self.verifier not in VERIFIERS:
            raise InvalidRequest(f"verifier {self.verifier!r} is unknown: give auto, {', '.join(VERIFIERS)}")
        if self.shape == "tree" and self.verifier in CHAIN_VERIFIERS:
            raise InvalidRequest(
                f"verifier {self.verifier} judges chains only: give auto or traversal for a tree"
            )
        for name, value, low in [
            ("draft-max", self.draft_max, 0),
            ("tree-nodes", self.tree_nodes, 1),
            ("beam-width", self.beam_width, 1),
        ]:
            if not low <= value <= MAX_DRAFT:
                raise InvalidRequest(f"{name} is {value}: give {low} to {MAX_DRAFT}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max-tokens is {self.max_tokens}: give 0 or more")
        if self.seed is not None and self.seed < 0:
            raise InvalidRequest(f"seed is {self.seed}: give 0 or more")


@dataclass(frozen=True, slots=True)
class Text:
    """Text that has become certain with one step, or with the end; may be empty.

    tokens: said in this step, without the one that ends the answer. proposal: what had been guessed.
    n_accepted: the first so many of the tokens had been.
    """

    text: str
    tokens: Sequence[int] = ()
    proposal: Proposal = field(default_factory=Proposal)
    n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The last event. `text` is what was still held back."""

    text: str
    reason: FinishReason
    statistics: Statistics


class Session:
    """Models and caches of one conversation at a time.

    Close it (or use it in a ``with``) to free the models' memory.
    """

    def __init__(self, main: Context, draft: Context | None = None) -> None:
        if draft:
            check_same(main.model.vocabulary, draft.model.vocabulary)
            for role, context in (("main", main), ("draft", draft)):
                if not context.model.can_roll_back:
                    raise ModelError(
                        f"{role} is a recurrent model and cannot take guesses back: use it alone (--no-spec)"
                    )
        self.main = main
        self.draft = draft
        self._costs: tuple[CostTable, CostTable] | None = None
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
        notice: Callable[[str], None] = lambda line: None,
    ) -> "Session":
        """Load a main model, and a draft if one is given.

        Args:
            main, draft: GGUF files; a file that this machine has not loaded before is tried in a
                child process first.
            n_ctx: tokens of the context, at most what the model was trained for; None: that, up to 4096.
            branches: how many guesses the models may read side by side; the draft reads more of them than it
                proposes, so give several times the nodes of a tree, such as 64. 1: chains only, which takes
                the least memory.
            notice: told, in a line, what takes time and what was decided.

        Raises:
            SpecLocalError: one of its kinds; whatever was loaded has been freed.
        """
        with ExitStack() as stack:
            contexts: list[Context] = []
            for path in [main, draft] if draft else [main]:
                check_model_file(Path(path), gpu_layers=gpu_layers, notice=notice)
                model = Model(path, gpu_layers=gpu_layers)
                stack.callback(model.close)
                wanted = _USUAL_CONTEXT if n_ctx is None else n_ctx
                length = min(wanted, model.n_ctx_train or wanted)
                context = Context(
                    model,
                    n_ctx=length,
                    # A row of logits takes memory: a draft needs as many as it reads side by side.
                    max_logits=branches if contexts else MAX_DRAFT + 1,
                    max_branches=branches,
                    threads=threads,
                    cache_type=cache_type,
                )
                stack.callback(context.close)
                contexts.append(context)
            session = cls(*contexts)
            if n_ctx is not None and contexts[0].n_ctx < n_ctx:
                notice(f"context: {contexts[0].n_ctx} tokens, which is what the model was trained for")
            session._resources = stack.pop_all()
            return session

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        settings: GenerationSettings = GenerationSettings(),
        *,
        cancelled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Iterator[Prefilled | Text | Done]:
        """Continue a prompt, a text or tokens, with exactly main's distribution.

        Yields:
            `Prefilled`, `Text` per step, and `Done`. Closing the iterator early is fine.

        Raises:
            see `spec_local.decoding.decode`.
        """
        vocabulary = self.main.model.vocabulary
        tokens = vocabulary.tokenize(prompt, add_special=True) if isinstance(prompt, str) else prompt
        unknown = [t for t in settings.sampling.logit_bias if not 0 <= t < vocabulary.n_tokens]
        if unknown:
            raise InvalidRequest(f"logit bias names token {unknown[0]}: give 0 to {vocabulary.n_tokens - 1}")
        cached = self.main.cached
        if not self.main.model.can_roll_back and common_prefix(cached, list(tokens[:-1])) < len(cached):
            self.main.trim(0)  # another text: a recurrent model can forget all, and no less
        automatic = settings.shape == "auto"
        settings = self.planned(settings)
        sampler = Sampler(settings.sampling)
        events = decode(
            self.main,
            tokens,
            sampler=sampler,
            dice=SeededDice(settings.seed),
            proposer=self._proposer(settings, sampler, self._costs if automatic else None),
            verifier=VERIFIERS[self._verifier_name(settings)],
            draft_max=settings.draft_max,
            max_tokens=settings.max_tokens,
            is_end=vocabulary.is_end,
            cancelled=cancelled,
            clock=clock,
        )
        return self._texts(events, settings.stops)

    def proposer_name(self, settings: GenerationSettings) -> ProposerName:
        """Who guesses: what the settings say, and what ``auto`` means with these models."""
        if settings.proposer != "auto":
            return settings.proposer
        return "draft" if self.draft else "lookup" if self.main.model.can_roll_back else "none"

    def planned(self, settings: GenerationSettings) -> GenerationSettings:
        """What shape ``auto`` means on this machine: a tree, a chain, or no guesses, whichever is the fastest.

        The first time, both models are measured, which takes a few seconds.
        """
        if settings.shape != "auto":
            return settings
        if self.proposer_name(settings) != "draft" or not self.draft or not settings.draft_max:
            return replace(settings, shape="chain")
        if not self._costs:
            self._costs = measure(self.main, rounds=2), measure(self.draft, rounds=2)
        chains_only = settings.verifier in CHAIN_VERIFIERS or settings.greedy_draft or self._branches < 2
        best = (plan_chain if chains_only else plan)(
            _USUAL_ACCEPTANCE, *self._costs, settings.tree_nodes, settings.draft_max
        )
        if not best.parents:
            return replace(settings, shape="chain", proposer="none")
        shape: ShapeName = "chain" if best.is_chain else "tree"
        return replace(settings, shape=shape, draft_max=best.depth, tree_nodes=len(best.parents))

    @property
    def _branches(self) -> int:
        """Most guesses side by side that both models can read."""
        return min(context.max_branches for context in (self.main, self.draft) if context)

    def _texts(self, events: Iterator[Event], stops: Sequence[str]) -> Iterator[Prefilled | Text | Done]:
        vocabulary = self.main.model.vocabulary
        stream = TextStream(vocabulary.piece, stops)
        statistics = Statistics()
        for event in events:
            if isinstance(event, Prefilled):
                statistics = event.statistics
                yield event
            elif isinstance(event, Finished):
                yield Done(stream.finish(), event.reason, event.statistics)
            else:
                text, tokens = "", [t for t in event.tokens if not vocabulary.is_end(t)]
                for i, token in enumerate(tokens):
                    text += stream.feed(token)
                    if stream.stopped:
                        statistics.predicted_n -= len(event.tokens) - i - 1
                        tokens = tokens[: i + 1]
                        break
                yield Text(text, tokens, event.proposal, min(event.n_accepted, len(tokens)))
                if stream.stopped:
                    yield Done("", "stop", statistics)
                    break

    def _proposer(
        self, settings: GenerationSettings, sampler: Sampler, costs: tuple[CostTable, CostTable] | None
    ) -> Proposer | None:
        name = self.proposer_name(settings)
        if name == "none":
            return None
        if not self.main.model.can_roll_back:
            raise ModelError("main is a recurrent model and cannot take guesses back: use --no-spec")
        if name == "lookup":
            return PromptLookup()
        if not self.draft:
            raise InvalidRequest("the draft proposer needs a draft model: give --draft FILE")
        if settings.shape in ("tree", "beam") and self._branches < 2 <= settings.tree_nodes:
            raise InvalidRequest("the session was opened for chains: open it with branches=64")
        vocabulary = self.main.model.vocabulary
        return DraftModel(
            self.draft,
            sampler,
            self._shape(settings, costs),
            n_vocab=vocabulary.n_tokens,
            is_end=vocabulary.is_end,
        )

    def _shape(self, settings: GenerationSettings, costs: tuple[CostTable, CostTable] | None) -> Shape:
        if settings.shape == "beam":
            return Beam(settings.beam_width, settings.tree_nodes)
        if settings.shape == "tree":
            drawing = VERIFIERS[self._verifier_name(settings)].drawing
            if drawing == "chosen":
                return BestFirst(settings.tree_nodes, costs=costs)
            return Drawn(drawing, settings.tree_nodes)
        return Chain(settings.greedy_draft)

    def _verifier_name(self, settings: GenerationSettings) -> str:
        """The rule that judges, and what ``auto`` means.

        A tree at temperature 0 is judged by membership, which takes the most probable nodes of all.
        """
        if settings.verifier != "auto":
            return settings.verifier
        if settings.shape == "beam" or settings.sampling.temperature == 0:
            return "membership"
        return "traversal" if settings.shape == "tree" else "block"
