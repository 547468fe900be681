"""What one call of a model costs, by its number of tokens: measured, and kept as a table.

A call's time is no line in its tokens: kernels work in tiles, so that it climbs in steps, and a smooth fit
errs where it matters (llama.cpp #14132, #17034).
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_KEPT = 9  # calls of a size that count: four bad ones in a row do not matter yet
_NEAR = 4  # calls: a call of one token that comes later says nothing
_ODD = 1.4  # times what was expected, or less than it by as much
_DISTURBED = 4.0  # times as long as usual: what slows calls of one token so much does not last
_INSTANT = 1e-9  # seconds; a coarse clock may say 0


@dataclass(slots=True)
class _Call:
    """n: tokens. plain: seconds of calls of one token, the last one before and the first two after."""

    n: int
    seconds: float
    plain: list[float]

    def multiple(self, plain: float) -> float:
        """Of a call of one token; of one that takes so long, if those around it are not known yet, or were disturbed."""
        around = _median(self.plain) if len(self.plain) == 3 else plain
        return self.seconds / (plain if around > _DISTURBED * plain else around)


class CostModel:
    """Seconds of one call of a model, by its number of tokens; empty at first.

    Neighbours and heat slow all calls alike, and only some sizes are met while they do. So what a call took is kept as a
    multiple of what calls of one token took around it, and only these follow the machine.

    Args:
        seconds: by number of tokens, to begin with; each counts like one call.

    Raises:
        ValueError: an impossible observation: see `observe`.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._plain: deque[float] = deque(maxlen=_KEPT)  # seconds of calls of one token
        self._disturbed: list[float] = []  # the same, of those in a row that took far too long
        self._calls: dict[int, deque[_Call]] = {}  # of more, by their tokens
        self._open: list[_Call] = []  # those that a call of one token has still to follow
        self._n_odd = 0  # calls in a row, up to now
        self._closed: set[int] = set()  # sizes with calls that were open when last looked at
        self._multiples: dict[int, float] = {}  # of a call of one token, by number of tokens
        self._shape: dict[int, float] = {}  # the same, plausible, in order
        self._costs: dict[int, float] = {}
        self._first: NDArray[np.float64] | None = None
        for n in sorted(seconds or {}):
            self.observe(n, (seconds or {})[n])
        for call in self._open:
            call.plain *= 3  # what follows may be on another day
        self._close()

    @property
    def costs(self) -> dict[int, float]:
        """What is known, by number of tokens, in order: `seconds` of the sizes that were observed."""
        if not self._costs and (self._multiples or self._open):
            plain = _median(self._plain) if self._plain else 1.0
            for n in (moved := self._closed.union(call.n for call in self._open)):
                self._multiples[n] = _median([call.multiple(plain) for call in self._calls[n]])
            self._closed.clear()
            if moved or len(self._shape) < len(self._multiples):
                sizes = sorted(self._multiples)
                medians = [self._multiples[n] for n in sizes]
                self._shape = dict(zip(sizes, _plausible(sizes, medians), strict=True))
            self._costs = {n: plain * multiple for n, multiple in self._shape.items()}
        return self._costs

    def observe(self, n: int, seconds: float) -> None:
        """Count one call of n tokens.

        Raises:
            ValueError: n is below 1, or the time is negative or no number.
        """
        if n < 1 or not 0 <= seconds < math.inf:
            raise ValueError(f"a call of {n} tokens cannot take {seconds} s")
        seconds = max(seconds, _INSTANT)
        is_odd = bool(self.costs) and not 1.0 / _ODD < seconds / self.seconds(n) < _ODD
        self._n_odd = self._n_odd + 1 if is_odd else 0
        if n == 1:
            self._count_plain(seconds)
            self._multiples[1] = 1.0
            for call in self._open:
                call.plain.append(seconds)
            self._close()
        else:
            call = _Call(n, seconds, [self._plain[-1]] if self._plain else [])
            self._calls.setdefault(n, deque(maxlen=_KEPT)).append(call)
            self._open.append(call)
            if len(self._open) > _NEAR:
                self._open[0].plain *= 3
                self._close()
        self._costs, self._first = {}, None

    def _count_plain(self, seconds: float) -> None:
        """Nothing of a call that was disturbed, unless so many are that this is how the machine is now.

        A median alone forgives four of nine; with five, a draft would be called dear, and never asked again.
        """
        if self._plain and seconds > _DISTURBED * _median(self._plain):
            self._disturbed.append(seconds)
            if len(self._disturbed) < _KEPT:
                return
            self._plain.extend(self._disturbed)
        else:
            self._plain.append(seconds)
        self._disturbed.clear()

    @property
    def is_in_doubt(self) -> bool:
        """Whether calls were odd, and one of one token should tell whether the machine is."""
        return self._n_odd > 1 and bool(self._open)

    def agrees_with(self, other: "CostModel") -> bool:
        """Whether both say, about, how a call's time grows with the sizes that the other has observed."""
        return all(
            1.0 / _ODD < self.seconds(n) / self.seconds(1) * other.seconds(1) / seconds < _ODD
            for n, seconds in other.costs.items()
        )

    def _close(self) -> None:
        self._closed.update(call.n for call in self._open)
        self._open = [call for call in self._open if len(call.plain) < 3]

    def seconds(self, n: int) -> float:
        """What a call of n tokens takes: the median of the last few, or an estimate where there are none.

        A median that is far above what the other sizes imply was disturbed, and does not count: no call takes much longer
        than one of more tokens, or than several that make up as many; or else it would never be tried again.

        Between two sizes the estimate is linear. Below the smallest it is the smallest's, since most of a small
        call is reading the weights. Beyond the largest it goes on with the average slope, and where one
        size only is known, in proportion: nothing says yet that tokens share anything.

        Raises:
            ValueError: n is below 1, or nothing was observed yet.
        """
        if n < 1 or not self.costs:
            raise ValueError(f"the cost of {n} tokens is unknown: {len(self.costs)} sizes were observed")
        known = self._costs.get(n)
        return _interpolated(n, list(self._costs), list(self._costs.values())) if known is None else known

    def first(self, n: int) -> NDArray[np.float64]:
        """`seconds` of 0 … n tokens, the first of them 0: float64 (n + 1,), not to be changed."""
        if self._first is None or len(self._first) <= n:
            wanted, sizes, costs = np.arange(max(n + 1, 66)), list(self.costs), list(self.costs.values())
            self._first = np.interp(wanted, sizes, costs)
            beyond = wanted > sizes[-1]
            self._first[beyond] = [_interpolated(int(n), sizes, costs) for n in wanted[beyond]]
            self._first[0] = 0.0
        return self._first[: n + 1]


