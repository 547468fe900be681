"""What drafts gained in an answer, and when that may be stated; how many answers at once gain most."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from spec_local.engine.events import Statistics
from spec_local.policies.cost_model import CallCosts

_FEWEST = 16  # tokens of an answer from which a gain is known well enough to state it
_ABOUT_EQUAL = 0.05  # share of the plain speed: less cannot be told from noise
_LITTLE = 0.05  # of the tokens per second


@dataclass(frozen=True, slots=True)
class Gain:
    """What drafts gained in an answer against plain decoding on this machine.

    Attributes:
        kind: ``none``: there were no drafts.
        words: for people.
        times: how many times as fast the answer was; None: no number is stated.
    """

    kind: Literal["faster", "same", "slower", "none"]
    words: str
    times: float | None = None


def gain_of(
    s: Statistics, plain: float | None, policy: str, *, is_asked: bool, has_draft: bool
) -> Gain | None:
    """Return what drafts gained in an answer.

    None: no drafts were asked for, the costs of calls have not been measured, or the answer is too short.

    Args:
        plain: seconds of a plain step on this machine, if they have been measured.
        policy: which decided what to draft.
        is_asked: whether anything might have drafted.
        has_draft: whether something can draft after any text: a draft model, a head, or another proposer.
    """
    if not plain or s.predicted_n < _FEWEST or not s.predicted_s or not is_asked:
        return None
    if not s.draft_n:
        why = "none promised a gain" if has_draft else "no draft model, and no earlier text recurred"
        return Gain("none", f"no drafts ({why})")
    speed = s.predicted_n * plain / s.predicted_s
    if speed < 1.0 - _ABOUT_EQUAL:
        if policy != "adaptive":
            return Gain("slower", "slower than without drafts: policy adaptive drafts only where it pays")
        # This policy bounds what drafts may lose: it is the machine.
        return Gain("slower", "slower than usual: the machine may be busy or hot")
    if speed < 1.0 + _ABOUT_EQUAL:
        return Gain("same", "about as fast as without drafts")
    return Gain("faster", f"about {speed:.1f} times as fast as without drafts", round(speed, 1))


def best_parallel(costs: CallCosts, n_max: int) -> int:
    """The number of sequences, up to `n_max`, whose plain calls give the most tokens per second.

    The smallest one within `_LITTLE` of it: with more, each would only take longer.
    """
    rates = np.arange(1, n_max + 1) / costs.first(n_max)[1:]
    return 1 + int(np.argmax(rates >= (1.0 - _LITTLE) * rates.max()))
