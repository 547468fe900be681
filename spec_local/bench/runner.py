"""Interleaved runs of the same prompts, and the outcome of each prompt.

Other programs disturb a measurement for seconds at a time, so a single run means little. Therefore, the
variants alternate (A B A B), their order changes from prompt to prompt, and every run reads its prompt from
the start.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_local.bench import theory
from spec_local.bench.prompts import Prompt
from spec_local.bench.variants import PLAIN, Variant
from spec_local.chat.conversation import Conversation
from spec_local.chat.template import ChatTemplate
from spec_local.core.calls import Logits, run
from spec_local.core.language_model import LanguageModel, common_prefix, prefill
from spec_local.core.proposal import MAX_DRAFT
from spec_local.engine.events import FinishReason, Prefilled, Statistics
from spec_local.llama.heads.base import HeadRow
from spec_local.llama.model import Model
from spec_local.lookups.recycling import Recycling
from spec_local.session import Done, Session, Text

_WARM_UP = 16  # tokens
_CONTROL_EVERY = 4  # prompts, of which one has a control: an eighth of the time of two variants


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt and its tokens, with the chat template if the model has one.

    following: the next turn of the conversation, after the text and the tokens of an answer; None: there is
        none.
    """

    prompt: Prompt
    tokens: Sequence[int]
    following: "Callable[[str, Sequence[int]], TokenizedPrompt] | None" = None


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. number: 1, 2, … for this prompt and variant. tokens: without the end-of-answer token.

    steps: with their times, if they were recorded.
    """

    prompt: Prompt
    variant: str
    number: int
    tokens: Sequence[int]
    text: str
    reason: FinishReason
    statistics: Statistics
    steps: Sequence[theory.TimedStep] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between an output and that of plain decoding.

    Args:
        run: number of the first run that differs.
        at: number of tokens before the difference.
        gap: difference in logits between the most probable token and the less probable of the two tokens;
            if one output ends there, between the two most probable tokens. At temperature 0, small gaps
            are explained by llama.cpp's rounding.
    """

    run: int
    at: int
    gap: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All runs of one prompt, by variant.

    differences: by variant except plain; None: identical outputs. hindsight: each run, compared with the best
    draft lengths; missing for plain, for trees, heads and empty answers. control: a plain run that only shows
    how much equal runs differ, for some prompts.
    """

    prompt: Prompt
    runs: Mapping[str, Sequence[Run]]
    differences: Mapping[str, Difference | None]
    hindsight: Mapping[str, Sequence[theory.Hindsight]]
    control: Run | None = None


def tokenize(model: Model, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
    """Tokenize prompts, with the model's chat template if it has one."""
    template = ChatTemplate(model) if model.chat_template else None
    return [
        _asked(Conversation(model, template), prompt) if template else _joined(model, [], prompt)
        for prompt in prompts
    ]


def _asked(conversation: Conversation, whole: Prompt, n: int = 1) -> TokenizedPrompt:
    """The n-th turn of a prompt, after those in the conversation."""
    prompt = whole.turn(n)
    tokens = conversation.ask(prompt.text)

    def following(text: str, answer: Sequence[int]) -> TokenizedPrompt:
        then = conversation.following(conversation.messages)
        parts = then.splitter().finish(text)
        then.answer(parts.answer, answer, parts.reasoning)
        return _asked(then, whole, n + 1)

    return TokenizedPrompt(prompt, tokens, following if prompt.later else None)


def _joined(model: Model, before: Sequence[int], whole: Prompt, n: int = 1) -> TokenizedPrompt:
    """The same without a chat template: an empty line separates an answer from the next turn."""
    prompt = whole.turn(n)
    text = f"\n\n{prompt.text}" if before else prompt.text
    tokens = [*before, *model.vocabulary.tokenize(text, add_special=not before)]

    def following(text: str, answer: Sequence[int]) -> TokenizedPrompt:
        return _joined(model, [*tokens, *answer], whole, n + 1)

    return TokenizedPrompt(prompt, tokens, following if prompt.later else None)


