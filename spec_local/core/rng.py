"""The source of all randomness of a generation.

Verifiers and samplers use no other source. A seed therefore determines the whole output, and a test can pass
an rng that explores every branch with its exact probability (`spec_local.testing.enumerate_outcomes`), to
prove losslessness by summation instead of sampling.
"""

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Rng(Protocol):
    """The randomness of one generation."""

    def accept(self, probability: float) -> bool:
        """True with this probability: never at 0 or below, always at 1 or above."""

    def choose(self, weights: NDArray[np.float64]) -> int:
        """An index drawn in proportion to the weights: float64 (n,), not negative, not all 0."""

    def choose_at(
        self, position: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None = None
    ) -> int:
        """As `choose`, with random numbers that depend only on the position (Gumbel-coupled sampling).

        Two calls for the same position with similar weights usually give the same token. A draft model that
        samples in this way often agrees with the main model, and the main model's samples do not depend on
        what was drafted.

        Args:
            position: index in the history of the token to be drawn.
            tokens: token id of each weight, ascending; None: 0 … n−1.
        """

    def rank_at(
        self, position: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None, k: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The k indices that `choose_at` most probably returns for this position and similar weights.

        Args:
            position, weights, tokens: as for `choose_at`; its index for these weights comes first.

        Returns:
            int (n,), n ≤ k, in descending order of, float64 (n,), the estimated probability of each.
        """


class SeededRng:
    """Rng based on NumPy's generator. Equal seeds and equal calls give equal results.

    `choose_at` is the Gumbel-max trick in its exponential form: the seed, the position and the token
    determine a variable E ~ Exp(1), and the token with the smallest E/weight is drawn. Two sparse
    distributions that share these variables agree with probability (1 − TV) / (1 + TV) or more (Daliri,
    Musco and Suresh 2024, arXiv 2408.07978). For a whole vocabulary, a block of tokens is drawn first,
    which may slightly reduce the agreement.

    `rank_at` returns the tokens with the smallest E/weight: a draft model that proposes all of them finds the
    main model's more often than with independent draws.
    """

    def __init__(self, seed: int | None = None) -> None:
        sequence = np.random.SeedSequence(seed)
        self._rng = np.random.default_rng(sequence)
        self._key = sequence.generate_state(4).tobytes()

    def accept(self, probability: float) -> bool:
        # random() is in [0, 1): `<` never accepts 0 and always accepts 1.
        return bool(self._rng.random() < probability)

    def choose(self, weights: NDArray[np.float64]) -> int:
        # Draw a block, then an entry of it: a cumulative sum of 150,000 entries takes longer.
        block, rest = _pick(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), self._rng.random())
        start = block * _BLOCK
        return start + _pick(weights[start : start + _BLOCK], rest)[0]

    def choose_at(
        self, position: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None = None
    ) -> int:
        key, block_key = self._keys(position)
        if tokens is not None:
            return int(_times(weights, tokens, key).argmin())
        # Here, too, a block is drawn first: 150,000 logarithms take longer than the rest of a step.
        start = int(_times_of_blocks(weights, block_key).argmin()) * _BLOCK
        return start + int(_times_in_block(weights, start, key).argmin())

    def rank_at(
        self, position: int, weights: NDArray[np.float64], tokens: NDArray[np.intp] | None, k: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        key, block_key = self._keys(position)
        if tokens is not None:
            return _first(_times(weights, tokens, key), k)
        found, p_found = [], []
        for block, p in zip(*_first(_times_of_blocks(weights, block_key), k), strict=True):
            start = int(block) * _BLOCK
            indices, probs = _first(_times_in_block(weights, start, key), k)
            found.append(start + indices)
            p_found.append(p * probs)
        indices, probs = np.concatenate(found), np.concatenate(p_found)
        # The first of the first block stays first.
        order = np.append(0, 1 + (-probs[1:]).argsort(kind="stable")[: k - 1])
        return indices[order], probs[order]

    def _keys(self, position: int) -> tuple[bytes, bytes]:
        """For the tokens of a position, and for its blocks."""
        digest = hashlib.blake2b(position.to_bytes(8, "little"), key=self._key, digest_size=16).digest()
        return digest[:8], digest[8:]


_BLOCK = 512


def _first(times: NDArray[np.float64], k: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Indices of the k smallest times, and for each the estimated probability that similar weights make it
    the first.

    If the logarithms of two weights differ by Gumbel noise of scale 1, the first index of one is distributed
    as 1/time of the other. This fits a 0.5B draft model of a 1.5B main model (docs/notes/experiments.md).
    """
    order = times.argsort()[:k]
    order = order[times[order] < np.inf]
    shares = times[order[0]] / times
    return order, shares[order] / shares.sum()


def _times(weights: NDArray[np.float64], tokens: NDArray[np.intp], key: bytes) -> NDArray[np.float64]:
    """E/weight of each token, where E ~ Exp(1) is a hash of token and key."""
    # splitmix64 (Steele, Lea and Flood 2014): a generator whose n-th number is computed directly.
    x = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.frombuffer(key, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(12)) + 0.5) * 2.0**-52  # in (0, 1): a 53rd bit would be rounded up to 1
    with np.errstate(divide="ignore"):  # a weight of 0 gives infinity
        times: NDArray[np.float64] = -np.log(uniform) / weights
    return times


def _times_of_blocks(weights: NDArray[np.float64], key: bytes) -> NDArray[np.float64]:
    starts = np.arange(0, len(weights), _BLOCK)
    return _times(np.add.reduceat(weights, starts), starts, key)


def _times_in_block(weights: NDArray[np.float64], start: int, key: bytes) -> NDArray[np.float64]:
    block = weights[start : start + _BLOCK]
    return _times(block, np.arange(start, start + len(block)), key)


def _pick(weights: NDArray[np.float64], u: float) -> tuple[int, float]:
    """The index whose share of the sum contains u ∈ [0, 1), and the relative position of u in that share."""
    cumulative = weights.cumsum()
    at = u * cumulative[-1]
    index = int(cumulative.searchsorted(at, side="right"))
    if index == len(weights):  # the product was rounded up to the sum
        index = int(weights.nonzero()[0][-1])
    below = cumulative[index - 1] if index else 0.0
    return index, min(float((at - below) / weights[index]), _BELOW_ONE)


_BELOW_ONE = float(np.nextafter(1.0, 0.0))
