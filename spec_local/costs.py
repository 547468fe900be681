"""What one call of a model costs, by its number of tokens: measured, and kept as a table.

A call's time is no line in its tokens: kernels work in tiles, so that it climbs in steps, and a smooth fit
errs where it matters (llama.cpp #14132, #17034).
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low

from spec_local.errors import ContextOverflow
from spec_local.language_model import LanguageModel

_KEPT = 7  # observations per size: three bad ones in a row do not count yet, and a slower machine soon does


class CostTable:
    """Seconds of one call of a model, by its number of tokens; empty at first."""

    def __init__(self) -> None:
        self._observed: dict[int, deque[float]] = {}
        self._sizes: list[int] = []  # those observed, sorted
        self._medians: list[float] = []  # of each

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of tokens that were observed, in order."""
        return tuple(self._sizes)

    def observe(self, n: int, seconds: float) -> None:
        """Count one call of n tokens.

        Raises:
            ValueError: n is below 1, or the time is negative or no number.
        """
        if n < 1 or not 0 <= seconds < math.inf:
            raise ValueError(f"a call of {n} tokens cannot take {seconds} s")
        at = bisect_left(self._sizes, n)
        if n not in self._observed:
            self._observed[n] = deque(maxlen=_KEPT)
            self._sizes.insert(at, n)
            self._medians.insert(at, seconds)
        self._observed[n].append(seconds)
        # Of an even number the lower one of the two in the middle: a disturbance only ever adds time.
        self._medians[at] = median_low(self._observed[n])

    def seconds(self, n: int) -> float:
        """What a call of n tokens takes: the median of the last few, or an estimate where there are none.

        Between two sizes the estimate is linear. Below the smallest it is the smallest's, since most of a small
        call is reading the weights. Beyond the largest it goes on with the average slope, and where one
        size only is known, in proportion: nothing says yet that tokens share anything.

        Raises:
            ValueError: n is below 1, or nothing was observed yet.
        """
        sizes, medians = self._sizes, self._medians
        if n < 1 or not sizes:
            raise ValueError(f"the cost of {n} tokens is unknown: {len(sizes)} sizes were observed")
        if n <= sizes[0]:
            return medians[0]
        if n > sizes[-1]:
            if len(sizes) == 1:
                return medians[0] * n / sizes[0]
            slope = (medians[-1] - medians[0]) / (sizes[-1] - sizes[0])
            return medians[-1] + max(0.0, slope) * (n - sizes[-1])
        at = bisect_left(sizes, n)
        if sizes[at] == n:
            return medians[at]
        share = (n - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return medians[at - 1] + share * (medians[at] - medians[at - 1])


def measure(
    model: LanguageModel,
    sizes: Sequence[int] = (1, 2, 4, 8, 16),
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time calls that grow a chain on top of the text, which stays as it is; a tree on top is forgotten.

    Args:
        model: must be able to forget a tree. A recurrent one is not: it loses its text and raises.
        sizes: tokens a call; those that the model does not allow, or has no room for, become the most that it does.
        rounds: counted calls of each size, interleaved so that a disturbance hits all alike. One more of each
            comes first and does not count: it touches memory for the first time.
        clock: seconds.

    Raises:
        ValueError: no sizes, one below 1, or no rounds.
        ContextOverflow: the text leaves no room for a single token.
        BackendError, ModelError: the model failed, or cannot forget.
    """
    if not sizes or min(sizes) < 1 or rounds < 1:
        raise ValueError(f"cannot measure {rounds} rounds of {list(sizes)} tokens")
    cached = model.cached
    most = min(model.max_tokens, model.max_logits, model.n_ctx - len(cached))
    if most < 1:
        raise ContextOverflow(
            f"no room to measure the model: the text fills its {model.n_ctx} tokens; measure before prefill"
        )
    token = cached[-1] if cached else 0
    table = CostTable()
    model.keep(())
    for counted in range(rounds + 1):
        for n in sorted({min(n, most) for n in sizes}):
            start = clock()
            try:
                model.grow([token] * n, range(-1, n - 1))
                seconds = clock() - start
            finally:
                model.keep(())
            if counted:
                table.observe(n, seconds)
    return table
