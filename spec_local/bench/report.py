"""The results of a benchmark as Markdown, CSV and JSON."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from spec_local.bench.conclusions import conclusion, disturbance, plain_spread
from spec_local.bench.figures import (
    VariantFigures,
    best_error,
    best_speedup,
    decode_rate,
    run_median,
    speedup,
    summarise,
)
from spec_local.bench.layout import bars, document, interval, table
from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Outcome, Run
from spec_local.bench.variants import PLAIN, Variant
from spec_local.engine.events import Statistics
from spec_local.system.files import format_size
from spec_local.text import counted, printable

_POSITIONS = 16  # positions of draft tokens shown in Markdown
_LEAST_SAVED = 0.0005  # share of a cause that is shown in Markdown
_NAMED = 5  # differing outputs listed in Markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Common fields of the results of every benchmark.

    Args:
        record: from `spec_local.bench.record.record`.
        variants: plain first.
        peak_memory: bytes.
        other_programs: number of cores that other programs used on average.
    """

    record: Mapping[str, Any]
    variants: Sequence[Variant]
    peak_memory: int
    other_programs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Measured):
    """All results of a benchmark.

    Args:
        outcomes: of the finished prompts, at least one.
        n_prompts: number of prompts, finished or not.
    """

    outcomes: Sequence[Outcome]
    n_prompts: int

    @property
    def interrupted(self) -> bool:
        return len(self.outcomes) < self.n_prompts

    @property
    def runs(self) -> int:
        """Runs of each prompt and variant; some prompts may have one more."""
        return min(len(outcome.runs[PLAIN]) for outcome in self.outcomes)

    def figures(self) -> list[VariantFigures]:
        """The figures of every variant, plain first."""
        return [summarise(self.outcomes, variant.name) for variant in self.variants]


def markdown(results: Results, *, width: int | None = None) -> str:
    """Format the report as Markdown; width: of the terminal that shows it, which also gets a bar chart."""
    plain, *others = figures = results.figures()
    parts = ["# specdec bench"]
    if results.interrupted:
        parts.append(f"**interrupted: {len(results.outcomes)} of {counted(results.n_prompts, 'prompt')}**")
    prompts = [outcome.prompt for outcome in results.outcomes]
    spread = plain_spread(results.outcomes)
    rows = conditions(results, prompts, results.runs)
    if spread is not None:
        rows.append(["equal runs", f"of plain decoding differ by {spread:.1%} from their median"])
    parts.append(table(["", "value"], rows, width))
    parts.append("## Speed-up over plain decoding (tokens/s after the prompt)")
    names = [variant.name for variant in others]
    rows = [
        [category, *(interval(variant.by_category[category]) for variant in others)]
        for category in plain.by_category
    ]
    rows += [
        ["**all**", *(interval(variant.speedup) for variant in others)],
        ["all, with prompt time", *(interval(variant.with_prompt) for variant in others)],
    ]
    parts.append(table(["category", *names], rows, width))
    if width and (chart := _bars(others, width)):
        parts.append(chart)
    parts.append("Geometric means over prompts, with 95 % bootstrap intervals.")
    parts.append("## Rates and time")
    head = [
        "variant",
        "tokens/s",
        "first token",
        "tokens/step",
        "accepted",
        "drafting",
        "main",
        "rest",
        "steps by",
    ]
    parts.append(table(head, [_rates(variant) for variant in figures], width))
    if saved := [_saved(variant) for variant in figures if variant.saved_s]:
        parts.append(table(["variant", "drafting saved", "by cause"], saved, width))
        parts.append("Shares of the time that plain decoding would have taken; negative: lost.")
    if positions := max(len(variant.tested_at) for variant in figures):
        parts.append("## Acceptance rate by position")
        shown = range(min(positions, _POSITIONS))
        rates = [[w.name, *(_at(w, i) for i in shown)] for w in others]
        parts.append(table(["variant", *(str(i + 1) for i in shown)], rates, width))
    if any(variant.theory for variant in others):
        parts.append("## Best possible speed-up with any draft length")
        best = [
            [w.name, f"{w.theory:.2f} ×", f"± {w.theory_error:.0%}", f"{w.achieved:.0%}"]
            for w in others
            if w.theory
        ]
        parts.append(table(["variant", "best", "error", "achieved"], best, width))
        parts.append(
            "In hindsight, from the times of each run's own calls. The error is how far the steps' times are "
            "from those assumed, on average."
        )
    parts.append("## Output compared with plain decoding")
    parts += [_difference(variant, len(results.outcomes)) for variant in others]
    parts.append("## Conclusion")
    if noise := disturbance(spread, results.other_programs):
        parts.append(noise)
    parts += [f"{variant.name}: {conclusion(variant.speedup)}" for variant in others]
    return document(parts, width)


