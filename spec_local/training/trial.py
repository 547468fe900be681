"""A finished draft at work: how many of its guesses stand, and what it gains, on the benchmark's prompts.

None of these is like what it learned from, so that they tell what a person will see.
"""

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

VARIANTS = ("3 guesses a step", "adaptive")
_TOKENS = 64  # of an answer
_N_CTX = 2048


def run(
    main: Path,
    draft: Path,
    *,
    threads: int | None = None,
    gpu_layers: int = -1,
) -> Sequence[VariantFigures]:
    """Answer one prompt of each category plainly and in both `VARIANTS`, with no other guesses than the draft's.

    Returns:
        the figures of each of `VARIANTS`; none where no prompt fits into main's context.

    Raises:
        SpecLocalError: as of `Session.open` and `Session.generate`.
    """
    base = GenerationSettings(SamplingSettings(temperature=0), max_tokens=_TOKENS, seed=0, proposer="draft")
    variants = [
        Variant(PLAIN, replace(base, proposer="none")),
        Variant(VARIANTS[0], replace(base, policy="fixed", draft_max=3)),
        Variant(VARIANTS[1], base),
    ]
    with Session.open(main, draft, n_ctx=_N_CTX, threads=threads, gpu_layers=gpu_layers) as session:
        asked = [
            question
            for question in tokenize(session.main.model, prompts.select(prompts.load(), per_category=1))
            if len(question.tokens) + _TOKENS <= session.main.n_ctx
        ]
        if not asked:
            return []
        outcomes = [event for event in measure(session, asked, variants) if isinstance(event, Outcome)]
    return [summarise(outcomes, variant) for variant in VARIANTS]
