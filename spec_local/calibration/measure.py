"""Measure how long calls of a model take, by number of tokens."""

import math
import time
from collections.abc import Callable, Sequence

from spec_local.core.language_model import LanguageModel
from spec_local.errors import ContextOverflow
from spec_local.policies.cost_model import CostModel


def measure(
    model: LanguageModel,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 3, 5, 32, 64),
    rounds: int = 3,
    rows: int | None = None,
    budget: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Time calls that append a chain to the history. The history is unchanged; an uncommitted tree is
    discarded.

    Args:
        model: must be able to take tokens back. One that has rolled back since its last call may go back to
            a checkpoint instead.
        sizes: tokens a call, the most important first; sizes that are too large for the model or its context
            are replaced by the largest possible one.
        rounds: counted calls of each size, interleaved so that a disturbance affects all alike. A call of
            the first and one of the third size come before and do not count: they touch memory for the first
            time.
        rows: rows of logits a call, for its last tokens; None: one for each token.
        budget: seconds after which no further call starts, except in the first round of the first three
            sizes.
        clock: seconds.

    Raises:
        ValueError: no sizes, one below 1, or no rounds.
        ContextOverflow: the context has no room for a single token.
        BackendError, ModelError: the model failed, or cannot take tokens back.
    """
    if not sizes or min(sizes) < 1 or rounds < 1:
        raise ValueError(f"cannot measure {rounds} rounds of {list(sizes)} tokens")
    cached = model.cached
    room = model.n_ctx - len(cached)
    largest = min(model.max_tokens, room, model.max_logits if rows is None else model.max_tokens)
    if largest < 1:
        raise ContextOverflow(
            f"no room to measure: all {model.n_ctx} tokens of the context are used; measure before prefill"
        )
    token = cached[-1] if cached else 0
    costs = CostModel()
    model.commit(())
    model.checkpoint()

    def call(n: int) -> float:
        start = clock()
        try:
            model.decode_tree([token] * n, range(-1, n - 1), rows)
            return clock() - start
        finally:
            model.commit(())

    sizes = list(dict.fromkeys(min(n, largest) for n in sizes))
    started = clock()
    for n in {sizes[0], sizes[min(2, len(sizes) - 1)]}:
        call(n)
    for round_ in range(rounds):
        for i, n in enumerate(sizes):
            if (round_ or i > 2) and clock() - started > budget:
                return costs
            costs.observe(n, call(n))
    return costs


def measure_prefill(model: LanguageModel, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second of prompt processing: the faster of two full calls. The history is unchanged.

    Raises:
        ContextOverflow: the context is full.
        BackendError: the model failed.
    """
    model.checkpoint()
    length = len(model.cached)
    n = min(model.max_tokens, model.n_ctx - length)
    if n < 1:
        raise ContextOverflow(
            f"no room to measure: all {model.n_ctx} tokens of the context are used; measure before prefill"
        )
    seconds = []
    for _ in range(2):
        start = clock()
        model.evaluate([0] * n, 0)
        seconds.append(clock() - start)
        model.truncate(length)
    return n / min(seconds) if min(seconds) else math.inf
