"""Thorough measurements: `specdec tune` shows them, and the adaptive policy starts from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from spec_local.calibration import cost_store
from spec_local.calibration.measure import measure, measure_prefill
from spec_local.calibration.sample_text import sample_tokens
from spec_local.core.proposal import MAX_DRAFT
from spec_local.llama.heads.choose import Chosen
from spec_local.llama.limit_drafts import limit_drafts
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CallCosts, CostModel
from spec_local.policies.planner import Plan, plan_chain
from spec_local.system.machine import OtherPrograms
from spec_local.system.processors import usable_processors

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 48, 63, 64)
"""Tokens a call: where kernels change their tile size, up to the longest draft and one more."""
# A share of a time. Draft lengths chosen with such errors are 1 % slower than the best on average, and 4 % in
# one case of 20 (simulated, with the costs of three quantizations and of a GPU).
_PRECISION = 0.1


@dataclass(frozen=True, slots=True)
class Measurement:
    """Costs of a model with one number of threads.

    costs: seconds of a call, by number of tokens. prefill: tokens per second of prompt processing. head: the
    costs of the head that drafts for it.
    """

    threads: int
    costs: CostModel
    prefill: float
    head: CostModel | None = None


def thread_choices() -> list[int]:
    """Numbers of threads worth measuring: half of the usable cores, all of them, and all their threads."""
    usable = usable_processors()
    return sorted({max(1, usable.cores // 2), usable.cores, usable.hardware_threads})


def tune(
    model: Model,
    threads: Sequence[int],
    *,
    n_ctx: int,
    max_logits: int,
    cache_type: str = "f16",
    rounds: int = 5,
    head: Chosen | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[Measurement]:
    """Measure a model with several numbers of threads, and write the costs for later sessions.

    Args:
        head: drafts for the model, and is measured too.
        n_ctx, max_logits, cache_type: of the contexts; only sessions with the same values use the costs. One
            set of logits: the model drafts.
        rounds: number of calls of each size.
        log: called with a line per number of threads, and about times that are unclear.

    Raises:
        SpecLocalError: a context cannot be created.
    """
    for n in threads:
        log(f"measuring {model.path.name} with {n} thread{'s' if n > 1 else ''}")
        with ExitStack() as stack:
            sequence = open_sequence(
                model,
                n_ctx=n_ctx,
                max_logits=max_logits,
                threads=n,
                cache_type=cache_type,
                hidden=head.hidden if head else None,
            )
            stack.callback(sequence.close)
            n_logits = None
            if max_logits == 1:
                n_logits = 1
                limit_drafts(sequence, model.vocabulary)
            text = sample_tokens(sequence)
            programs = OtherPrograms()
            costs = measure(sequence, SIZES, rounds, n_logits, text, precision=_PRECISION, log=log)
            cost_store.save(sequence, costs, others=programs.cores())
            prefill = measure_prefill(sequence, text)
            of_head = None
            if head:
                (drafter,) = head.open([sequence])
                stack.callback(drafter.close)
                limit_drafts(drafter, model.vocabulary)
                with drafter.known_states():
                    of_head = measure(drafter, SIZES, rounds, 1, precision=_PRECISION, log=log)
                of_head.drafts_blocks = head.drafts_blocks
                cost_store.save(drafter, of_head, others=programs.cores())
            yield Measurement(n, costs, prefill, of_head)


def chain_plans(
    main: CallCosts, draft: CallCosts | None, acceptance_rates: Sequence[float], max_draft: int = MAX_CALLS
) -> list[Plan]:
    """The best chain for each acceptance rate; without a draft model, drafting costs nothing."""
    free = CostModel({1: 0.0})
    longest = max_draft if draft else MAX_DRAFT - 1
    return [plan_chain((rate,), main, draft or free, longest, longest) for rate in acceptance_rates]
