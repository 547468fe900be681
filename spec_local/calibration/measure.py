"""Measure how long calls of a model take, by number of tokens."""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from spec_local.core.calls import run
from spec_local.core.sequence import ModelSequence
from spec_local.errors import ContextOverflow
from spec_local.policies.cost_model import CostModel

_REPEATS = 3  # times that unclear sizes are measured again: a disturbance of a second or two has passed then


def measure(
    model: ModelSequence,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 3, 5, 32, 64),
    rounds: int = 3,
    n_logits: int | None = None,
    text: Sequence[int] = (),
    budget: float = math.inf,
    precision: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    log: Callable[[str], None] = lambda line: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CostModel:
    """Time calls that append a chain to the history. The history is unchanged; an uncommitted tree is
    discarded.

    Sizes that seem slower than larger ones are measured again. If that does not help, they get the time of
    the larger one, unless they may really be slower: see `without_falls`.

    Args:
        model: must be able to roll back. One that has rolled back since its last call may go back to
            a checkpoint instead.
        sizes: tokens a call, the most important first; sizes that are too large for the model or its context
            are replaced by the largest possible one.
        rounds: counted calls of each size, interleaved so that a disturbance affects all alike. A call of
            the first and one of the third size come before and do not count: they touch memory for the first
            time.
        n_logits: number of logits a call, for its last tokens; None: one for each token.
        text: tokens that the calls evaluate in turn, again and again; empty: only the last one of the
            history. In a mixture of experts, equal tokens use the same few experts, so that a call of them
            takes less time than one of a text.
        budget: seconds after which no further call starts, except in the first round of the first three
            sizes.
        precision: sizes whose median time is less certain than this share of it, by the calls' spread, are
            measured again, too.
        clock: seconds.
        log: receives a line before calls are repeated, and one if they remain unclear.
        stopped: called before each call that counts; True ends the measurement.

    Raises:
        ValueError: no sizes, one below 1, or no rounds.
        ContextOverflow: the context has no room for a single token.
        BackendError, ModelError: the model failed, or cannot roll back.
    """
    if not sizes or min(sizes) < 1 or rounds < 1:
        raise ValueError(f"cannot measure {rounds} rounds of {list(sizes)} tokens")
    limits = model.limits
    room = limits.n_ctx - len(model.cached)
    largest = min(limits.max_tokens, room, limits.max_logits if n_logits is None else limits.max_tokens)
    if largest < 1:
        raise ContextOverflow(
            f"no room to measure: all {limits.n_ctx} tokens of the context are used; measure before prefill"
        )
    model.commit(())
    model.checkpoint()
    sizes = list(dict.fromkeys(min(n, largest) for n in sizes))
    calls = _Calls(model, text, n_logits, clock, clock() + budget, stopped)
    for n in {sizes[0], sizes[min(2, len(sizes) - 1)]}:
        calls.call(n)
    for number in range(rounds):
        calls.round(sizes, 3 if number == 0 else 0)
    times = calls.times
    for number in range(1, _REPEATS + 1):
        unclear = _slower_than_larger(times) | _imprecise(times, precision)
        if not unclear or calls.ends:
            break
        log(
            f"the times of {len(unclear)} of {len(sizes)} call sizes are unclear: measuring them again "
            f"({number} of at most {_REPEATS})"
        )
        for _ in range(rounds):
            calls.round([sizes[0], *sorted(unclear - {sizes[0]})])
    uncertain = _imprecise(times, precision)
    impossible = _slower_than_larger(times, ratio=2)
    if impossible or uncertain:
        log(_still_unclear(sorted(impossible)))
    costs = calls.costs
    possible = without_falls(costs.costs, uncertain)
    return CostModel(possible) if possible != costs.costs else costs


