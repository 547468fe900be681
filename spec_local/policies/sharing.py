"""The costs of calls that several rows share, and how the rows divide a call among themselves.

The time of a call depends on its number of tokens, whichever rows they belong to. One row leaves most of the
machine's arithmetic unused, so that draft tokens cost little; many rows use it for tokens of their own. The
more rows, the fewer draft tokens pay.
"""

import copy
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import Proposal
from spec_local.policies.choice import best_prefix
from spec_local.policies.cost_model import CallCosts, CostModel

_PLAIN_AFTER = 32  # shared calls with draft tokens in a row, before one that shows what a plain one costs now
_LITTLE = 0.05  # of the tokens per second


class RowCosts:
    """Seconds of a call as one of R rows sees it: its share, if each row has as many tokens in the call.

    With one row, the costs are those of the cost model. It has the methods of `CostModel` that policies use.

    Args:
        costs: seconds of a call by number of tokens; kept up to date while there is one row.
        max_rollback: see `ModelSequence`. More draft tokens are priced as if all of them had to be evaluated
            again, since that can happen to the accepted ones.
        drafts_blocks: see `CallCosts`.

    Attributes:
        n_rows: rows that share the next call.
        n_read: tokens that the next call evaluates besides: prompts, and accepted tokens again.
        n_others: rows that are evaluated in calls of their own meanwhile.
        n_running: rows that share calls when those that read their prompt have read it.
        version: changes with the costs, except those that `observe` changes.
    """

    def __init__(
        self, costs: CostModel, max_rollback: int = sys.maxsize, *, drafts_blocks: bool = False
    ) -> None:
        # By number of rows, seconds of a call of one draft token less than the argument. They are kept apart:
        # rows read longer contexts than one row does, and the machine's speed is seen in plain calls of as
        # many rows.
        self._tables = {1: costs}
        self._max_rollback, self.drafts_blocks = max_rollback, drafts_blocks
        self.n_rows, self.n_read, self.n_others, self.version = 1, 0, 0, 0
        self.n_running = 1
        self._n_speculative = 0  # shared calls in a row, up to now

    @property
    def is_alone(self) -> bool:
        """True if nothing but one row's call happens in a step."""
        return self.n_rows == 1 and not self.n_read and not self.n_others

    @property
    def needs_plain(self) -> bool:
        """True if shared calls have had draft tokens for so long that one without should show its cost."""
        return self.n_rows > 1 and self._n_speculative >= _PLAIN_AFTER

    @property
    def plain_s(self) -> float:
        """Seconds of the whole call of all rows without draft tokens, prompts and tokens evaluated again."""
        return self._table.seconds(1)

    @property
    def _table(self) -> CostModel:
        if self.n_rows not in self._tables:
            alone, n_rows = self._tables[1], self.n_rows
            sizes = sorted({n_rows, *(n for n in alone.costs if n > n_rows)})
            if len(sizes) == 1:  # one size tells nothing about the cost of more
                sizes.append(2 * n_rows)
            self._tables[n_rows] = CostModel({n - n_rows + 1: alone.seconds(n) for n in sizes})
        return self._tables[self.n_rows]

    def at(self, n_rows: int) -> "RowCosts":
        """The costs at another number of rows, which evaluate nothing besides."""
        found = copy.copy(self)
        found.n_rows, found.n_read, found.n_others = n_rows, 0, 0
        return found

    def share(self, n_rows: int, n_read: int = 0, n_others: int = 0, n_running: int | None = None) -> None:
        """Set with how many rows and other tokens the next calls are shared."""
        self.n_others, self.n_running = n_others, n_rows if n_running is None else n_running
        if (n_rows, n_read) != (self.n_rows, self.n_read):
            self.n_rows, self.n_read = n_rows, n_read
            self.version += 1

    def seconds(self, n: int) -> float:
        """A row's share of a call in which it has n tokens."""
        if self.is_alone and n <= 1 + self._max_rollback:
            return self._table.seconds(n)
        return float(self.first(n)[n])

    def first(self, n: int) -> NDArray[np.float64]:
        """`seconds` of 0 … n tokens: float64 (n + 1,), the first 0; do not modify."""
        if self.is_alone:
            found = self._table.first(n)
        else:
            plain, extra = self._extra(self.n_rows * max(0, n - 1))
            found = np.zeros(n + 1)
            found[1:] = (plain + extra[:: self.n_rows][:n]) / self.n_rows
        start = 2 + self._max_rollback
        if start <= n:
            found = found.copy()
            found[start:] += found[start:] - found[1]
        return found

    def shared(self, n_drafted: int) -> NDArray[np.float64]:
        """Seconds of the whole call with 0, 1, … draft tokens of all rows: float64 (n_drafted + 1,)."""
        plain, extra = self._extra(n_drafted)
        return plain + (extra if self._max_rollback else 2 * extra)

    def seconds_again(self, n_rejected: int, n_kept: int) -> float:
        """Return the extra seconds of the next call because it evaluates tokens of this one again.

        Args:
            n_rejected, n_kept: rejected draft tokens, and other tokens of this call.
        """
        if n_rejected <= self._max_rollback:
            return 0.0
        table = self._table.first(1 + n_kept)
        return float(table[1 + n_kept] - table[1])

    def _extra(self, n: int) -> tuple[float, NDArray[np.float64]]:
        """Seconds of the plain call, and those that 0 … n draft tokens add to it and the prompt tokens."""
        table = self._table.first(1 + self.n_read + n)
        start = 1 + self.n_read
        return float(table[1]), table[start:] - table[start]

    def observe(self, n: int, seconds: float) -> None:
        """Record a call of n tokens, if one row had it to itself."""
        if self.is_alone:
            self._tables[1].observe(n, seconds)

    def observe_shared(self, n_drafted: int, seconds: float) -> None:
        """Record a call of several rows, with so many draft tokens; it read no prompt."""
        if self.n_rows > 1 and not self.n_read:
            self._table.observe(1 + n_drafted, seconds)
            self._n_speculative = self._n_speculative + 1 if n_drafted else 0
            self.version += 1


