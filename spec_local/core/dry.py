"""DRY ("don't repeat yourself"): a penalty for tokens that would prolong a repetition.

The last n tokens of the context may occur earlier in it, too. The token that followed them there would make
the repetition longer: its penalty is multiplier · base^(n − allowed length), or none if n is less than the
allowed length. No repetition goes beyond a sequence breaker, such as a newline. As in llama.cpp.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.sampling_settings import SamplingSettings

Breakers = Mapping[int, Sequence[Sequence[int]]]
"""Sequence breakers as tokens: by their first token, those that follow it (for most of them, none)."""
_MAX_LOG = 88.7228391  # of float32


def dry_penalties(
    recent: Sequence[int], settings: SamplingSettings, breakers: Breakers
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The tokens to penalize after the recent ones, and what to subtract from their logits."""
    allowed, n = settings.dry_allowed_length, len(recent)
    longest = _n_since_breaker(recent, breakers)
    if n <= allowed or longest < allowed:
        return np.empty(0, np.intp), np.empty(0)
    if settings.dry_base > 1.000001:  # longer repetitions have the same, largest penalty
        longest = min(longest, allowed + int(_MAX_LOG / math.log(settings.dry_base)))
    tokens = np.fromiter(recent, np.intp, n)
    lengths = np.zeros(n - 1, np.intp)  # of the repetition that ends at each token
    ends, length = np.arange(n - 1), 0
    while len(ends) and length < longest:
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        length += 1
        lengths[ends] = length
    found = (lengths >= allowed).nonzero()[0]
    found = found[np.argsort(lengths[found])]  # the longest last: it counts for each next token
    exponents = dict(zip(tokens[found + 1].tolist(), (lengths[found] - allowed).tolist(), strict=True))
    for token in exponents.keys() & breakers.keys():
        if () in map(tuple, breakers[token]):
            del exponents[token]
    ids = np.fromiter(exponents.keys(), np.intp)
    powers = np.power(settings.dry_base, np.fromiter(exponents.values(), np.float64))
    return ids, settings.dry_multiplier * powers


def _n_since_breaker(recent: Sequence[int], breakers: Breakers) -> int:
    """Number of tokens after the last sequence breaker."""
    n = len(recent)
    for i in range(n):
        tails = breakers.get(recent[n - 1 - i], ())
        found = [len(tail) for tail in tails if [*recent[n - i :][: len(tail)]] == [*tail]]
        if found:
            return i - max(found)
    return n
