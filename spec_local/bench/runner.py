"""Runs of the same prompts that take turns, and what each prompt brought to light.

Other programs disturb a measurement for seconds at a time, so that one run says little. Variant take turns (A B A B),
the order changes from prompt to prompt, and every run reads its prompt anew.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_local.bench import theory
from spec_local.bench.prompts import Prompt
from spec_local.bench.variants import PLAIN, Variant
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.core.language_model import LanguageModel, Logits, common_prefix, prefill
from spec_local.engine.events import FinishReason, Statistics
from spec_local.llama.model import Model
from spec_local.lookups import Lookup, Recycling
from spec_local.session import Done, Session, Text
from spec_local.settings import MAX_DRAFT

_WARM_UP = 16  # tokens


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model reads it."""

    prompt: Prompt
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. number: 1, 2, … of this prompt and variant. tokens: without the one that ends the answer."""

    prompt: Prompt
    variant: str
    number: int
    tokens: Sequence[int]
    text: str
    reason: FinishReason
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer is another than the plain one.

    Args:
        run: the first run where it is.
        at: tokens that both said before.
        gap: how far, in logits, the less probable of the two tokens is below main's best; llama.cpp's rounding
            explains small ones at temperature 0. Where one of the answers ended: main's best against its second.
    """

    run: int
    at: int
    gap: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All runs of one prompt, by variant, and what they show of each variant but plain.

    differences: None where all texts are plain's. theory: the best speed-up of any length of chains on the
    first plain answer; variants that guess trees have none, and neither have empty answers.
    """

    prompt: Prompt
    runs: Mapping[str, Sequence[Run]]
    differences: Mapping[str, Difference | None]
    theory: Mapping[str, float]


def tokenize(model: Model, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
    """The prompts in the model's chat template, or as they are where it has none."""
    template = ChatTemplate(model) if model.chat_template else None
    return [
        TokenizedPrompt(
            prompt,
            Conversation(model, template).ask(prompt.text)
            if template
            else model.vocabulary.tokenize(prompt.text, add_special=True),
        )
        for prompt in prompts
    ]


def measure(
    session: Session,
    prompts: Sequence[TokenizedPrompt],
    variants: Sequence[Variant],
    *,
    runs: int = 1,
    delay: float = 0.0,
    cancelled: Callable[[], bool] = lambda: False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Run | Outcome]:
    """Run every prompt in every variant, after a warm-up that does not count; a session with a store stops learning.

    Args:
        variants: plain first; each with a seed, to which the number of the run is added, and a limit of tokens.
        runs: of each prompt and variant.
        delay: seconds of rest before each run, for machines that grow hot.
        cancelled: asked between calls of a model; ends the benchmark there.
        on_progress: told, as it goes, what share of a run has been done since it was last told.

    Yields:
        each `Run` as it ends, and an `Outcome` after the last one of its prompt.

    Raises:
        SpecLocalError: as of `Session.generate`.
    """
    if session.datastore:
        session.datastore.learning = False  # a variant would copy what another has just said
    for variant in variants:
        _run(session, prompts[0], _shortened(variant), 0, cancelled, lambda share: None)
    for i, question in enumerate(prompts):
        turn = i % len(variants)
        done: dict[str, list[Run]] = {variant.name: [] for variant in variants}
        for number in range(1, runs + 1):
            for variant in [*variants[turn:], *variants[:turn]]:
                _rest(delay, cancelled)
                run = _run(session, question, variant, number, cancelled, on_progress)
                if run.reason == "cancelled":
                    return
                done[variant.name].append(run)
                yield run
        yield _outcome(session, question, variants, done)


def _shortened(variant: Variant) -> Variant:
    limit = variant.settings.max_tokens
    tokens = _WARM_UP if limit is None else min(limit, _WARM_UP)
    return Variant(variant.name, replace(variant.settings, max_tokens=tokens))