@dataclass
class _Calls:
    """Timed calls of a model, until a time of the clock or a signal."""

    model: ModelSequence
    text: Sequence[int]
    n_logits: int | None
    clock: Callable[[], float]
    end: float
    stopped: Callable[[], bool]
    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        cached = self.model.cached
        self._tokens = itertools.cycle(self.text or [cached[-1] if cached else 0])

    @property
    def ends(self) -> bool:
        return self.stopped() or self.clock() > self.end

    def call(self, n: int) -> float:
        """Make a call of n tokens, and return its seconds."""
        called = list(itertools.islice(self._tokens, n))
        start = self.clock()
        try:
            run(self.model.call(called, range(-1, n - 1), self.n_logits))
            return self.clock() - start
        finally:
            self.model.commit(())

    def round(self, sizes: Sequence[int], n_certain: int = 0) -> None:
        """Time a call of each size; after the first ones, only within the budget."""
        for i, n in enumerate(sizes):
            if self.stopped() or (i >= n_certain and self.clock() > self.end):
                return
            self.times[n].append(self.call(n))
            self.costs.observe(n, self.times[n][-1])


def _slower_than_larger(times: Mapping[int, Sequence[float]], ratio: int = 1) -> set[int]:
    """The sizes that took longer, beyond the spread of both, than one that is larger by a ratio or more."""
    low = {n: median(several) - _error(several) for n, several in times.items()}
    high = {n: median(several) + _error(several) for n, several in times.items()}
    return {n for n in times if any(low[n] > high[m] for m in times if m > n and m >= ratio * n)}


def _imprecise(times: Mapping[int, Sequence[float]], precision: float) -> set[int]:
    """The sizes whose median is less certain than a share of it."""
    return {n for n, several in times.items() if _error(several) > precision * median(several)}


def _error(several: Sequence[float]) -> float:
    """Half of the 95 % interval of a median, from the median deviation, which tolerates disturbed calls."""
    middle = median(several)
    deviation = 1.48 * median(abs(seconds - middle) for seconds in several)  # σ of a normal distribution
    return 1.96 * 1.25 * deviation / math.sqrt(len(several))  # the median has 1.25 σ/√n


def _still_unclear(impossible: Sequence[int]) -> str:
    advice = "close other programs, and run the same command again"
    if not impossible:
        return f"equal calls still take different times, so that the costs are rough: {advice}"
    listed = ", ".join(map(str, impossible))
    return (
        f"calls of {listed} tokens still seem slower than calls of twice as many, which is impossible; their "
        f"costs are reduced: {advice}"
    )


def measure_prefill(
    model: ModelSequence, text: Sequence[int] = (), clock: Callable[[], float] = time.perf_counter
) -> float:
    """Tokens per second of prompt processing: the faster of two full calls. The history is unchanged.

    Args:
        text: see `measure`.

    Raises:
        ContextOverflow: the context is full.
        BackendError: the model failed.
    """
    model.checkpoint()
    length = len(model.cached)
    limits = model.limits
    n = min(limits.max_tokens, limits.n_ctx - length)
    if n < 1:
        raise ContextOverflow(
            f"no room to measure: all {limits.n_ctx} tokens of the context are used; measure before prefill"
        )
    seconds = []
    prompt = list(itertools.islice(itertools.cycle(text or [0]), n))
    for _ in range(2):
        start = clock()
        run(model.call(prompt, n_logits=0))
        seconds.append(clock() - start)
        model.truncate(length)
    return n / min(seconds) if min(seconds) else math.inf


def without_falls(costs: Mapping[int, float], uncertain: Collection[int] = ()) -> dict[int, float]:
    """The costs, by ascending number of tokens, reduced where a call of twice as many tokens is faster.

    A call may be slower than one of a few more tokens, which fill a tile of the kernels, but not than one of
    twice as many: such a measurement was disturbed.

    uncertain: sizes that are also reduced where a call of any larger size is faster.
    """
    return {
        n: min([costs[n], *(costs[m] for m in costs if m >= 2 * n or (m > n and n in uncertain))])
        for n in sorted(costs)
    }
