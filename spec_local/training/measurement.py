"""Measure what a head costs and brings on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spec_local.bench import prompts
from spec_local.bench.figures import VariantFigures, summarise
from spec_local.bench.runner import Outcome, measure, tokenize
from spec_local.bench.variants import PLAIN, Variant
from spec_local.calibration.tuning import tune
from spec_local.core.sampling_settings import SamplingSettings
from spec_local.llama.devices import AUTO, OFFLOADED, Offload
from spec_local.llama.fitting import load_fitting
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import Model
from spec_local.policies.cost_model import CallCosts
from spec_local.session import Session
from spec_local.settings import GenerationSettings
from spec_local.system.machine import default_threads

VARIANTS = ("3 draft tokens", "adaptive")
_MAX_DRAFT = 7  # maximum number of draft tokens per step for the expected speed-up
N_CTX, _MAX_LOGITS = 4096, 65  # as by default in sessions, which then start with the measured costs


@dataclass(frozen=True, slots=True)
class HeadGain:
    """The expected cost and speed-up of a head.

    cost: time of a call of the head, as a share of one of the main model. n_draft: best number of draft
    tokens. speedup: over plain decoding, with this number; below 1, the head does not pay. rate: tokens per
    second.
    """

    cost: float
    n_draft: int
    speedup: float
    rate: float


def measure_calls(
    main: Path, head: Path, *, threads: int | None = None, offload: Offload = OFFLOADED
) -> tuple[CallCosts, CallCosts]:
    """Measure the calls of a main model and of its head.

    Raises:
        SpecLocalError: the models cannot be loaded.
    """
    model, draft = load_fitting(main, offload, N_CTX), Model(head, offload=offload)
    chosen = choose_head(model, draft)
    n_threads = threads or default_threads()
    (costs,) = tune(model, [n_threads], n_ctx=model.n_ctx(N_CTX), max_logits=_MAX_LOGITS, head=chosen)
    draft.close()
    model.close()
    assert costs.head
    return costs.costs, costs.head


def expected_gain(calls: tuple[CallCosts, CallCosts], acceptance: Sequence[float]) -> HeadGain:
    """Compute the speed-up at the best fixed number of draft tokens.

    It is the number of tokens per step (Leviathan et al. 2023, equation 1) over the relative cost of a step.

    Args:
        calls: the result of `measure_calls`.
        acceptance: acceptance rates of successive draft tokens, each given that those before it were
            accepted; further ones are as the last.
    """
    main, head = calls
    plain, call = main.seconds(1), head.seconds(1)
    best, expected, product = HeadGain(call / plain, 0, 0.0, 0.0), 1.0, 1.0
    for k in range(1, _MAX_DRAFT + 1):
        product *= acceptance[min(k, len(acceptance)) - 1]
        expected += product
        rate = expected / (main.seconds(k + 1) + k * call)
        if rate > best.rate:
            best = replace(best, n_draft=k, speedup=rate * plain, rate=rate)
    return best


def benchmark(
    main: Path,
    head: Path,
    *,
    threads: int | None = None,
    offload: Offload = OFFLOADED,
    n_ctx: int = N_CTX,
    max_tokens: int = 64,
) -> Sequence[VariantFigures]:
    """Answer one prompt per category at temperature 0: plainly, and with each of `VARIANTS`, no lookups.

    The prompts differ from all training prompts.

    Returns:
        Figures of each of `VARIANTS`; empty if no prompt fits into the main model's context.

    Raises:
        SpecLocalError: as `Session.open` and `Session.generate`.
    """
    base = GenerationSettings(
        SamplingSettings(temperature=0), max_tokens=max_tokens, seed=0, proposer="draft"
    )
    variants = [
        Variant(PLAIN, replace(base, proposer="none")),
        Variant(VARIANTS[0], replace(base, policy="fixed", draft_max=3)),
        Variant(VARIANTS[1], base),
    ]
    with Session.open(
        main,
        head,
        n_ctx=n_ctx,
        threads=threads,
        device=offload.gpu or AUTO,
        gpu_layers=offload.layers,
        prompt_cache="off",
    ) as session:
        fitting = [
            prompt
            for prompt in tokenize(session.main.model, prompts.select(prompts.load(), per_category=1))
            if len(prompt.tokens) + max_tokens <= session.main.n_ctx
        ]
        if not fitting:
            return []
        outcomes = [event for event in measure(session, fitting, variants) if isinstance(event, Outcome)]
    return [summarise(outcomes, variant) for variant in VARIANTS]
