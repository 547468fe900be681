"""All randomness of a generation, behind two questions.

Acceptance rules and samplers ask for nothing else, which has two uses: a seed fixes everything that is
said, and a test can put in rng that explore every branch with its exact probability
(`spec_local.core.fake.enumerate_outcomes`), so that losslessness is proved by summing instead of sampling.
"""

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Rng(Protocol):
    """The randomness of one row (one generation)."""

    def accept(self, probability: float) -> bool:
        """True with this probability; 0 (or less) is never, 1 (or more) is always."""

    def choose(self, weights: NDArray[np.float64]) -> int:
        """An index, drawn in proportion to weights (float64 (n,), not negative, not all zero)."""

    def choose_at(
        self, place: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None = None
    ) -> int:
        """As `choose`, with the randomness that belongs to a place of the text.

        Asked twice about one place it answers alike: where the weights are nearly the same, with nearly always the
        same token. So a draft that asks before main does guesses well, and what main says depends on no guess.

        Args:
            place: of the token to be drawn, counted from the start of the text.
            tokens: of each weight, ascending; None: 0 … n−1.
        """


class SeededRng:
    """Rng from numpy's generator. Equal seeds and equal questions give equal answers.

    `choose_at` is a race of exponential variables, one for each token at each place, of which the seed decides: the
    lowest of E/weight wins, with probability in proportion to its weight. Two sparse distributions
    that share the variables agree with probability (1 − TV) / (1 + TV) or more (Daliri, Musco and Suresh 2024, arXiv
    2408.07978); of whole vocabularies a block is drawn first, which may cost a little of that.
    """

    def __init__(self, seed: int | None = None) -> None:
        sequence = np.random.SeedSequence(seed)
        self._rng = np.random.default_rng(sequence)
        self._key = sequence.generate_state(4).tobytes()

    def accept(self, probability: float) -> bool:
        # random() is in [0, 1), so that `<` never accepts 0 and always accepts 1.
        return bool(self._rng.random() < probability)

    def choose(self, weights: NDArray[np.float64]) -> int:
        # First the block, then the entry in it: summing 150,000 entries one after the other costs more.
        block, rest = _pick(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), self._rng.random())
        start = block * _BLOCK
        return start + _pick(weights[start : start + _BLOCK], rest)[0]

    def choose_at(
        self, place: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None = None
    ) -> int:
        digest = hashlib.blake2b(place.to_bytes(8, "little"), key=self._key, digest_size=16).digest()
        if tokens is not None:
            return _winner(weights, tokens, digest[:8])
        # Here too the block first: 150,000 logarithms cost more than the rest of a step.
        starts = np.arange(0, len(weights), _BLOCK)
        start = int(starts[_winner(np.add.reduceat(weights, starts), starts, digest[8:])])
        block = weights[start : start + _BLOCK]
        return start + _winner(block, np.arange(start, start + len(block)), digest[:8])


_BLOCK = 512


def _winner(weights: NDArray[np.float64], runners: NDArray[np.intp], key: bytes) -> int:
    """Index of the lowest E/weight; E is a function of runner and key that no one can tell from Exp(1)."""
    # splitmix64 (Steele, Lea and Flood 2014): a generator of which the n-th number can be had at once.
    x = runners.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.frombuffer(key, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1)
    with np.errstate(divide="ignore"):  # what weighs nothing never arrives
        return int((-np.log(uniform) / weights).argmin())


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