def longest(prompt: TokenizedPrompt, n_answer: int) -> int:
    """The tokens of a whole conversation if each answer has `n_answer` tokens."""
    n_answers = prompt.prompt.n_turns
    while prompt.following:
        prompt = prompt.following("", [])
    return len(prompt.tokens) + n_answers * n_answer


def measure(
    session: Session,
    prompts: Sequence[TokenizedPrompt],
    variants: Sequence[Variant],
    *,
    runs: int = 1,
    earlier: Sequence[Outcome] = (),
    delay: float = 0.0,
    cancelled: Callable[[], bool] = lambda: False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Run | Outcome]:
    """Run every prompt in every variant, after a warm-up. Nothing is added to the session's datastore.

    Each turn of a conversation is a prompt of its own. All variants continue the first plain answer, so that
    they have the same prompt at any temperature.

    Args:
        variants: plain first; each has a token limit, and a seed to which the number of the run is added.
        runs: runs of each prompt and variant. If it is one, some prompts have a control, too: see `Outcome`.
        earlier: outcomes of the same prompts and variants, to which these runs are added; none: a new
            benchmark.
        delay: seconds of pause before each run, for machines that overheat.
        cancelled: checked between calls of a model; True ends the benchmark.
        on_progress: receives the share of a run that was done since the last call; each run adds up to 1.

    Yields:
        each `Run` when it ends, and an `Outcome` after the last run of its prompt.

    Raises:
        SpecLocalError: as `Session.generate`.
    """
    if session.datastore:
        session.datastore.read_only = True  # otherwise a variant would draft from the output of another one
    if session.answer_store:
        session.answer_store.read_only = True  # these are not the user's prompts
    for variant in [] if earlier else variants:
        _run(session, prompts[0], warming_up(variant), 0, cancelled, lambda share: None)
    prices = {variant.name: theory.Prices(*session.costs()) for variant in variants[1:]}
    turns = list(prompts)
    for i, prompt in enumerate(turns):
        first = i % len(variants)
        known = earlier[i].runs if earlier else {}
        finished = {variant.name: list(known.get(variant.name, ())) for variant in variants}
        n_known = len(finished[PLAIN])
        priced: dict[str, list[tuple[Run, theory.Prices]]] = {name: [] for name in prices}
        for number in range(n_known + 1, n_known + runs + 1):
            for variant in [*variants[first:], *variants[:first]]:
                pause(delay, cancelled)
                run = _run(session, prompt, variant, number, cancelled, on_progress)
                if run.reason == "cancelled":
                    return
                finished[variant.name].append(run)
                for name, each in prices.items():
                    if variant.name in (PLAIN, name):
                        each.observe(run.steps)
                if variant.name in prices:  # as they are now: later calls may be faster or slower
                    priced[variant.name].append((run, copy.deepcopy(prices[variant.name])))
                yield run
        control = earlier[i].control if earlier else None
        if runs == 1 and not earlier and i % _CONTROL_EVERY == 0:
            pause(delay, cancelled)
            control = _run(session, prompt, variants[0], n_known + runs, cancelled, lambda share: None)
            if control.reason == "cancelled":
                return
        found = _hindsight(session, prompt, variants[1:], priced)
        if earlier:
            found = {name: [*earlier[i].hindsight.get(name, ()), *each] for name, each in found.items()}
        yield _outcome(session, prompt, variants, finished, found, control)
        if prompt.following:
            answer = finished[PLAIN][0]
            turns.insert(i + 1, prompt.following(answer.text, answer.tokens))


def warming_up(variant: Variant) -> Variant:
    """A variant whose answers are short."""
    limit = variant.settings.max_tokens
    tokens = _WARM_UP if limit is None else min(limit, _WARM_UP)
    return Variant(variant.name, replace(variant.settings, max_tokens=tokens))


