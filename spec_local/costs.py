"""What one call of a model costs, by its number of tokens: measured, and kept as a table.

A call's time is no line in its tokens: kernels work in tiles, so that it climbs in steps, and a smooth fit
errs where it matters (llama.cpp #14132, #17034).
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import ContextOverflow
from spec_local.language_model import LanguageModel

_KEPT = 9  # observations of a size: four bad ones in a row do not count yet
_RECENT = 7  # calls of any size
_CHANGED = 1.5  # by so much the machine has become slower or faster, and is not just noisy


class CostTable:
    """Seconds of one call of a model, by its number of tokens; empty at first.

    A machine that becomes hot slows all calls alike, and only some sizes are met while it does. So if the last few calls,
    whatever their sizes, took much longer than their entries say, or much less, all entries change with them.

    Args:
        observations: seconds by number of tokens, oldest first, to begin with.

    Raises:
        ValueError: an impossible observation: see `observe`.
    """

    def __init__(self, observations: Mapping[int, Sequence[float]] | None = None) -> None:
        self._observed: dict[int, deque[float]] = {}
        self._recent: deque[tuple[int, float, float]] = deque(
            maxlen=_RECENT
        )  # tokens, seconds, / their entry
        self._sizes: list[int] = []  # those observed, sorted
        self._costs: list[float] = []  # of each, what is made of its observations
        self._first: NDArray[np.float64] | None = None
        for n, several in (observations or {}).items():
            for seconds in several:
                _check(n, seconds)
            self._observed[n] = deque(several, _KEPT)
        if self._observed:
            self._summarise()

    @property
    def observations(self) -> dict[int, list[float]]:
        """What counts now, by number of tokens, oldest first."""
        return {n: list(self._observed[n]) for n in self._sizes}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of tokens that were observed, in order."""
        return tuple(self._sizes)

    def observe(self, n: int, seconds: float) -> None:
        """Count one call of n tokens.

        Raises:
            ValueError: n is below 1, or the time is negative or no number.
        """
        _check(n, seconds)
        usual = _median(self._observed[n]) if n in self._observed else 0.0
        self._observed.setdefault(n, deque(maxlen=_KEPT)).append(seconds)
        if usual:
            self._recent.append((n, seconds, seconds / usual))
            self._follow()
        self._summarise()

    def _follow(self) -> None:
        """Change all entries alike, if the last calls say that the machine has changed."""
        change = _median([ratio for _, _, ratio in self._recent])
        if len(self._recent) < _RECENT or 1.0 / _CHANGED < change < _CHANGED:
            return
        for n, seconds, _ in self._recent:  # these are of the machine as it is now
            if seconds in self._observed[n]:
                self._observed[n].remove(seconds)
        for several in self._observed.values():
            several.extend([change * several.popleft() for _ in range(len(several))])
        for n, seconds, _ in self._recent:
            self._observed[n].append(seconds)
        self._recent.clear()

    def _summarise(self) -> None:
        self._first = None
        self._sizes = sorted(self._observed)
        self._costs = _plausible(self._sizes, [_median(self._observed[n]) for n in self._sizes])

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
        if n < 1 or not self._sizes:
            raise ValueError(f"the cost of {n} tokens is unknown: {len(self._sizes)} sizes were observed")
        return _interpolated(n, self._sizes, self._costs)

    def first(self, n: int) -> NDArray[np.float64]:
        """`seconds` of 0 … n tokens, the first of them 0: float64 (n + 1,), not to be changed."""
        if self._first is None or len(self._first) <= n:
            wanted = np.arange(max(n + 1, 66))
            self._first = np.interp(wanted, self._sizes, self._costs)
            beyond = wanted > self._sizes[-1]
            self._first[beyond] = [_interpolated(int(n), self._sizes, self._costs) for n in wanted[beyond]]
            self._first[0] = 0.0
        return self._first[: n + 1]


def _check(n: int, seconds: float) -> None:
    if n < 1 or not 0 <= seconds < math.inf:
        raise ValueError(f"a call of {n} tokens cannot take {seconds} s")


def _median(several: Sequence[float]) -> float:
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


def measure(
    model: LanguageModel,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 3, 5, 32, 64),
    rounds: int = 3,
    rows: int | None = None,
    budget: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time calls that grow a chain on top of the text, which stays as it is; a tree on top is forgotten.

    Args:
        model: must be able to forget a tree. A recurrent one is not: it loses its text and raises.
        sizes: tokens a call, the most important first; those that the model does not allow, or has no room for,
            become the most that it does.
        rounds: counted calls of each size, interleaved so that a disturbance hits all alike. A call of the
            first and one of the last size come before and do not count: they touch memory for the first time.
        rows: of logits a call wants, for its last tokens; None: one for each token.
        budget: seconds after which nothing more is begun but the first round of the first three sizes.
        clock: seconds.

    Raises:
        ValueError: no sizes, one below 1, or no rounds.
        ContextOverflow: the text leaves no room for a single token.
        BackendError, ModelError: the model failed, or cannot forget.
    """
    if not sizes or min(sizes) < 1 or rounds < 1:
        raise ValueError(f"cannot measure {rounds} rounds of {list(sizes)} tokens")
    cached = model.cached
    most = min(
        model.max_tokens, model.n_ctx - len(cached), model.max_logits if rows is None else model.max_tokens
    )
    if most < 1:
        raise ContextOverflow(
            f"no room to measure the model: the text fills its {model.n_ctx} tokens; measure before prefill"
        )
    token = cached[-1] if cached else 0
    table = CostTable()
    model.keep(())

    def call(n: int) -> float:
        start = clock()
        try:
            model.grow([token] * n, range(-1, n - 1), rows)
            return clock() - start
        finally:
            model.keep(())

    sizes = list(dict.fromkeys(min(n, most) for n in sizes))
    started = clock()
    for n in {sizes[0], sizes[min(2, len(sizes) - 1)]}:
        call(n)
    for round_ in range(rounds):
        for i, n in enumerate(sizes):
            if (round_ or i > 2) and clock() - started > budget:
                return table
            table.observe(n, call(n))
    return table


def measure_prefill(model: LanguageModel, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens a second at which a model reads a prompt: the better one of two full calls; the text is as before.

    Raises:
        ContextOverflow: the text leaves no room.
        BackendError: the model failed.
    """
    length = len(model.cached)
    n = min(model.max_tokens, model.n_ctx - length)
    if n < 1:
        raise ContextOverflow(f"no room to measure: the text fills its {model.n_ctx} tokens")
    seconds = []
    for _ in range(2):
        start = clock()
        model.evaluate([0] * n, 0)
        seconds.append(clock() - start)
        model.trim(length)
    return n / min(seconds) if min(seconds) else math.inf