def conditions(results: Measured, prompts: Sequence[Prompt], runs: int) -> list[list[str]]:
    """The rows of a table of what was measured, and on what machine."""
    record, settings = results.record, results.variants[0].settings
    rows = [
        [role, f"{m['file']} ({m['description']}), {format_size(m['bytes'])}, SHA-256 {m['sha256'][:12]}…"]
        for role, m in record["models"].items()
    ]
    n_categories = len({prompt.category for prompt in prompts})
    tokens = counted(settings.max_tokens or 0, "token")
    selection = f"{counted(len(prompts), 'prompt')} of {counted(n_categories, 'category', 'categories')}"
    return [
        *rows,
        ["machine", f"{record['processor']}, {counted(record['cores'] or 0, 'core')}, {record['system']}"],
        [
            "settings",
            f"{counted(record['threads'], 'thread')}, context {record['context']}, {record['device']}",
        ],
        ["llama.cpp", f"llama-cpp-python {record['llama_cpp'].split()[0]}"],
        ["CPU kernels", record["cpu_kernels"]],
        *([kind, found["summary"]] for kind, found in record["kernel_choice"].items()),
        ["logits", _logits(record["logits_vary"])],
        ["specdec", f"{record['specdec']}, {record['date']}"],
        ["prompts", f"{selection}, {counted(runs, 'run')} of each variant"],
        ["answers", f"up to {tokens}, temperature {settings.sampling.temperature:g}"],
        ["peak memory", f"{format_size(results.peak_memory)}, over all variants"],
        ["other programs", f"used {results.other_programs:.2f} cores"],
    ]


def _logits(varying: Sequence[str]) -> str:
    """In words: what makes logits depend on the number of tokens in a call."""
    if not varying:
        return "have the same bits in calls of any size"
    return f"depend on the size of a call, and so may texts: {', '.join(varying)}"


def _rates(variant: VariantFigures) -> list[str]:
    total = sum(variant.steps_by.values())
    by = ", ".join(
        f"{source} {n / total:.0%}"
        for source, n in sorted(variant.steps_by.items(), key=lambda item: -item[1])
        if n
    )
    accepted = f"{variant.acceptance:.0%} of {variant.draft_n}" if variant.acceptance is not None else ""
    shares = [f"{share:.1%}" for share in variant.shares.values()]
    rates = [
        f"{variant.tokens_per_second:.1f}",
        f"{variant.first_token_s:.2f} s",
        f"{variant.tokens_per_step:.2f}",
    ]
    return [variant.name, *rates, accepted, *shares, by]


def _saved(variant: VariantFigures) -> list[str]:
    """A row about what drafting saved: the largest gains first, the largest losses last."""
    by = sorted(((s / variant.plain_s, cause) for cause, s in variant.saved_s.items()), reverse=True)
    causes = [f"{cause} {share:.1%}" for share, cause in by if abs(share) >= _LEAST_SAVED]
    return [variant.name, f"{sum(share for share, _ in by):.1%}", ", ".join(causes)]


def _at(variant: VariantFigures, position: int) -> str:
    if position >= len(variant.tested_at) or not variant.tested_at[position]:
        return ""
    return f"{variant.accepted_at[position] / variant.tested_at[position]:.0%}"


def _difference(variant: VariantFigures, n: int) -> str:
    same = n - len(variant.differences)
    if not variant.differences:
        return f"{variant.name}: identical for {'all ' * (n > 1)}{counted(n, 'prompt')}."
    where = [
        f"{prompt} after {counted(difference.at, 'token')} (gap {difference.gap:.3g})"
        for prompt, difference in variant.differences[:_NAMED]
    ]
    if len(variant.differences) > _NAMED:
        where.append(f"and {len(variant.differences) - _NAMED} more")
    largest = max(difference.gap for _, difference in variant.differences)
    return (
        f"{variant.name}: identical for {same} of {counted(n, 'prompt')}; the others differ where the logits "
        f"of the main model are at most {largest:.3g} apart: {', '.join(where)}."
    )


def _bars(variants: Sequence[VariantFigures], width: int) -> str:
    groups = [
        (
            category if i == 0 else "",
            variant.name if len(variants) > 1 else "",
            variant.by_category.get(category, variant.speedup),
        )
        for category in [*variants[0].by_category, "all"]
        for i, variant in enumerate(variants)
    ]
    return bars(groups, width)


