"""Run a trained draft model on the benchmark's prompts, which differ from its training prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spec_local.bench import prompts
from spec_local.bench.figures import VariantFigures, summarise
from spec_local.bench.runner import Outcome, measure, tokenize
from spec_local.bench.variants import PLAIN, Variant
from spec_local.core.sampling import SamplingSettings
from spec_local.session import Session
from spec_local.settings import GenerationSettings

VARIANTS = ("3 draft tokens", "adaptive")
_MAX_TOKENS = 64
_N_CTX = 2048


def run(
    main: Path, draft: Path, *, threads: int | None = None, gpu_layers: int = -1
) -> Sequence[VariantFigures]:
    """Answer one prompt per category at temperature 0: plainly, and with each of `VARIANTS`, no lookups.

    Returns:
        Figures of each of `VARIANTS`; empty if no prompt fits into the main model's context.

    Raises:
        SpecLocalError: as `Session.open` and `Session.generate`.
    """
    base = GenerationSettings(
        SamplingSettings(temperature=0), max_tokens=_MAX_TOKENS, seed=0, proposer="draft"
    )
    variants = [
        Variant(PLAIN, replace(base, proposer="none")),
        Variant(VARIANTS[0], replace(base, policy="fixed", draft_max=3)),
        Variant(VARIANTS[1], base),
    ]
    with Session.open(main, draft, n_ctx=_N_CTX, threads=threads, gpu_layers=gpu_layers) as session:
        fitting = [
            prompt
            for prompt in tokenize(session.main.model, prompts.select(prompts.load(), per_category=1))
            if len(prompt.tokens) + _MAX_TOKENS <= session.main.n_ctx
        ]
        if not fitting:
            return []
        outcomes = [event for event in measure(session, fitting, variants) if isinstance(event, Outcome)]
    return [summarise(outcomes, variant) for variant in VARIANTS]
