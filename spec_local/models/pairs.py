"""Whether two model files make a pair, and what it would bring: from their headers, and from costs that are known already."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.calibration.tuning import chain_plans
from spec_local.llama.compatibility import difference
from spec_local.llama.context import CACHE_TYPES
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary
from spec_local.machine import default_threads
from spec_local.policies.cost_model import CostModel
from spec_local.proposers.vocabulary_map import VocabularyMap

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""That a guess stands: those that a report shows."""
OVERHEAD = 150_000_000
"""Bytes beside weights and caches: Python, compute buffers, rows of logits. Measured runs stayed below."""
_NEARLY = 0.01  # of the ids


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """How a draft's vocabulary compares with main's.

    verdict: ``same``: guesses are token ids as they are; ``nearly the same``: at most one id in a hundred stands for
        something else, or the special tokens are treated differently; ``other``.
    difference: why it is not the same, in words.
    differing: ids, ascending, that stand for different tokens, or that one of the two has not.
    share: of main's tokens, those that the draft can guess.
    """

    verdict: Literal["same", "nearly the same", "other"]
    difference: str | None
    differing_ids: Sequence[int]
    coverage: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a session needs: of both models' weights, of both KV caches, of all else; and those that are free."""

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
    """What guessing brings at best, if each guess stands with this chance.

    guesses: a step, one after the other; 0: plain decoding is faster. times: its speed, in that of plain decoding.
    """

    acceptance_rate: float
    draft_length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model of a pair. size: bytes of its tensors. n_ctx: tokens of its context. has_window: of attention, in some layers."""

    path: Path
    description: str
    size: int
    n_ctx: int
    has_window: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a pair that works. expected_speedups: None where costs were not measured on this machine."""

    main: ModelSummary
    draft: ModelSummary
    vocabulary_match: VocabularyMatch
    memory: Memory
    expected_speedups: Sequence[ExpectedSpeedup] | None


def check(
    main: Path,
    draft: Path,
    *,
    n_ctx: int = 4096,
    threads: int | None = None,
    gpu_layers: int = -1,
    cache_type: str = "f16",
) -> Report:
    """Look at a pair without loading weights.

    Args:
        n_ctx: tokens of the contexts, at most what each model was trained for.
        threads, gpu_layers, cache_type: of the sessions to come, whose costs are looked up.

    Raises:
        ModelFileError: a file cannot be read.
        ModelError: one of them cannot take guesses back, or writes no text.
        VocabularyMismatch: no token is common.
    """
    models = [_opened(path) for path in (main, draft)]
    lengths = [model.n_ctx(n_ctx) for model in models]
    caches = [m.kv_bytes(n, CACHE_TYPES[cache_type]) for m, n in zip(models, lengths, strict=True)]
    memory = Memory(
        sum(model.size for model in models), sum(caches), OVERHEAD, psutil.virtual_memory().available
    )
    match = compare(*(model.vocabulary for model in models))
    members = [
        ModelSummary(m.path, m.description, m.size, n, m.has_window)
        for m, n in zip(models, lengths, strict=True)
    ]
    for model in models:
        model.close()
    costs = [
        cost_store.load(Conditions(m.path, gpu_layers, threads or default_threads(), m.n_ctx, cache_type))
        for m in members
    ]
    known = expected_speedups(costs[0], costs[1], ACCEPTANCE_RATES) if costs[0] and costs[1] else None
    return Report(members[0], members[1], match, memory, known)


def compare(main: Vocabulary, draft: Vocabulary) -> VocabularyMatch:
    """Hold a draft's vocabulary against main's.

    Raises:
        VocabularyMismatch: no token is common.
    """
    why = difference(main, draft)
    both = min(main.n_tokens, draft.n_tokens)
    most = max(main.n_tokens, draft.n_tokens)
    differing = [token for token in range(both) if main.text(token) != draft.text(token)]
    differing += range(both, most)
    if why is None:
        return VocabularyMatch("same", None, differing, both / main.n_tokens)
    is_near = main.type == draft.type and len(differing) <= _NEARLY * most
    share = VocabularyMap(main, draft).share
    return VocabularyMatch("nearly the same" if is_near else "other", why, differing, share)


def expected_speedups(
    main: CostModel, draft: CostModel, acceptance_rates: Sequence[float]
) -> list[ExpectedSpeedup]:
    """What a draft of such costs brings at best, for each chance that a guess stands."""
    plain = 1.0 / main.seconds(1)
    plans = chain_plans(main, draft, acceptance_rates)
    return [
        ExpectedSpeedup(c, len(p.parents), p.speed / plain)
        for c, p in zip(acceptance_rates, plans, strict=True)
    ]


def _opened(path: Path) -> Model:
    model = open_header(path)
    model.check_can_roll_back()
    return model