_COLUMNS: Mapping[str, Callable[[Run], float]] = {
    "first_token_s": lambda run: run.statistics.first_token_s,
    "prompt_tokens": lambda run: run.statistics.prompt_n,
    "tokens": lambda run: run.statistics.predicted_n,
    "steps": lambda run: run.statistics.n_steps,
    "drafted": lambda run: run.statistics.draft_n,
    "accepted": lambda run: run.statistics.draft_n_accepted,
    "saved_s": lambda run: run.statistics.net_saved_s,
}


def csv_rows(results: Results) -> str:
    """Format as CSV: one row for each prompt and variant, with medians over its runs."""
    head = ["category", "name", "variant", "runs", "tokens_per_second", "speedup"]
    head += ["best_speedup", "best_error", *_COLUMNS, "identical", "differs_after", "gap"]
    return csv_text(head, [_csv_row(o, variant) for o in results.outcomes for variant in o.runs])


def _csv_row(outcome: Outcome, variant: str) -> list[object]:
    difference = outcome.differences.get(variant)
    return [
        outcome.prompt.category,
        outcome.prompt.name,
        variant,
        len(outcome.runs[variant]),
        run_median(outcome, variant, decode_rate),
        speedup(outcome, variant),
        best_speedup(outcome, variant),
        best_error(outcome, variant),
        *(run_median(outcome, variant, figure) for figure in _COLUMNS.values()),
        int(difference is None),
        *((difference.at, difference.gap) if difference else ("", "")),
    ]


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *rows])
    return out.getvalue()


def as_json(results: Results) -> str:
    """Format as JSON: one object with everything, including the outputs."""
    prompts = [
        outcome_object(outcome) | {"runs": [run_object(r) for runs in outcome.runs.values() for r in runs]}
        for outcome in results.outcomes
    ]
    return json_text(results, **summary_object(results), prompts=prompts)


def json_text(results: Measured, **content: Any) -> str:
    """One JSON object: the record, the settings of each variant, and the content."""
    settings = {variant.name: asdict(variant.settings) for variant in results.variants}
    whole = {"record": results.record, "settings": settings, **content}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


def summary_object(results: Results) -> dict[str, Any]:
    """The figures of all variants."""
    return {
        "interrupted": results.interrupted,
        "prompts_done": len(results.outcomes),
        "prompts_wanted": results.n_prompts,
        "peak_memory_bytes": results.peak_memory,
        "other_programs_cores": results.other_programs,
        "plain_spread": (spread := plain_spread(results.outcomes)),
        "noisy": bool(disturbance(spread, results.other_programs)),
        "variants": [_figures_object(variant) for variant in results.figures()],
    }


def _figures_object(variant: VariantFigures) -> dict[str, Any]:
    entries = asdict(variant)
    entries["differences"] = [_named(p) | asdict(difference) for p, difference in variant.differences]
    entries |= {"acceptance": variant.acceptance, "shares": variant.shares}
    return entries if variant.name == PLAIN else entries | {"conclusion": conclusion(variant.speedup)}


def outcome_object(outcome: Outcome) -> dict[str, Any]:
    """The results of one prompt over all its runs."""
    return {
        **_named(outcome.prompt),
        "speedup": {variant: speedup(outcome, variant) for variant in outcome.runs if variant != PLAIN},
        "best_speedup": {variant: best_speedup(outcome, variant) for variant in outcome.hindsight},
        "best_error": {variant: best_error(outcome, variant) for variant in outcome.hindsight},
        "differences": {variant: d and asdict(d) for variant, d in outcome.differences.items()},
    }


def run_object(run: Run) -> dict[str, Any]:
    """One run with its output and all its statistics (seconds)."""
    return {
        **_named(run.prompt),
        "variant": run.variant,
        "run": run.number,
        "reason": run.reason,
        "tokens_per_second": run.statistics.tokens_per_second,
        "statistics": statistics_object(run.statistics),
        "tokens": list(run.tokens),
        "text": printable(run.text),
    }


def statistics_object(statistics: Statistics) -> dict[str, Any]:
    found = {f.name: getattr(statistics, f.name) for f in fields(statistics) if f.name != "last_calls"}
    # asdict cannot copy a defaultdict
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in found.items()}


def line(event: Run | Outcome) -> tuple[str, dict[str, Any]]:
    """An event as a line of JSON Lines: its type and contents."""
    return ("run", run_object(event)) if isinstance(event, Run) else ("prompt", outcome_object(event))


def _named(prompt: Prompt) -> dict[str, str]:
    return {"category": prompt.category, "name": prompt.name}
