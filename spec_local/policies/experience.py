"""What a policy has learned: how often guesses stand, and what guessing brought."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Guesser = Literal["lookup", "draft"]


class Chances:
    """How often something happens, by bins of a number that foretells it: Beta counts that forget.

    What is believed at first of a bin moves with what is seen in all of them, by one step of logistic regression an
    observation: a text that is harder than usual is so in every bin, and few observations must do.

    Args:
        edges: lower ends of all bins but the first, rising.
        expected: of each bin, what is believed at first; as if seen until it failed `failures` times.
        memory: observations of a bin that count.
        rate: of the logistic regression.
    """

    def __init__(
        self,
        edges: Sequence[float],
        expected: Sequence[float],
        failures: float = 2.0,
        memory: float = 40.0,
        rate: float = 0.2,
    ) -> None:
        if len(expected) != len(edges) + 1:
            raise ValueError(f"{len(edges)} edges make {len(edges) + 1} bins, not {len(expected)}")
        self._edges, self._keep, self._rate = list(edges), 1.0 - 1.0 / memory, rate
        self._weight = [min(failures / (1.0 - chance), 80.0) for chance in expected]
        self._logits = [math.log(chance / (1.0 - chance)) for chance in expected]
        self._shift = 0.0
        self._stood, self._seen = [0.0] * len(expected), [0.0] * len(expected)

    def of(self, x: float) -> float:
        return self._mean(bisect_right(self._edges, x))

    @property
    def edges(self) -> Sequence[float]:
        """Lower ends of all bins but the first."""
        return self._edges

    def of_each(self, xs: Floats) -> Floats:
        means = np.array([self._mean(i) for i in range(len(self._logits))])
        found: Floats = means[np.searchsorted(self._edges, xs, side="right")]
        return found

    def count(self, x: float, stood: bool) -> None:
        i = bisect_right(self._edges, x)
        moved = self._shift + self._rate * (stood - self._mean(i))
        self._shift = min(3.0, max(-3.0, moved))
        self._stood[i] = self._keep * self._stood[i] + stood
        self._seen[i] = self._keep * self._seen[i] + 1.0

    def _mean(self, i: int) -> float:
        believed = 1.0 / (1.0 + math.exp(-self._logits[i] - self._shift))
        return (self._weight[i] * believed + self._stood[i]) / (self._weight[i] + self._seen[i])


@dataclass(slots=True)
class Yield:
    """Tokens and seconds of the steps of one kind: sums that forget, on top of what was believed at first.

    memory: steps that count.
    """

    tokens: float
    seconds: float
    weight: float
    memory: float = 24.0

    def loss(self, a_token: float) -> float:
        """Seconds that such a step is believed to lose, where a token can be had in so many."""
        return self.seconds - self.tokens * a_token

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
    # What lookups say of themselves is right on average (see `spec_local.lookups.base.match_confidence`). To learn more quickly from one
    # text was worse on all machines that were simulated: where copies fail for a while they stand again in the end.
    edges = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985)
    expected = (0.08, 0.22, 0.37, 0.54, 0.65, 0.75, 0.84, 0.9, 0.94, 0.96, 0.978, 0.992)
    return Chances(edges, expected, failures=8.0, memory=150.0, rate=0.05)


@dataclass(slots=True)
class Experience:
    """What one answer may teach the next.

    guesses: by the draft's confidence. copies: by who found them, and how sure of them that lookup is. staged: of copies that the
    draft read along, whether it guessed them. ahead: the chance of guesses that the draft has yet to make. yields: of
    steps that asked the draft, by the kind of guess. purse: plain steps that guessing may lose. won: those that it has won and may
    lose again, by who guessed. length: tokens of an answer. saving: plain steps that the draft saves a token of an answer, what it reads of the prompt not
    counted; None: it has not guessed yet. said, saved: tokens of this answer, and what the draft has saved of it.
    """

    guesses: Chances = field(default_factory=_guesses)
    copies: dict[str, Chances] = field(default_factory=lambda: defaultdict(_copies))
    staged: Chances = field(default_factory=_copies)
    ahead: float = 0.8
    purse: float = 3.0
    won: dict[Guesser, float] = field(default_factory=lambda: {"lookup": 0.0, "draft": 0.0})
    yields: dict[str, Yield] = field(default_factory=dict)
    length: float = 200.0
    saving: float | None = None
    said: int = 0
    saved: float | None = None

    def start(self, hope: float) -> None:
        """Another answer begins: learn from the last one as a whole.

        Args:
            hope: what a draft is believed to save that has not been asked, lately less and less so.
        """
        if self.saving is None:
            self.saving = hope
        if self.said:
            self.length += 0.3 * (self.said - self.length)
            if self.saved is not None:
                self.saving += 0.15 * (self.saved / self.said - self.saving)
            else:
                self.saving += 0.05 * (hope - self.saving)
        self.said, self.saved = 0, None
