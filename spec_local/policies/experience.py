"""What a policy has learned: how often guesses stand, and what guessing brought."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Chances:
    """How often something happens, by bins of a number that foretells it: Beta counts that forget.

    What is believed at first of a bin moves with what is seen in all of them, by one step of logistic regression an
    observation: a text that is harder than usual is so in every bin, and few observations must do.

    Args:
        edges: lower ends of all bins but the first, rising.
        expected: of each bin, what is believed at first; as if seen until it failed `failures` times.
        memory: observations of a bin that count.
    """

    def __init__(
        self, edges: Sequence[float], expected: Sequence[float], failures: float = 2.0, memory: float = 40.0
    ) -> None:
        if len(expected) != len(edges) + 1:
            raise ValueError(f"{len(edges)} edges make {len(edges) + 1} bins, not {len(expected)}")
        self._edges, self._keep = list(edges), 1.0 - 1.0 / memory
        odds = np.array(expected, np.float64)
        self._weight = failures / (1.0 - odds)
        self._logits = np.log(odds / (1.0 - odds))
        self._shift = 0.0
        self._stood, self._seen = [0.0] * len(expected), [0.0] * len(expected)
        self._mean = odds
        self._is_stale = False

    def of(self, x: float) -> float:
        return float(self._means()[bisect_right(self._edges, x)])

    @property
    def edges(self) -> Sequence[float]:
        """Lower ends of all bins but the first."""
        return self._edges

    def of_each(self, xs: Floats) -> Floats:
        found: Floats = self._means()[np.searchsorted(self._edges, xs, side="right")]
        return found

    def count(self, x: float, stood: bool) -> None:
        i = bisect_right(self._edges, x)
        moved = self._shift + _LEARNING_RATE * (stood - float(self._mean[i]))
        self._shift = min(3.0, max(-3.0, moved))
        self._stood[i] = self._keep * self._stood[i] + stood
        self._seen[i] = self._keep * self._seen[i] + 1.0
        self._is_stale = True

    def _means(self) -> Floats:
        if self._is_stale:
            believed = 1.0 / (1.0 + np.exp(-self._logits - self._shift))
            self._mean = (self._weight * believed + self._stood) / (self._weight + self._seen)
            self._is_stale = False
        return self._mean


_LEARNING_RATE = 0.2


@dataclass(slots=True)
class Yield:
    """Tokens and seconds of the steps of one kind: sums that forget, on top of what was believed at first.

    memory: steps that count.
    """

    tokens: float
    seconds: float
    weight: float
    memory: float = 24.0

    def count(self, tokens: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / self.memory
        total = keep * self.weight + 1.0
        self.tokens = (keep * self.weight * self.tokens + tokens) / total
        self.seconds = (keep * self.weight * self.seconds + seconds) / total
        self.weight = total


def _guesses() -> Chances:
    # Means of a 0.5B draft for a 1.5B main, temperature 0.8 with top-k 40, top-p 0.95, min-p 0.05: docs/benchmarks.md.
    return Chances(
        (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995), (0.2, 0.4, 0.52, 0.63, 0.69, 0.82, 0.9, 0.96, 0.985)
    )


def _copies() -> Chances:
    # A 1.5B main's answers to 16 of the built-in prompts, temperature 0.
    return Chances(
        (2, 3, 4, 5, 7, 9, 13, 17, 25, 33), (0.15, 0.45, 0.52, 0.65, 0.72, 0.8, 0.87, 0.92, 0.94, 0.96, 0.97)
    )


@dataclass(slots=True)
class Experience:
    """What one answer may teach the next.

    guesses: by the draft's confidence. copies: by the tokens that matched before the copied one. ahead: the chance of guesses
    that the draft has yet to make. yields: of steps that asked the draft, by the kind of guess. purse: what guessing
    has won and may lose again, in plain steps.
    """

    guesses: Chances = field(default_factory=_guesses)
    copies: Chances = field(default_factory=_copies)
    ahead: float = 0.8
    purse: float = 3.3
    yields: dict[str, Yield] = field(default_factory=dict)
