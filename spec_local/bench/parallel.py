"""Interleaved runs with several answers at the same time: the total speed, and that of each answer.

The prompts of a category are answered with one, two, … at the same time; as soon as an answer ends, the next
prompt begins. As in `spec_local.bench.runner`, the variants alternate.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Difference, Run, TokenizedPrompt, first_difference, pause, warming_up
from spec_local.bench.variants import PLAIN, Variant
from spec_local.engine.events import Failed, Statistics
from spec_local.errors import InvalidRequest
from spec_local.llama.context import MAX_SEQUENCES
from spec_local.session import Done, Session, Text

Key = tuple[str, int]
"""The name of a variant, and a number of answers at the same time."""


@dataclass(frozen=True, slots=True)
class CategoryRun:
    """The answers to all prompts of a category.

    Args:
        n_parallel: maximum number of answers at the same time.
        number: 1, 2, … for this category, variant and number of rows.
        seconds: from the first prompt to the end of the last answer.
        statistics: counts of all answers, and the times of the calls that they share.
        runs: of the prompts, in their order.
    """

    category: str
    variant: str
    n_parallel: int
    number: int
    seconds: float
    statistics: Statistics
    runs: Sequence[Run]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers over the whole time, which includes reading the prompts."""
        return self.statistics.predicted_n / self.seconds


@dataclass(frozen=True, slots=True)
class CategoryOutcome:
    """All batches of one category.

    differences: prompts whose answer differs from that of plain decoding with as many answers at the same
    time.
    """

    category: str
    batches: Mapping[Key, Sequence[CategoryRun]]
    differences: Mapping[Key, Sequence[tuple[Prompt, Difference]]]


def parse_rows(text: str) -> list[int]:
    """Parse ``1,2,4,8``: distinct numbers of answers at the same time, in ascending order.

    Raises:
        InvalidRequest: a part is no number, or out of range.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InvalidRequest(f"parallel is {text!r}: give numbers, for example 1,2,4,8") from None
    for n in found:
        if not 1 <= n <= MAX_SEQUENCES:
            raise InvalidRequest(f"parallel is {n}: give 1 to {MAX_SEQUENCES}")
    return found


def check_prompts(prompts: Sequence[Prompt], rows: Sequence[int]) -> None:
    """Check that each category has enough prompts.

    A prompt that is answered twice would share what is drafted, and its cache: the result would be too good.

    Raises:
        InvalidRequest: a category has fewer prompts than answers at the same time.
    """
    for category, n in _sizes(prompts).items():
        if n < max(rows):
            raise InvalidRequest(
                f"category {category!r} has too few prompts ({n}) for {max(rows)} answers at the same time: "
                f"give `parallel` up to {n}, or more prompts"
            )


def _sizes(prompts: Sequence[Prompt]) -> dict[str, int]:
    categories = [prompt.category for prompt in prompts]
    return {category: categories.count(category) for category in dict.fromkeys(categories)}


def measure(
    session: Session,
    prompts: Sequence[TokenizedPrompt],
    variants: Sequence[Variant],
    rows: Sequence[int],
    *,
    runs: int = 1,
    delay: float = 0.0,
    cancelled: Callable[[], bool] = lambda: False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Iterator[CategoryRun | CategoryOutcome]:
    """Answer the prompts of every category in every variant with each number of answers at the same time.

    Args:
        session: with at least as many rows as the largest number; nothing is added to its datastore.
        variants: plain first; each has a token limit, and a seed to which the number of the run and the
            number of the prompt are added.
        rows: numbers of answers at the same time.
        runs: runs of each category, variant and number.
        delay: seconds of pause before each run, for machines that overheat.
        cancelled: checked between calls of a model; True ends the benchmark.
        on_progress: receives the share of an answer that was generated since the last call; each answer adds
            up to 1.

    Yields:
        each `CategoryRun` when it ends, and a `CategoryOutcome` after the last one of its category.

    Raises:
        SpecLocalError: as `Session.generate_many`; the error of a single answer, too.
    """
    if session.datastore:
        session.datastore.read_only = True  # otherwise a variant would draft from the output of another one
    if session.answer_store:
        session.answer_store.read_only = True  # these are not the user's prompts
    for variant in variants:
        _batch(
            session, prompts[: max(rows)], warming_up(variant), max(rows), 0, cancelled, lambda share: None
        )
    for i, category in enumerate(_sizes([each.prompt for each in prompts])):
        chosen = [each for each in prompts if each.prompt.category == category]
        first = i % len(variants)
        found: dict[Key, list[CategoryRun]] = {(variant.name, n): [] for n in rows for variant in variants}
        for number in range(1, runs + 1):
            for n_parallel in rows:
                for variant in [*variants[first:], *variants[:first]]:
                    pause(delay, cancelled)
                    batch = _batch(session, chosen, variant, n_parallel, number, cancelled, on_progress)
                    if not batch:
                        return
                    found[variant.name, n_parallel].append(batch)
                    yield batch
        yield CategoryOutcome(category, found, _differences(session, chosen, found))


def _batch(
    session: Session,
    prompts: Sequence[TokenizedPrompt],
    variant: Variant,
    n_parallel: int,
    number: int,
    cancelled: Callable[[], bool],
    on_progress: Callable[[float], None],
) -> CategoryRun | None:
    """Answer prompts; None: cancelled."""
    for row in (session.main, session.draft):
        if row:
            row.truncate(0)  # the time includes the whole prompts
    seed = (variant.settings.seed or 0) + number
    settings = (replace(variant.settings, seed=seed + i) for i in count())
    limit = variant.settings.max_tokens or session.main.n_ctx
    texts, tokens = [""] * len(prompts), [list[int]() for _ in prompts]
    ends: dict[int, Done] = {}
    totals, started = Statistics(), time.perf_counter()
    events = session.generate_many(
        [prompt.tokens for prompt in prompts],
        settings,
        n_parallel=n_parallel,
        totals=totals,
        cancelled=lambda i: cancelled(),
    )
    with closing(events):
        for i, event in events:
            if isinstance(event, Text):
                texts[i] += event.text
                tokens[i] += event.tokens
                on_progress(len(event.tokens) / limit)
            elif isinstance(event, Done):
                if event.reason == "cancelled":
                    return None
                ends[i] = event
                on_progress(1 - len(tokens[i]) / limit)
            elif isinstance(event, Failed):
                raise event.error
    seconds = time.perf_counter() - started
    answers = [
        Run(prompt.prompt, variant.name, number, tokens[i], texts[i], ends[i].reason, ends[i].statistics)
        for i, prompt in enumerate(prompts)
    ]
    return CategoryRun(prompts[0].prompt.category, variant.name, n_parallel, number, seconds, totals, answers)


def _differences(
    session: Session, prompts: Sequence[TokenizedPrompt], found: Mapping[Key, Sequence[CategoryRun]]
) -> dict[Key, list[tuple[Prompt, Difference]]]:
    differences: dict[Key, list[tuple[Prompt, Difference]]] = {}
    for (variant, n_parallel), batches in found.items():
        if variant == PLAIN:
            continue
        differences[variant, n_parallel] = []
        for i, prompt in enumerate(prompts):
            plain, other = ([batch.runs[i] for batch in each] for each in (found[PLAIN, n_parallel], batches))
            if difference := first_difference(session.main, prompt.tokens, plain, other):
                differences[variant, n_parallel].append((prompt.prompt, difference))
    return differences
