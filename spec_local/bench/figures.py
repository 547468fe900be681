"""The figures of a benchmark: speed-ups over plain decoding, with confidence intervals.

Speed-ups are ratios on the same prompt, so that the difficulty of the prompt and disturbances of both
variants cancel. Over several prompts, the geometric mean is taken, with a 95 % bootstrap interval for
the choice of prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from spec_local.bench.prompts import Prompt
from spec_local.bench.runner import Difference, Outcome, Run
from spec_local.bench.variants import PLAIN
from spec_local.engine.events import Statistics

_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A geometric mean of n ratios with its 95 % interval; for n = 1, the interval is the ratio itself."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """One variant over all prompts.

    Args:
        name: name of the variant.
        speedup: ratio of tokens/s after the prompt to those of plain decoding.
        by_category: the same for the prompts of each category.
        with_prompt: ratio of tokens/s including the time to read the prompt.
        tokens_per_second, first_token_s: medians over prompts.
        tokens_per_step, draft_n, draft_n_accepted, tested_at, accepted_at, steps_by, profile, saved_s,
            plain_s: as in `Statistics`, over all runs.
        theory: geometric mean of the best possible speed-ups; None: unknown.
        achieved: geometric mean of the speed-ups over the best possible ones, at most 1; None: unknown.
        theory_error: by how much the times of steps differ from those that `theory` assumes for them, as a
            share: mean over prompts; None: unknown.
        differences: prompts whose output differs from that of plain decoding.
    """

    name: str
    speedup: Estimate
    by_category: Mapping[str, Estimate]
    with_prompt: Estimate
    tokens_per_second: float
    first_token_s: float
    tokens_per_step: float
    draft_n: int
    draft_n_accepted: int
    tested_at: Sequence[int]
    accepted_at: Sequence[int]
    steps_by: Mapping[str, int]
    profile: Mapping[str, float]
    saved_s: Mapping[str, float]
    plain_s: float
    theory: float | None
    achieved: float | None
    theory_error: float | None
    differences: Sequence[tuple[Prompt, Difference]]

    @property
    def acceptance(self) -> float | None:
        """Share of the verified draft tokens that were accepted; None: there were none."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else None

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the time after the prompt: drafting, calls of the main model, and the rest."""
        parts = {"drafting": 0.0, "main": 0.0, "rest": 0.0}
        for part, seconds in self.profile.items():
            drafting = part in ("propose", "draft model")
            parts["drafting" if drafting else "main" if part == "main model" else "rest"] += seconds
        total = sum(parts.values())
        return {part: seconds / total if total else 0.0 for part, seconds in parts.items()}


def geometric_mean(ratios: Sequence[float]) -> Estimate:
    """Geometric mean and 95 % bootstrap interval of at least one positive ratio."""
    logs = np.log(np.asarray(ratios, float))
    picks = np.random.default_rng(0).integers(0, len(logs), (_DRAWS, len(logs)))
    low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5]))
    return Estimate(float(np.exp(logs.mean())), float(low), float(high), len(logs))


def decode_rate(run: Run) -> float:
    """Tokens/s after the prompt."""
    return run.statistics.tokens_per_second


def total_rate(run: Run) -> float:
    """Tokens/s including the time to read the prompt."""
    s = run.statistics
    return s.predicted_n / (s.prompt_s + s.predicted_s)


def run_median(outcome: Outcome, variant: str, figure: Callable[[Run], float]) -> float:
    """Median of a figure over the runs of one prompt and variant."""
    return median(map(figure, outcome.runs[variant]))


def speedup(outcome: Outcome, variant: str, figure: Callable[[Run], float] = decode_rate) -> float:
    """Speed-up of a variant over plain decoding on one prompt."""
    return run_median(outcome, variant, figure) / run_median(outcome, PLAIN, figure)


def achieved(outcome: Outcome, variant: str) -> float | None:
    """Speed-up of a variant on one prompt over the best possible one; None: unknown."""
    runs = outcome.hindsight.get(variant)
    return median(run.achieved for run in runs) if runs else None


def best_speedup(outcome: Outcome, variant: str) -> float | None:
    """The best possible speed-up of a variant on one prompt, with any draft length; None: unknown."""
    share = achieved(outcome, variant)
    return speedup(outcome, variant) / share if share else None


def best_error(outcome: Outcome, variant: str) -> float | None:
    """The error of `best_speedup`, as a share: mean over runs; None: unknown."""
    runs = outcome.hindsight.get(variant)
    return fmean(run.error for run in runs) if runs else None


def speedups(outcomes: Sequence[Outcome], variant: str) -> Estimate:
    """Speed-up of a variant over at least one prompt."""
    return geometric_mean([speedup(outcome, variant) for outcome in outcomes])


def summarise(outcomes: Sequence[Outcome], variant: str) -> VariantFigures:
    """The figures of one variant over at least one prompt."""
    categories = dict.fromkeys(outcome.prompt.category for outcome in outcomes)
    runs = [run for outcome in outcomes for run in outcome.runs[variant]]
    total = sum((run.statistics for run in runs), Statistics())
    shares = [share for o in outcomes if (share := achieved(o, variant))]
    best = [ratio for o in outcomes if (ratio := best_speedup(o, variant))]
    errors = [error for o in outcomes if (error := best_error(o, variant)) is not None]
    differences = [(outcome.prompt, outcome.differences.get(variant)) for outcome in outcomes]
    return VariantFigures(
        name=variant,
        speedup=speedups(outcomes, variant),
        by_category={
            category: speedups([o for o in outcomes if o.prompt.category == category], variant)
            for category in categories
        },
        with_prompt=geometric_mean([speedup(o, variant, total_rate) for o in outcomes]),
        tokens_per_second=median(run_median(o, variant, decode_rate) for o in outcomes),
        first_token_s=median(
            run_median(o, variant, lambda run: run.statistics.first_token_s) for o in outcomes
        ),
        tokens_per_step=total.tokens_per_step,
        draft_n=total.draft_n,
        draft_n_accepted=total.draft_n_accepted,
        tested_at=total.tested_at,
        accepted_at=total.accepted_at,
        steps_by=dict(total.steps_by),
        profile=dict(total.profile),
        saved_s=dict(total.saved_s),
        plain_s=total.plain_s,
        theory=geometric_mean(best).value if best else None,
        achieved=geometric_mean(shares).value if shares else None,
        theory_error=fmean(errors) if errors else None,
        differences=[(prompt, difference) for prompt, difference in differences if difference],
    )