class SharedCalls:
    """Divides the main model's calls among rows: a `spec_local.engine.engine.Planner`.

    Each row's policy proposes what would pay if the others did the same. Of all that is proposed, `choose`
    keeps the part with the highest expected tokens per second.

    Args:
        costs: returns those of the main model that the rows' policies use; None: no policy needs costs, and
            all that is proposed is verified.
    """

    def __init__(self, costs: Callable[[], RowCosts | None]) -> None:
        self._costs = costs

    def begin(self, n_rows: int, n_read: int, n_others: int, n_running: int) -> None:
        """See `spec_local.engine.engine.Planner`."""
        if costs := self._costs():
            costs.share(n_rows, n_read, n_others, n_running)

    def choose(self, proposals: Sequence[Proposal], spent: float) -> Sequence[Proposal]:
        """The parts of the rows' proposals to verify, `spent` seconds after the step began.

        Only proposals whose tokens were chosen, and have values, are shortened.
        """
        found = list(proposals)
        rows = [i for i, p in enumerate(found) if p.values and p.drawing == "chosen"]
        costs = self._costs()
        if not rows or not costs:
            return found
        values = np.concatenate([found[i].values for i in rows])
        owners = np.repeat(rows, [len(found[i].tokens) for i in rows])
        nodes = np.concatenate([np.arange(len(found[i].tokens)) for i in rows])
        order = (-values).argsort(kind="stable")  # a parent comes before its equals
        n_fixed = sum(len(p.tokens) for p in found) - len(values)
        seconds = spent + costs.shared(n_fixed + len(values))[n_fixed:]
        kept = order[: best_prefix(values[order], seconds, len(found)).n]
        for i in rows:
            mine = nodes[kept[owners[kept] == i]]
            if len(mine) < len(found[i].tokens):
                found[i] = found[i].part(mine.tolist())
        return found

    def observe(self, n_drafted: int, seconds: float) -> None:
        """See `spec_local.engine.engine.Planner`."""
        if costs := self._costs():
            costs.observe_shared(n_drafted, seconds)


def best_rows(costs: CallCosts, n_max: int) -> int:
    """The number of rows, up to `n_max`, whose plain calls give the most tokens per second.

    The smallest one within `_LITTLE` of it: with more rows, each would only take longer.
    """
    rates = np.arange(1, n_max + 1) / costs.first(n_max)[1:]
    return 1 + int(np.argmax(rates >= (1.0 - _LITTLE) * rates.max()))
