"""Seconds of a model call by number of tokens, as a table of measurements.

The time of a call is not linear in its tokens: kernels work in tiles, so that it rises in steps, and a
smooth fit is wrong where it matters (llama.cpp #14132, #17034).
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_WINDOW = 9  # last calls of a size that count: the median tolerates four slow ones
_NEAR = 4  # calls; a call of one token that comes later is no reference
_DISTURBED = 4.0  # ratio to the usual time of a one-token call; such a slowdown rarely lasts
_INSTANT = 1e-9  # seconds; a coarse clock may give 0
_MOST_WRONG = 3.0  # error of an estimate that corrects others; a larger one is an exception of a kernel
# Share of such an error, as a logarithm, at twice or half the tokens. With 0.5 or 0.85, simulated sessions
# that begin with estimates are up to 15 % slower.
_CARRIES = 0.7


class CallCosts(Protocol):
    """Seconds of a call by number of tokens."""

    @property
    def drafts_blocks(self) -> bool:
        """True if these are of a draft model that drafts n tokens in one call; see `Limits.drafts_blocks`."""

    def seconds(self, n: int) -> float:
        """Seconds of a call of n tokens."""

    def first(self, n: int) -> Floats:
        """`seconds` of 0 … n tokens: float64 (n + 1,), the first 0; do not modify."""


@dataclass(slots=True)
class _Call:
    """n: tokens. plain: seconds of the last one-token call before it and the first two after."""

    n: int
    seconds: float
    plain: list[float]

    def multiple(self, plain: float) -> float:
        """The time in one-token calls around it, or of `plain` seconds if those are disturbed or missing."""
        around = _median(self.plain) if len(self.plain) == 3 else plain
        return self.seconds / (plain if around > _DISTURBED * plain else around)


class CostModel:
    """Seconds of one call of a model, by number of tokens; empty at first.

    Other processes and heat slow down all calls alike, but only some sizes occur meanwhile. The time of a
    call is therefore stored as a multiple of the one-token calls around it, and only these follow the
    machine's speed.

    Args:
        seconds: initial observations by number of tokens; each counts like one call.
        estimates: for sizes that have not been observed, the time in one-token calls, at least 1. Their
            excess over 1 is scaled as that of the observed sizes differs from their estimates, until they
            are observed, too.

    Attributes:
        drafts_blocks: see `CallCosts`; for those who know the model to set.

    Raises:
        ValueError: an impossible observation: see `observe`.
    """

    drafts_blocks: bool = False

    def __init__(
        self, seconds: Mapping[int, float] | None = None, estimates: Mapping[int, float] | None = None
    ) -> None:
        self._estimates = dict(sorted((estimates or {}).items()))
        self._plain: deque[float] = deque(maxlen=_WINDOW)  # seconds of one-token calls
        self._disturbed: list[float] = []  # the same, of consecutive disturbed calls
        self._calls: dict[int, deque[_Call]] = {}  # of several tokens, by number of tokens
        self._open: list[_Call] = []  # calls with fewer than two one-token calls after them
        self._closed: set[int] = set()  # sizes of calls closed since `costs` was computed
        self._multiples: dict[int, float] = {}  # of a one-token call, by number of tokens
        self._shape: dict[int, float] = {}  # the same, corrected by _plausible, ascending
        self._costs: dict[int, float] = {}
        self._first: Floats | None = None
        for n in sorted(seconds or {}):
            self.observe(n, (seconds or {})[n])
        for call in self._open:
            call.plain *= 3  # later calls may be of another session
        self._close()

    @property
    def estimates(self) -> dict[int, float]:
        """The estimates of sizes that have not been observed, as they were given."""
        return {n: multiple for n, multiple in self._estimates.items() if n > 1 and n not in self._calls}

    def drop_estimates(self) -> None:
        """From now on, follow only what was observed."""
        self._estimates = {}
        self._shape, self._costs, self._first = {}, {}, None

    @property
    def costs(self) -> dict[int, float]:
        """`seconds` of the observed and the estimated sizes, by ascending number of tokens."""
        if not self._costs and (self._multiples or self._open):
            plain = _median(self._plain) if self._plain else 1.0
            for n in (moved := self._closed.union(call.n for call in self._open)):
                self._multiples[n] = _median([call.multiple(plain) for call in self._calls[n]])
            self._closed.clear()
            if moved or len(self._shape) < len(self._multiples):
                multiples = self._multiples | self._scaled_estimates()
                sizes = sorted(multiples)
                medians = [multiples[n] for n in sizes]
                self._shape = dict(zip(sizes, _plausible(sizes, medians), strict=True))
            self._costs = {n: plain * multiple for n, multiple in self._shape.items()}
        return self._costs

    def _scaled_estimates(self) -> dict[int, float]:
        """Estimates of unobserved sizes, corrected by the error at the nearest observed one.

        An error says less about sizes that are further away.
        """
        seen = {n: multiple for n, multiple in self._multiples.items() if n > 1}
        expected = _between(np.array(list(seen)), {1: 1.0, **self._estimates})
        errors = {
            n: min(_MOST_WRONG, max(1.0 / _MOST_WRONG, (seen[n] - 1.0) / max(_INSTANT, estimate - 1.0)))
            for n, estimate in zip(seen, expected, strict=True)
        }
        scaled = {}
        for n, multiple in self.estimates.items():
            distance, error = min(((abs(math.log2(n / m)), errors[m]) for m in errors), default=(0.0, 1.0))
            scaled[n] = 1.0 + error ** (_CARRIES**distance) * (multiple - 1.0)
        return scaled

    def observe(self, n: int, seconds: float) -> None:
        """Record one call of n tokens.

        Raises:
            ValueError: n is below 1, or the time is negative, infinite or NaN.
        """
        if n < 1 or not 0 <= seconds < math.inf:
            raise ValueError(f"a call of {n} tokens cannot take {seconds} s")
        seconds = max(seconds, _INSTANT)
        if n == 1:
            self._count_plain(seconds)
            self._multiples[1] = 1.0
            for call in self._open:
                call.plain.append(seconds)
            self._close()
        else:
            call = _Call(n, seconds, [self._plain[-1]] if self._plain else [])
            self._calls.setdefault(n, deque(maxlen=_WINDOW)).append(call)
            self._open.append(call)
            if len(self._open) > _NEAR:
                self._open[0].plain *= 3
                self._close()
        self._costs, self._first = {}, None

    def _count_plain(self, seconds: float) -> None:
        """Ignore a disturbed call, unless the last nine were all disturbed: then the machine is slower now.

        A median alone tolerates four of nine. With five, a draft model would seem expensive and never be
        used again.
        """
        if self._plain and seconds > _DISTURBED * _median(self._plain):
            self._disturbed.append(seconds)
            if len(self._disturbed) < _WINDOW:
                return
            self._plain.extend(self._disturbed)
        else:
            self._plain.append(seconds)
        self._disturbed.clear()

    def _close(self) -> None:
        self._closed.update(call.n for call in self._open)
        self._open = [call for call in self._open if len(call.plain) < 3]

    def seconds(self, n: int) -> float:
        """The median of the last calls of n tokens, or an estimate if there are none.

        A median far above what other sizes imply was disturbed and is reduced: no call takes much longer
        than one of more tokens, or than several smaller ones. Otherwise that size would never be tried
        again.

        Estimates are linear between two sizes. Below the smallest size they are constant, since small calls
        mostly read the weights. Beyond the largest they continue with the average slope; if only one size is
        known, in proportion to the tokens.

        Raises:
            ValueError: n is below 1, or nothing has been observed.
        """
        if n < 1:
            raise ValueError(f"the cost of {n} tokens is unknown: a call has at least one")
        return float(self.first(n)[n])

    def first(self, n: int) -> Floats:
        """`seconds` of 0 … n tokens: float64 (n + 1,), the first 0; do not modify."""
        if self._first is None or len(self._first) <= n:
            if not self.costs:
                raise ValueError(f"the cost of {n} tokens is unknown: no call has been observed")
            self._first = _between(np.arange(max(n + 1, 66)), self.costs)
            self._first[0] = 0.0
        return self._first[: n + 1]


def chain_seconds(draft: CallCosts, n_unread: int, n_max: int) -> Floats:
    """Seconds of drafting chains of 0 … n_max tokens, whose first call reads `n_unread`: (n_max + 1,)."""
    if draft.drafts_blocks:
        return draft.first(n_max)
    seconds: Floats = draft.seconds(n_unread) + np.arange(-1.0, n_max) * draft.seconds(1)
    seconds[0] = 0.0
    return seconds


def _between(wanted: NDArray[np.integer], known: Mapping[int, float]) -> Floats:
    """Costs by number of tokens, from the known ones, which ascend: see `CostModel.seconds`."""
    sizes, costs = list(known), list(known.values())
    found: Floats = np.interp(wanted, sizes, costs)
    beyond = wanted > sizes[-1]
    if len(sizes) == 1:
        found[beyond] = costs[0] * wanted[beyond] / sizes[0]
    else:
        slope = max(0.0, (costs[-1] - costs[0]) / (sizes[-1] - sizes[0]))
        found[beyond] = costs[-1] + slope * (wanted[beyond] - sizes[-1])
    return found


def _median(several: Collection[float]) -> float:
    """The median, of an even number the lower middle value: disturbances only add time."""
    return sorted(several)[(len(several) - 1) // 2]


_TOLERANCE = 1.6  # Q8_0: 7 tokens take 1.5 times as long as 8, and 2 tokens as two calls of one


def _plausible(sizes: Sequence[int], medians: Sequence[float]) -> list[float]:
    """The medians, reduced where they are far above what the others imply."""
    n, found = np.asarray(sizes, np.float64), np.asarray(medians, np.float64)
    implied = (np.ceil(n[:, None] / n) * found).min(axis=1) * np.where(n > 1, _TOLERANCE, 1.0)
    plausible: list[float] = np.minimum(found, implied).tolist()
    return plausible
