"""The costs of a session's models: known from disk, or estimated at first, and written at its end."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from spec_local import kernels
from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import StoredCosts
from spec_local.calibration.estimates import CPU_ESTIMATES, GPU_ESTIMATES
from spec_local.calibration.kernel_times import slower_than_measured
from spec_local.calibration.measure import measure
from spec_local.calibration.sample_text import sample_tokens
from spec_local.core.proposal import MAX_DRAFT
from spec_local.llama.heads.base import HeadSequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.policies.cost_model import CostModel
from spec_local.system.machine import OtherPrograms, is_busy

# Sizes timed at first use: the main model's calls of few tokens show most about whether drafts can pay.
FIRST_MAIN, FIRST_DRAFT = (1, 4), (1,)
_SIZES_ON_GPU = (1, 2, 4, 8, 16, 9, 3, 5, 32, 64)  # many of its kernels are for at most eight tokens
_UNUSUAL = 1.4  # ratio of costs that disagree, or its inverse
_CHECKED_FOR = 86_400.0  # seconds; a machine that is hot, say, does not spoil the costs for longer than a day
_BUSY_CHECKED_FOR = 600.0  # the same for costs that were measured while other programs were busy


class KnownCosts:
    """Seconds per call of the main and the draft model, which all of a session's sequences share.

    Attributes:
        calls: of both models; None: not known yet. The adaptive policy keeps them up to date.
        log: called with one line before a measurement that takes a second or two.
    """

    def __init__(self) -> None:
        self.calls: tuple[CostModel, CostModel | None] | None = None
        self.log: Callable[[str], None] = lambda line: None
        self._since: list[StoredCosts] = []  # of each model, at the start
        self._programs = OtherPrograms()

    def of(
        self, main: LlamaSequence, draft: LlamaSequence | HeadSequence | None
    ) -> tuple[CostModel, CostModel | None]:
        """`calls`; if need be, from disk or estimated from a few calls in these contexts, not in use."""
        if not self.calls:
            known = [
                _known(sequence, n_logits) for sequence, n_logits in ((main, None), (draft, 1)) if sequence
            ]
            self._since = known
            self.calls = known[0].costs, known[1].costs if draft else None
        return self.calls

    def measured(
        self,
        main: LlamaSequence,
        draft: LlamaSequence | HeadSequence | None,
        stopped: Callable[[], bool] | None = None,
    ) -> tuple[CostModel, CostModel | None]:
        """`calls` without estimates: if need be, measured in these contexts in a second or two.

        Args:
            stopped: called before each call; True ends the measurement, and leaves estimates. Nothing is
                logged. None: the measurement is not stopped.
        """
        costs, draft_costs = self.of(main, draft)
        log = (lambda line: None) if stopped else self.log
        stopped = stopped or (lambda: False)
        for sequence, table, n_logits, budget in ((main, costs, None, 1.5), (draft, draft_costs, 1, 0.5)):
            if sequence and table and table.estimates and not stopped():
                log(f"measuring {sequence.model.path.name} (first use with these settings)")
                found = _measured(sequence, n_logits, budget=budget, stopped=stopped)
                for n in found.costs:
                    table.observe(1, found.seconds(1))
                    table.observe(n, found.seconds(n))
                if not stopped():
                    table.drop_estimates()  # of sizes for which there was no time
        return costs, draft_costs

    def save(self, main: LlamaSequence, draft: LlamaSequence | HeadSequence | None) -> None:
        """Write `calls` to disk, if they are known, and forget them."""
        if not self.calls:
            return
        others = self._programs.cores()
        for sequence, table, since in zip((main, draft), self.calls, self._since, strict=False):
            if sequence and table:
                cost_store.save(sequence, table, since.checked, max(since.others, others))
                if not is_busy(others) and slower_than_measured(
                    sequence.model, table, kernels.status().times
                ):
                    kernels.doubt(sequence.model.bytes_by_type)
        self.calls = None


def agree(costs: CostModel, others: CostModel) -> bool:
    """Return whether both agree on relative costs, at the sizes that were observed for the others."""
    return all(
        1.0 / _UNUSUAL < costs.seconds(n) / costs.seconds(1) * others.seconds(1) / seconds < _UNUSUAL
        for n, seconds in others.costs.items()
    )


def _known(sequence: LlamaSequence | HeadSequence, n_logits: int | None) -> StoredCosts:
    """Costs of a context. If they were checked now, `others` is 0."""
    now, estimates = time.time(), _estimates(sequence)
    if found := cost_store.read(sequence):
        costs = found.costs
        if 0.0 <= now - found.checked < (_BUSY_CHECKED_FOR if is_busy(found.others) else _CHECKED_FOR):
            return found
        # The machine may have been busy then, and sizes that seem expensive are not tried again.
        for _ in range(2):
            timed = _timed(sequence, (1, 8), n_logits)
            if agree(costs, timed):
                costs.observe(1, timed.seconds(1))  # scales the costs of all sizes to the current speed
                return StoredCosts(costs, now, 0.0)
        return StoredCosts(CostModel(timed.costs, estimates), now, 0.0)
    first = _timed(sequence, FIRST_MAIN if n_logits is None else FIRST_DRAFT, n_logits)
    return StoredCosts(CostModel(first.costs, estimates), now, 0.0)


def _estimates(sequence: LlamaSequence | HeadSequence) -> dict[int, float]:
    return GPU_ESTIMATES if sequence.model.is_on_gpu else CPU_ESTIMATES


def _timed(sequence: LlamaSequence | HeadSequence, sizes: tuple[int, ...], n_logits: int | None) -> CostModel:
    return _measured(sequence, n_logits, sizes=sizes, rounds=1)


def _measured(sequence: LlamaSequence | HeadSequence, n_logits: int | None, **options: Any) -> CostModel:
    """`measure` a context; a head evaluates tokens as it does those whose states it has received."""
    if sequence.n_ctx - len(sequence.cached) < MAX_DRAFT:
        sequence.truncate(0)  # too little room for a good measurement; the history is evaluated again
    if sequence.model.is_on_gpu:
        options = {"sizes": _SIZES_ON_GPU} | options
    with sequence.known_states() if isinstance(sequence, HeadSequence) else nullcontext():
        return measure(sequence, n_logits=n_logits, text=sample_tokens(sequence), **options)
