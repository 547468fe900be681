"""The costs of a session's models: from disk, or measured when first needed, and written at its end."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from spec_local.calibration import cost_store
from spec_local.calibration.measure import measure
from spec_local.calibration.sample_text import sample_tokens
from spec_local.core.proposal import MAX_DRAFT
from spec_local.llama.heads.base import HeadRow
from spec_local.llama.row import LlamaRow
from spec_local.policies.cost_model import CostModel


class KnownCosts:
    """Seconds per call of the main and the draft model, which all of a session's rows share.

    Attributes:
        calls: of both models; None: not known yet. The adaptive policy keeps them up to date.
        log: called with one line before a measurement that takes a second or two.
    """

    def __init__(self) -> None:
        self.calls: tuple[CostModel, CostModel | None] | None = None
        self.log: Callable[[str], None] = lambda line: None

    def of(self, main: LlamaRow, draft: LlamaRow | HeadRow | None) -> tuple[CostModel, CostModel | None]:
        """`calls`; if need be, from disk or measured in these contexts, which must not be in use."""
        if not self.calls:
            drafting = self._known(draft, 0.5, 1) if draft else None
            self.calls = self._known(main, 1.5), drafting
        return self.calls

    def save(self, main: LlamaRow, draft: LlamaRow | HeadRow | None) -> None:
        """Write `calls` to disk, if they are known, and forget them."""
        for row, table in zip((main, draft), self.calls or (), strict=False):
            if row and table:
                cost_store.save(row, table)
        self.calls = None

    def _known(self, row: LlamaRow | HeadRow, budget: float, rows: int | None = None) -> CostModel:
        if row.n_ctx - len(row.cached) < MAX_DRAFT:
            row.truncate(0)  # too little room for a good measurement; the history is evaluated again
        known, text = cost_store.load(row), sample_tokens(row)
        if known:
            # The machine may have been busy or on battery then, and sizes that seem expensive are not tried
            # again.
            for _ in range(2):
                with _known_states(row):
                    now = measure(row, (1, 8), 1, rows, text)
                if known.agrees_with(now):
                    known.observe(1, now.seconds(1))  # scales the costs of all sizes to the current speed
                    return known
        else:
            self.log(f"measuring {row.model.path.name} (first use with these settings)")
        with _known_states(row):
            return measure(row, rows=rows, text=text, budget=budget)


def _known_states(row: LlamaRow | HeadRow) -> AbstractContextManager[None]:
    """Within the block, a head evaluates tokens as it does those whose states it has received."""
    return row.known_states() if isinstance(row, HeadRow) else nullcontext()
