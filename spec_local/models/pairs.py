"""Check whether two models form a pair, from their headers and measured costs; no weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.calibration.tuning import chain_plans
from spec_local.llama.compatibility import difference
from spec_local.llama.context import CACHE_TYPES
from spec_local.llama.headers import open_header
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.memory import free_memory
from spec_local.llama.vocabulary import Vocabulary
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CallCosts
from spec_local.policies.sharing import RowCosts
from spec_local.proposers.vocabulary_map import VocabularyMap
from spec_local.system.files import format_size
from spec_local.system.machine import default_threads

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance rates that a report shows."""
OVERHEAD = 150_000_000
"""Upper bound in bytes for everything except weights and KV caches: Python, compute buffers, logits."""
_NEARLY = 0.01  # maximum share of different ids
_LOW_COVERAGE = 0.5  # SmolLM2 has 26 % of Qwen2.5's tokens, Gemma 3 63 %


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The comparison of a draft model's vocabulary with that of the main model.

    verdict: ``same``: token ids need no translation; ``nearly the same``: at most one id in a hundred
        differs, or special tokens are treated differently; ``other``.
    difference: the reason, in words, if it is not the same.
    differing_ids: ids, ascending, whose tokens differ or that are missing from one vocabulary.
    coverage: share of the main model's tokens that the draft model can propose.
    """

    verdict: Literal["same", "nearly the same", "other"]
    difference: str | None
    differing_ids: Sequence[int]
    coverage: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a session needs for weights, KV caches and the rest, of both models, and free memory."""

    weights: int
    caches: int
    overhead: int
    free: int

    @property
    def needed(self) -> int:
        return self.weights + self.caches + self.overhead

    @property
    def suffices(self) -> bool:
        return self.needed <= self.free


@dataclass(frozen=True, slots=True)
class ExpectedSpeedup:
    """The best possible speed-up at an acceptance rate.

    draft_length: draft tokens per step in a chain; 0: plain decoding is faster. speedup: over plain decoding.
    """

    acceptance_rate: float
    draft_length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model of a pair.

    size: bytes of its tensors. n_ctx: context length. has_window: sliding-window attention in some layers.
    """

    path: Path
    description: str
    size: int
    n_ctx: int
    has_window: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check. expected_speedups: None if costs were not measured on this machine."""

    main: ModelSummary
    draft: ModelSummary
    vocabulary_match: VocabularyMatch
    memory: Memory
    expected_speedups: Sequence[ExpectedSpeedup] | None
    others: float
    """Cores that other programs used while the costs behind them were measured."""


def check(
    main: Path,
    draft: Path,
    *,
    n_ctx: int = 4096,
    threads: int | None = None,
    gpu_layers: int = -1,
    cache_type: str = "f16",
) -> Report:
    """Check a pair without loading weights.

    Args:
        n_ctx: context length in tokens, at most what each model was trained for.
        threads, gpu_layers, cache_type: settings of the sessions whose measured costs are used.

    Raises:
        ModelFileError: a file cannot be read.
        ModelError: a model cannot discard tokens, or does not generate text, or the draft is a head for
            another model.
        VocabularyMismatch: the vocabularies have no token in common.
    """
    models = [open_header(path) for path in (main, draft)]
    lengths = [model.n_ctx(n_ctx) for model in models]
    caches = [m.kv_bytes(n, CACHE_TYPES[cache_type]) for m, n in zip(models, lengths, strict=True)]
    memory = Memory(sum(model.size for model in models), sum(caches), OVERHEAD, free_memory())
    head = choose_head(*models)
    if head:
        match = VocabularyMatch("same", None, [], 1.0)
    else:
        match = compare(*(model.vocabulary for model in models))
    members = [
        ModelSummary(m.path, m.description, m.size, n, m.has_window)
        for m, n in zip(models, lengths, strict=True)
    ]
    for model in models:
        model.close()
    threads = threads or default_threads()
    conditions = [Conditions(m.path, gpu_layers, threads, m.n_ctx, cache_type) for m in members]
    if head:  # one that drafts blocks drafts trees with them
        conditions[1] = replace(conditions[1], is_head=True, branching=head.drafts_blocks)
    of_main, of_draft = cost_store.measured(conditions[0]), cost_store.of_drafting(conditions[1])
    known = None
    if of_main and of_draft:
        drafting = RowCosts(of_draft.costs, drafts_blocks=head is not None and head.drafts_blocks)
        most = min(MAX_CALLS, head.max_draft) if head else MAX_CALLS
        known = expected_speedups(of_main.costs, drafting, ACCEPTANCE_RATES, most)
    others = max((each.others for each in (of_main, of_draft) if each), default=0.0)
    return Report(members[0], members[1], match, memory, known, others)


def advice(main: Path, draft: Path, sizes: Sequence[int], coverage: float = 1.0) -> str | None:
    """What is obviously wrong with a pair of models, and what to do, in one line; None: nothing.

    Args:
        sizes: bytes of the main and the draft model.
        coverage: share of the main model's tokens that the draft model can propose.
    """
    if draft.samefile(main):
        return (
            "main and draft are the same file, so that drafting gains nothing: give a smaller draft, or none"
        )
    if sizes[1] > sizes[0]:
        mine, other = map(format_size, sizes)
        return (
            f"the draft {draft.name} ({other}) is larger than the main model {main.name} ({mine}): swap "
            "them, or give a draft model that is 5 to 30 times smaller"
        )
    if coverage < _LOW_COVERAGE:
        return (
            f"the draft {draft.name} has only {coverage:.0%} of the main model's tokens: one of the same "
            "family, with the same vocabulary, is accepted more often"
        )
    return None


def compare(main: Vocabulary, draft: Vocabulary) -> VocabularyMatch:
    """Compare the vocabulary of a draft model with that of the main model.

    Raises:
        VocabularyMismatch: they have no token in common.
    """
    reason = difference(main, draft)
    smaller, larger = sorted((main.n_tokens, draft.n_tokens))
    differing = [token for token in range(smaller) if main.text(token) != draft.text(token)]
    differing += range(smaller, larger)
    if reason is None:
        return VocabularyMatch("same", None, differing, smaller / main.n_tokens)
    is_near = main.type == draft.type and len(differing) <= _NEARLY * larger
    coverage = VocabularyMap(main, draft).share
    return VocabularyMatch("nearly the same" if is_near else "other", reason, differing, coverage)


def expected_speedups(
    main: CallCosts, draft: CallCosts, acceptance_rates: Sequence[float], max_draft: int = MAX_CALLS
) -> list[ExpectedSpeedup]:
    """The best possible speed-up with these costs and up to `max_draft` draft tokens, for each rate."""
    plain = 1.0 / main.seconds(1)
    plans = chain_plans(main, draft, acceptance_rates, max_draft)
    return [
        ExpectedSpeedup(rate, len(plan.parents), plan.speed / plain)
        for rate, plan in zip(acceptance_rates, plans, strict=True)
    ]
