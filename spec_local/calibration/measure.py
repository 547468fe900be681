"""Time a model's calls by their number of tokens."""

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
    table = CostModel()
    model.commit(())

    def call(n: int) -> float:
        start = clock()
        try:
            model.decode_tree([token] * n, range(-1, n - 1), rows)
            return clock() - start
        finally:
            model.commit(())

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
        model.truncate(length)
    return n / min(seconds) if min(seconds) else math.inf
