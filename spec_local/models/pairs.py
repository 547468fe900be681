"""Check whether two models form a pair, from their headers and measured costs; no weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions, StoredCosts
from spec_local.calibration.estimates import CPU_ESTIMATES, GPU_ESTIMATES
from spec_local.calibration.tuning import chain_plans
from spec_local.llama.compatibility import difference
from spec_local.llama.context import CACHE_TYPES
from spec_local.llama.devices import OFFLOADED, Offload, usable_gpus
from spec_local.llama.fitting import free_bytes
from spec_local.llama.headers import open_header
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.vocabulary import Vocabulary
from spec_local.llama.vocabulary_map import VocabularyMap
from spec_local.models.projectors import find_projector
from spec_local.policies.adaptive import MAX_CALLS
from spec_local.policies.cost_model import CallCosts, CostModel
from spec_local.system.files import format_size
from spec_local.system.machine import default_threads, is_busy

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance rates that a report shows."""
USUAL_CONTEXT = 4096
"""Tokens of the contexts whose costs are used, unless another number is given."""
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
class MemoryNeed:
    """Bytes that a session needs for weights, KV caches and the rest, of both models.

    free: those that are free where the models run. projector: of the main model's projector with its
    buffers, if it has one.
    """

    weights: int
    caches: int
    overhead: int
    free: int
    projector: int = 0

    @property
    def needed(self) -> int:
        return self.weights + self.caches + self.overhead + self.projector

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
class Expectation:
    """What a draft gains at best.

    speedups: for each acceptance rate. is_measured: the costs of both models were measured on this machine
        while it was idle; else, they are estimated from the sizes of the models.
    """

    speedups: Sequence[ExpectedSpeedup]
    is_measured: bool

    @property
    def cannot_pay(self) -> bool:
        """True if measured costs rule out a gain even at the highest acceptance rate."""
        return self.is_measured and not self.speedups[-1].draft_length


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
    """The result of a check. expectation: None for a head whose costs were not measured on this machine."""

    main: ModelSummary
    draft: ModelSummary
    vocabulary_match: VocabularyMatch
    memory: MemoryNeed
    expectation: Expectation | None
    others: float
    """Cores that other programs used while costs were measured; those of a busy machine are not used."""


def check(
    main: Path,
    draft: Path,
    *,
    n_ctx: int = USUAL_CONTEXT,
    threads: int | None = None,
    offload: Offload = OFFLOADED,
    cache_type: str = "f16",
) -> Report:
    """Check a pair without loading weights.

    Args:
        n_ctx: context length in tokens, at most what each model was trained for.
        threads, offload, cache_type: settings of the sessions whose measured costs are used.

    Raises:
        ModelFileError: a file cannot be read.
        ModelError: a model cannot discard tokens, or does not generate text, or the draft is a head for
            another model.
        VocabularyMismatch: the vocabularies have no token in common.
    """
    models = [open_header(path) for path in (main, draft)]
    lengths = [model.n_ctx(n_ctx) for model in models]
    caches = [m.kv_bytes(n, CACHE_TYPES[cache_type]) for m, n in zip(models, lengths, strict=True)]
    projector = find_projector(main)
    weights = sum(model.size for model in models)
    memory = MemoryNeed(
        weights, sum(caches), OVERHEAD, free_bytes(offload), projector.memory if projector else 0
    )
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
    conditions = [Conditions(m.path, offload, threads, m.n_ctx, cache_type) for m in members]
    if head:  # one that drafts blocks drafts trees with them
        conditions[1] = replace(conditions[1], is_head=True, branching=head.drafts_blocks)
    expected = expectation(
        conditions[0],
        conditions[1],
        None if head else members[1].size / members[0].size,
        max_draft=min(MAX_CALLS, head.max_draft) if head else MAX_CALLS,
        drafts_blocks=head is not None and head.drafts_blocks,
    )
    stored = cost_store.measured(conditions[0]), cost_store.measured_drafting(conditions[1])
    others = max((each.others for each in stored if each), default=0.0)
    return Report(members[0], members[1], match, memory, expected, others)


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


def expectation(
    main: Conditions,
    draft: Conditions,
    share: float | None,
    acceptance_rates: Sequence[float] = ACCEPTANCE_RATES,
    *,
    max_draft: int = MAX_CALLS,
    drafts_blocks: bool = False,
    copied: float = 1.0,
) -> Expectation | None:
    """What a draft gains: from measured costs if there are any, or else estimated from the sizes.

    Args:
        main, draft: the models, with the settings of the sessions.
        share: bytes of the draft model, as a share of the main model's; None: its calls cannot be estimated.
        copied: bytes of a copy of the draft model that drafts in its place, as a share of its own.

    Returns:
        None: the costs have not been measured, and cannot be estimated.
    """
    of_main, of_draft = (
        _reliable(found) for found in (cost_store.read(main), cost_store.measured_drafting(draft))
    )
    if of_main and of_draft and not of_main.estimates:
        if copied != 1.0:
            of_draft = CostModel({n: seconds * copied for n, seconds in of_draft.costs.items()})
        of_draft.drafts_blocks = drafts_blocks
        return Expectation(expected_speedups(of_main, of_draft, acceptance_rates, max_draft), True)
    if share is None:
        return None
    usual = GPU_ESTIMATES if main.workers or usable_gpus(main.offload) else CPU_ESTIMATES
    of_main = of_main or CostModel({1: 1.0}, usual)
    estimated = CostModel({1: share * of_main.seconds(1)}, usual)
    return Expectation(expected_speedups(of_main, estimated, acceptance_rates, max_draft), False)


def _reliable(found: StoredCosts | None) -> CostModel | None:
    return found.costs if found and not is_busy(found.others) else None


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
