"""Conclusions of a benchmark, in words, and whether more runs could show more."""

from collections.abc import Sequence
from statistics import median

from spec_local.bench.figures import Estimate, decode_rate, speedups
from spec_local.bench.runner import Outcome
from spec_local.bench.variants import PLAIN, Variant
from spec_local.system.machine import is_busy, used_by_others

MOST_RUNS = 3
"""Runs of each prompt and variant, at most, when a benchmark repeats unclear ones by itself."""

_SMALL = 1.05  # a ratio; smaller differences do not matter to a user
_ENOUGH = 6  # prompts; that all of fewer are faster by chance has a probability above 5 %: 2 · 2^-5
# A share of the speed, as a median deviation: then the ratio of two single runs is off by 10 % as a standard
# deviation (√2 · 1.48 · 0.05), and six prompts do not show a difference of less than 8 %.
_STEADY = 0.05


def conclusion(e: Estimate, unit: str = "prompt", units: str = "prompts") -> str:
    """Describe a speed-up, as the end of a sentence; e: an estimate over several `units`."""
    times = f"{e.value:.2f} times as fast as plain decoding"
    if e.n == 1:
        return f"{times} on this {unit}; one {unit} is too few to conclude more."
    interval = f"[{e.low:.2f}, {e.high:.2f}]"
    if _is_undecided(e):
        return (
            f"no difference from plain decoding shown: the interval {interval} includes 1; "
            f"use more {units}, or more runs."
        )
    if e.low <= 1 <= e.high:
        found = f"as fast as plain decoding, within {max(1 / e.low, e.high) - 1:.0%} {interval}"
    else:
        found = f"{'slower: ' if e.high < 1 else ''}{times} {interval}"
    few = f" for these {e.n} {units}; use {_ENOUGH} or more to conclude for others" if e.n < _ENOUGH else ""
    return f"{found}{few}."


def _is_undecided(e: Estimate) -> bool:
    """Return whether the interval includes 1 and differences that matter."""
    return e.low <= 1 <= e.high and (e.low < 1 / _SMALL or e.high > _SMALL)


def reason_to_repeat(outcomes: Sequence[Outcome], variants: Sequence[Variant], other_programs: float) -> str:
    """Return the reason why another run of each prompt would make the result clearer; "": it would not.

    It would not where repeated runs are steady already: then the prompts differ, not the runs.

    Args:
        other_programs: cores that other programs used on average.
    """
    spread = _spread([[decode_rate(run) for run in outcome.runs[PLAIN]] for outcome in outcomes])
    if spread is not None and spread <= _STEADY:
        return ""
    if is_busy(other_programs):
        return used_by_others(other_programs)
    if len(outcomes) > 1 and any(_is_undecided(speedups(outcomes, v.name)) for v in variants[1:]):
        return "no difference is shown yet"
    return ""


def plain_spread(outcomes: Sequence[Outcome]) -> float | None:
    """Median deviation of plain runs from the median of their prompt, as a share of it; None: single runs."""
    return _spread(
        [[decode_rate(run) for run in (*outcome.runs[PLAIN], outcome.control) if run] for outcome in outcomes]
    )


def _spread(rates: Sequence[Sequence[float]]) -> float | None:
    deviations = [abs(rate / median(each) - 1) for each in rates if len(each) > 1 for rate in each]
    return median(deviations) if deviations else None


def disturbance(spread: float | None, other_programs: float) -> str:
    """A sentence if the machine was too noisy to conclude anything; otherwise "".

    Args:
        spread: from `plain_spread`.
        other_programs: cores that other programs used on average.
    """
    signs = []
    if is_busy(other_programs):
        signs.append(used_by_others(other_programs))
    if spread is not None and spread > _STEADY:
        signs.append(f"plain runs of the same prompt differ by {spread:.0%} from their median")
    if not signs:
        return ""
    return (
        f"Do not rely on these figures: {' and '.join(signs)}. "
        "Close other programs, let the machine cool down, and measure again."
    )
