"""A thorough measurement of models on this machine: what `specdec tune` shows, and what the adaptive policy starts from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from spec_local.calibration import cost_store
from spec_local.calibration.measure import measure, measure_prefill
from spec_local.core.proposal import MAX_DRAFT
from spec_local.llama.context import Context
from spec_local.llama.model import Model
from spec_local.machine import default_threads
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CostModel
from spec_local.policies.planner import Plan, plan_chain

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 63, 64)
"""Tokens a call: around the steps of usual kernels, and up to the longest copy."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one model costs with one number of threads.

    costs: seconds a call by its tokens. prefill: tokens a second when it reads a prompt.
    """

    threads: int
    costs: CostModel
    prefill: float


def thread_choices() -> list[int]:
    """Numbers of threads worth trying: half of the physical cores, all of them, and all logical ones."""
    physical = default_threads()
    return sorted({max(1, physical // 2), physical, psutil.cpu_count() or physical})


def tune(
    model: Model,
    threads: Sequence[int],
    *,
    n_ctx: int,
    max_logits: int,
    cache_type: str = "f16",
    rounds: int = 5,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[Tuned]:
    """Measure a model with several numbers of threads, and keep what was found for later sessions.

    Args:
        n_ctx, max_logits, cache_type: of the contexts; costs are kept for these, so give those of the sessions to come.
        rounds: of each size.

    Raises:
        SpecLocalError: a context could not be made.
    """
    for n in threads:
        log(f"measuring {model.path.name} with {n} thread{'s' if n > 1 else ''}")
        with ExitStack() as stack:
            context = Context(model, n_ctx=n_ctx, max_logits=max_logits, threads=n, cache_type=cache_type)
            stack.callback(context.close)
            costs = measure(context, SIZES, rounds, rows=1 if max_logits == 1 else None)
            cost_store.save(context, costs)
            yield Tuned(n, costs, measure_prefill(context))


def chain_plans(main: CostModel, draft: CostModel | None, chances: Sequence[float]) -> list[Plan]:
    """The best chain for each chance that a guess stands; without a draft, guesses cost nothing."""
    free = CostModel({1: 0.0})
    most = MAX_CALLS if draft else MAX_DRAFT - 1
    return [plan_chain((chance,), main, draft or free, most, most) for chance in chances]
