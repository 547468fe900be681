"""All randomness of a generation, behind two questions.

Acceptance rules and samplers ask for nothing else, which has two uses: a seed fixes everything that is
said, and a test can put in dice that explore every branch with its exact probability
(`spec_local.fake.enumerate_outcomes`), so that losslessness is proved by summing instead of sampling.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Dice(Protocol):
    """The randomness of one row (one generation)."""

    def accept(self, probability: float) -> bool:
        """True with this probability; 0 (or less) is never, 1 (or more) is always."""

    def choose(self, weights: NDArray[np.float64]) -> int:
        """An index, drawn in proportion to weights (float64 (n,), not negative, not all zero)."""


class SeededDice:
    """Dice from numpy's generator. Equal seeds and equal questions give equal answers."""

    def __init__(self, seed: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)

    def accept(self, probability: float) -> bool:
        # random() is in [0, 1), so that `<` never accepts 0 and always accepts 1.
        return bool(self._rng.random() < probability)

    def choose(self, weights: NDArray[np.float64]) -> int:
        # First the block, then the entry in it: summing 150,000 entries one after the other costs more.
        block, rest = _pick(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), self._rng.random())
        start = block * _BLOCK
        return start + _pick(weights[start : start + _BLOCK], rest)[0]


_BLOCK = 512


def _pick(weights: NDArray[np.float64], u: float) -> tuple[int, float]:
    """The index whose share of the sum holds u ∈ [0, 1), and where u lies within that share."""
    cumulative = weights.cumsum()
    at = u * cumulative[-1]
    index = int(cumulative.searchsorted(at, side="right"))
    if index == len(weights):  # the product was rounded up to the sum
        index = int(weights.nonzero()[0][-1])
    below = cumulative[index - 1] if index else 0.0
    return index, min(float((at - below) / weights[index]), _BELOW_ONE)


_BELOW_ONE = float(np.nextafter(1.0, 0.0))