def pause(seconds: float, cancelled: Callable[[], bool]) -> None:
    """Wait, but not after `cancelled` returns True."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not cancelled():
        time.sleep(min(left, 0.1))


def _run(
    session: Session,
    prompt: TokenizedPrompt,
    variant: Variant,
    number: int,
    cancelled: Callable[[], bool],
    on_progress: Callable[[float], None],
) -> Run:
    for row in (session.main, session.draft):
        if row:
            row.truncate(0)  # the time to the first token includes the whole prompt
    settings = replace(variant.settings, seed=(variant.settings.seed or 0) + number)
    limit = settings.max_tokens or session.main.n_ctx
    text, tokens, steps = "", list[int](), list[theory.TimedStep]()
    live, n, seconds = Statistics(), 0, 0.0
    for event in session.generate(prompt.tokens, settings, cancelled=cancelled):
        if isinstance(event, Prefilled):
            live = event.statistics  # each step updates it
        elif isinstance(event, Text):
            text += event.text
            tokens += event.tokens
            if live.n_steps > len(steps):
                steps.append(
                    theory.TimedStep(live.predicted_n - n, live.predicted_s - seconds, live.last_calls)
                )
                n, seconds = live.predicted_n, live.predicted_s
            on_progress(len(event.tokens) / limit)
    assert isinstance(event, Done)
    on_progress(1 - len(tokens) / limit)
    return Run(prompt.prompt, variant.name, number, tokens, text, event.reason, event.statistics, steps)


def _outcome(
    session: Session,
    prompt: TokenizedPrompt,
    variants: Sequence[Variant],
    runs: Mapping[str, Sequence[Run]],
    hindsight: Mapping[str, Sequence[theory.Hindsight]],
    control: Run | None,
) -> Outcome:
    differences = {
        variant.name: first_difference(session.main, prompt.tokens, runs[PLAIN], runs[variant.name])
        for variant in variants[1:]
    }
    return Outcome(prompt.prompt, runs, differences, hindsight, control)


def first_difference(
    main: LanguageModel, prompt: Sequence[int], plain: Sequence[Run], other: Sequence[Run]
) -> Difference | None:
    """Compare the runs of a prompt in pairs; the first that differ are explained by the model's logits."""
    for ours, theirs in zip(plain, other, strict=True):
        if list(ours.tokens) != list(theirs.tokens):
            at = common_prefix(list(ours.tokens), list(theirs.tokens))
            tokens = [run.tokens[at] for run in (ours, theirs) if at < len(run.tokens)]
            return Difference(ours.number, at, _gap(_next_logits(main, [*prompt, *ours.tokens[:at]]), tokens))
    return None


def _next_logits(main: LanguageModel, history: Sequence[int]) -> Logits:
    run(prefill(main, history[:-1]))
    logits: Logits = main.evaluate(history[-1:], 1)[0]
    return logits


def _gap(logits: Logits, tokens: Sequence[int]) -> float:
    second, best = np.partition(logits, -2)[-2:]
    return float(best - (logits[list(tokens)].min() if len(tokens) == 2 else second))


def _hindsight(
    session: Session,
    prompt: TokenizedPrompt,
    variants: Sequence[Variant],
    priced: Mapping[str, Sequence[tuple[Run, theory.Prices]]],
) -> dict[str, list[theory.Hindsight]]:
    """Compare runs with the best draft lengths; priced: runs by variant, with the prices at their times."""
    found: dict[str, list[theory.Hindsight]] = {}
    drafted: dict[tuple[int, ...], list[int]] = {}  # run lengths of the draft model by answer
    for variant in variants:
        settings, answers = variant.settings, priced[variant.name]
        drafts = "draft" in session.proposers(settings)
        if settings.shape != "chain" or not all(answer.tokens for answer, _ in answers):
            continue
        if drafts and isinstance(session.draft, HeadRow):
            continue  # the hidden states that it needs are gone
        found[variant.name] = []
        for answer, prices in answers:
            lengths = {
                lookup.name: theory.lookup_run_lengths(lookup, prompt.tokens, answer.tokens, MAX_DRAFT)
                for lookup in session.lookups(settings)
                if not isinstance(lookup, Recycling)  # so are the logits that it needs
            }
            if drafts and session.drafter:
                if (key := tuple(answer.tokens)) not in drafted:
                    drafted[key] = theory.draft_run_lengths(
                        session.drafter, prompt.tokens, key, session.main.n_vocab
                    )
                lengths["draft"] = drafted[key]
            found[variant.name].append(theory.hindsight(answer.steps, lengths, prices))
    return found
