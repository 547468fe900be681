"""The results of a benchmark of several answers at the same time, as Markdown, CSV and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from spec_local.bench import report
from spec_local.bench.conclusions import conclusion, disturbance
from spec_local.bench.figures import Estimate, geometric_mean
from spec_local.bench.layout import document, interval, table
from spec_local.bench.parallel import CategoryOutcome, CategoryRun, Key
from spec_local.bench.report import Measured, run_object
from spec_local.bench.variants import PLAIN
from spec_local.engine.events import Statistics
from spec_local.text import counted


@dataclass(frozen=True, slots=True)
class ParallelFigures:
    """One variant with one number of answers at the same time, over all categories.

    Args:
        tokens_per_second: tokens of all answers over the whole time, which includes reading the prompts.
        speedup: its ratio to plain decoding of as many answers: the geometric mean over categories.
        by_category: the same ratio for each category.
        seconds_per_token: of a single answer after its prompt; median over answers.
        first_token_s: from the start of an answer; median over answers.
        tokens_per_step: of a single answer.
        draft_n, draft_n_accepted: sums.
        system_efficiency: as `Statistics.system_efficiency`, over all batches.
        n_different: answers that differ from those of plain decoding.
    """

    variant: str
    n_parallel: int
    tokens_per_second: float
    speedup: Estimate
    by_category: Mapping[str, float]
    seconds_per_token: float
    first_token_s: float
    tokens_per_step: float
    draft_n: int
    draft_n_accepted: int
    system_efficiency: float
    n_different: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelResults(Measured):
    """All results of the benchmark.

    Args:
        rows: numbers of answers at the same time.
        outcomes: of the finished categories, at least one.
        n_categories: number of categories, finished or not.
        runs: runs of each category, variant and number of answers.
    """

    rows: Sequence[int]
    outcomes: Sequence[CategoryOutcome]
    n_categories: int
    runs: int

    @property
    def interrupted(self) -> bool:
        return len(self.outcomes) < self.n_categories

    def figures(self) -> list[ParallelFigures]:
        """The figures of every number of answers and every variant, plain first."""
        return [_summarise(self.outcomes, (variant.name, n)) for n in self.rows for variant in self.variants]


def _summarise(outcomes: Sequence[CategoryOutcome], key: Key) -> ParallelFigures:
    variant, n_parallel = key
    batches = [batch for outcome in outcomes for batch in outcome.batches[key]]
    statistics = [run.statistics for batch in batches for run in batch.runs]
    by_category = {outcome.category: _speedup(outcome, key) for outcome in outcomes}
    n_steps = sum(each.n_steps for each in statistics)
    n_tokens = sum(each.predicted_n for each in statistics)
    total = sum((batch.statistics for batch in batches), Statistics())
    return ParallelFigures(
        variant=variant,
        n_parallel=n_parallel,
        tokens_per_second=n_tokens / sum(batch.seconds for batch in batches),
        speedup=geometric_mean(list(by_category.values())),
        by_category=by_category,
        seconds_per_token=median(s.predicted_s / s.predicted_n for s in statistics),
        first_token_s=median(s.first_token_s for s in statistics),
        tokens_per_step=n_tokens / n_steps,
        draft_n=total.draft_n,
        draft_n_accepted=total.draft_n_accepted,
        system_efficiency=total.system_efficiency,
        n_different=sum(len(outcome.differences.get(key, ())) for outcome in outcomes),
    )


def _rate(outcome: CategoryOutcome, key: Key) -> float:
    """Tokens per second of all answers; the median over the runs."""
    return median(batch.tokens_per_second for batch in outcome.batches[key])


def _speedup(outcome: CategoryOutcome, key: Key) -> float:
    """Speed-up over plain decoding of as many answers."""
    return _rate(outcome, key) / _rate(outcome, (PLAIN, key[1]))


def markdown(results: ParallelResults, *, width: int | None = None) -> str:
    """Format the report as Markdown; width: of the terminal that shows it."""
    figures = results.figures()
    speculative = [each for each in figures if each.variant != PLAIN]
    names = [variant.name for variant in results.variants]
    parts = ["# specdec bench: answers at the same time"]
    if results.interrupted:
        categories = counted(results.n_categories, "category", "categories")
        parts.append(f"**interrupted: {len(results.outcomes)} of {categories}**")
    prompts = [
        run.prompt for outcome in results.outcomes for run in outcome.batches[PLAIN, results.rows[0]][0].runs
    ]
    parts.append(table(["", "value"], report.conditions(results, prompts, results.runs), width))
    parts.append("## Tokens per second of all answers")
    rates = {(each.variant, each.n_parallel): f"{each.tokens_per_second:.1f}" for each in figures}
    numbers = [[str(n), *(rates[name, n] for name in names)] for n in results.rows]
    parts.append(table(["answers at the same time", *names], numbers, width))
    parts.append("The whole time counts, with that of reading the prompts.")
    for name in names[1:]:
        parts.append(f"## {name.capitalize()}: speed-up over plain decoding of as many answers")
        parts.append(_speedups([each for each in speculative if each.variant == name], width))
    parts.append("Geometric means over categories, with 95 % bootstrap intervals.")
    parts.append("## Each answer")
    head = ["variant", "answers at the same time", "time per token", "first token", "tokens/step"]
    parts.append(table([*head, "accepted", "efficiency"], [_answer(each) for each in figures], width))
    parts.append("## Output compared with plain decoding of as many answers")
    n_answers = len(prompts)
    parts += [
        f"{_named(each)}: identical for {n_answers - each.n_different} of "
        f"{counted(n_answers, 'prompt')}{_gap(results.outcomes, each)}."
        for each in speculative
    ]
    parts.append("## Conclusion")
    if noise := disturbance(None, results.other_programs):
        parts.append(noise)
    parts += [f"{_named(each)}: {conclusion(each.speedup, 'category', 'categories')}" for each in speculative]
    return document(parts, width)


def _named(each: ParallelFigures) -> str:
    return f"{each.variant}, {each.n_parallel} at the same time"


def _speedups(figures: Sequence[ParallelFigures], width: int | None) -> str:
    rows = [
        [category, *(f"{each.by_category[category]:.2f}" for each in figures)]
        for category in figures[0].by_category
    ]
    rows.append(["**all**", *(interval(each.speedup) for each in figures)])
    return table(["category", *(f"{each.n_parallel} at the same time" for each in figures)], rows, width)


def _answer(each: ParallelFigures) -> list[str]:
    accepted = f"{each.draft_n_accepted / each.draft_n:.0%} of {each.draft_n}" if each.draft_n else ""
    return [
        each.variant,
        str(each.n_parallel),
        f"{each.seconds_per_token * 1000:.1f} ms",
        f"{each.first_token_s:.2f} s",
        f"{each.tokens_per_step:.2f}",
        accepted,
        f"{each.system_efficiency:.0%}",
    ]


def _gap(outcomes: Sequence[CategoryOutcome], each: ParallelFigures) -> str:
    key = each.variant, each.n_parallel
    gaps = [d.gap for outcome in outcomes for _, d in outcome.differences[key]]
    if not gaps:
        return ""
    return f"; the others differ where the logits of the main model are at most {max(gaps):.3g} apart"


def csv_rows(results: ParallelResults) -> str:
    """Format as CSV: one row for each category, variant and number of answers, with medians over its runs."""
    head = ["category", "variant", "parallel", "runs", "answers", "tokens", "tokens_per_second", "speedup"]
    head += ["seconds_per_token", "first_token_s", "drafted", "accepted", "different"]
    return report.csv_text(head, [_csv_row(o, key) for o in results.outcomes for key in o.batches])


def _csv_row(outcome: CategoryOutcome, key: Key) -> list[object]:
    batches = outcome.batches[key]
    answers = [run.statistics for batch in batches for run in batch.runs]
    return [
        outcome.category,
        *key,
        len(batches),
        len(batches[0].runs),
        median(batch.statistics.predicted_n for batch in batches),
        _rate(outcome, key),
        _speedup(outcome, key),
        median(each.predicted_s / each.predicted_n for each in answers),
        median(each.first_token_s for each in answers),
        median(batch.statistics.draft_n for batch in batches),
        median(batch.statistics.draft_n_accepted for batch in batches),
        len(outcome.differences.get(key, ())),
    ]


def as_json(results: ParallelResults) -> str:
    """Format as JSON: one object with everything, including the outputs."""
    categories = [
        _outcome_object(outcome)
        | {"batches": [_batch_object(b) for batches in outcome.batches.values() for b in batches]}
        for outcome in results.outcomes
    ]
    return report.json_text(results, **summary_object(results), categories=categories)


def line(event: CategoryRun | CategoryOutcome) -> tuple[str, dict[str, Any]]:
    """An event as a line of JSON Lines: its type and contents."""
    if isinstance(event, CategoryRun):
        return "batch", _batch_object(event)
    return "category", _outcome_object(event)


def summary_object(results: ParallelResults) -> dict[str, Any]:
    """The figures of all variants and numbers of answers."""
    return {
        "interrupted": results.interrupted,
        "categories_done": len(results.outcomes),
        "categories_wanted": results.n_categories,
        "peak_memory_bytes": results.peak_memory,
        "other_programs_cores": results.other_programs,
        "noisy": bool(disturbance(None, results.other_programs)),
        "parallel": list(results.rows),
        "figures": [_figures_object(each) for each in results.figures()],
    }


def _figures_object(figures: ParallelFigures) -> dict[str, Any]:
    found = asdict(figures)
    return {"variant": found.pop("variant"), "parallel": found.pop("n_parallel")} | found


def _batch_object(batch: CategoryRun) -> dict[str, Any]:
    return {
        "category": batch.category,
        "variant": batch.variant,
        "parallel": batch.n_parallel,
        "run": batch.number,
        "seconds": batch.seconds,
        "tokens_per_second": batch.tokens_per_second,
        "statistics": report.statistics_object(batch.statistics),
        "answers": [run_object(run) for run in batch.runs],
    }


def _outcome_object(outcome: CategoryOutcome) -> dict[str, Any]:
    return {
        "category": outcome.category,
        "speedup": [
            {"variant": key[0], "parallel": key[1], "speedup": _speedup(outcome, key)}
            for key in outcome.batches
            if key[0] != PLAIN
        ],
        "differences": [
            {"variant": key[0], "parallel": key[1], "name": prompt.name} | asdict(difference)
            for key, found in outcome.differences.items()
            for prompt, difference in found
        ],
    }