def _median(several: Collection[float]) -> float:
    """Of an even number the lower one of the two in the middle: a disturbance only ever adds time."""
    return sorted(several)[(len(several) - 1) // 2]


def _interpolated(n: int, sizes: Sequence[int], costs: Sequence[float]) -> float:
    if n <= sizes[0]:
        return costs[0]
    if n > sizes[-1]:
        if len(sizes) == 1:
            return costs[0] * n / sizes[0]
        slope = (costs[-1] - costs[0]) / (sizes[-1] - sizes[0])
        return costs[-1] + max(0.0, slope) * (n - sizes[-1])
    at = bisect_left(sizes, n)
    if sizes[at] == n:
        return costs[at]
    share = (n - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return costs[at - 1] + share * (costs[at] - costs[at - 1])


_TOLERANCE = 1.6  # real kernels go so far: Q8_0 takes 1.5 times as long for 7 tokens as for 8, and for 2 as for twice 1


def _plausible(sizes: Sequence[int], medians: Sequence[float]) -> list[float]:
    """Medians, none far above what the others imply."""
    n, found = np.asarray(sizes, np.float64), np.asarray(medians, np.float64)
    implied = (np.ceil(n[:, None] / n) * found).min(axis=1) * np.where(n > 1, _TOLERANCE, 1.0)
    plausible: list[float] = np.minimum(found, implied).tolist()
    return plausible