def _rest(seconds: float, cancelled: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not cancelled():
        time.sleep(min(left, 0.1))


def _run(
    session: Session,
    question: TokenizedPrompt,
    variant: Variant,
    number: int,
    cancelled: Callable[[], bool],
    on_progress: Callable[[float], None],
) -> Run:
    for context in (session.main, session.draft):
        if context:
            context.truncate(0)  # the time to the first token is that of a prompt read whole
    settings = replace(variant.settings, seed=(variant.settings.seed or 0) + number)
    limit = settings.max_tokens or session.main.n_ctx
    text, tokens = "", list[int]()
    for event in session.generate(question.tokens, settings, cancelled=cancelled):
        if isinstance(event, (Text, Done)):
            text += event.text
        if isinstance(event, Text):
            tokens += event.tokens
            on_progress(len(event.tokens) / limit)
    assert isinstance(event, Done)
    on_progress(1 - len(tokens) / limit)
    return Run(question.prompt, variant.name, number, tokens, text, event.reason, event.statistics)


def _outcome(
    session: Session,
    question: TokenizedPrompt,
    variants: Sequence[Variant],
    runs: Mapping[str, Sequence[Run]],
) -> Outcome:
    differences = {
        variant.name: _difference(session.main, question.tokens, runs[PLAIN], runs[variant.name])
        for variant in variants[1:]
    }
    return Outcome(
        question.prompt, runs, differences, _theory(session, question, variants[1:], runs[PLAIN][0].tokens)
    )


def _difference(
    main: LanguageModel, prompt: Sequence[int], plain: Sequence[Run], other: Sequence[Run]
) -> Difference | None:
    for ours, theirs in zip(plain, other, strict=True):
        if list(ours.tokens) != list(theirs.tokens):
            at = common_prefix(list(ours.tokens), list(theirs.tokens))
            said = [run.tokens[at] for run in (ours, theirs) if at < len(run.tokens)]
            return Difference(ours.number, at, _gap(_next_logits(main, [*prompt, *ours.tokens[:at]]), said))
    return None


def _next_logits(main: LanguageModel, text: Sequence[int]) -> Logits:
    for _ in prefill(main, text[:-1]):
        pass
    logits: Logits = main.evaluate(text[-1:], 1)[0]
    return logits


def _gap(logits: Logits, said: Sequence[int]) -> float:
    second, best = np.partition(logits, -2)[-2:]
    return float(best - (logits[list(said)].min() if len(said) == 2 else second))


def _theory(
    session: Session, question: TokenizedPrompt, variants: Sequence[Variant], answer: Sequence[int]
) -> dict[str, float]:
    if not answer:
        return {}
    lookups: dict[str, Lookup] = {}
    sources: dict[str, list[str]] = {}
    for variant in variants:
        if variant.settings.shape == "chain":
            # Recycling is left out: what main thought on its variant is gone.
            found = {
                lookup.name: lookup
                for lookup in session.lookups(variant.settings)
                if not isinstance(lookup, Recycling)
            }
            drafts = [name for name in session.proposers(variant.settings) if name == "draft"]
            sources[variant.name] = [*found, *drafts]
            lookups |= found
    main_costs, draft_costs = session.costs()
    lengths: dict[str, list[int]] = {}
    for name, lookup in lookups.items():
        lengths[name] = theory.lookup_run_lengths(lookup, question.tokens, answer, MAX_DRAFT)
    if session.guesser and any("draft" in each for each in sources.values()):
        lengths["draft"] = theory.draft_run_lengths(
            session.guesser, question.tokens, answer, session.main.n_vocab
        )
    steps = dict.fromkeys(lookups, 0.0) | {"draft": draft_costs.seconds(1) if draft_costs else 0.0}
    n = len(answer)
    return {
        name: n
        * main_costs.seconds(1)
        / theory.best_seconds({s: lengths[s] for s in each}, main_costs.seconds, steps, n, MAX_DRAFT)
        for name, each in sources.items()
    }
