"""The costs of calls that several sequences share, and the division of a call among them.

The time of a call depends on its number of tokens, whichever sequences they belong to. One sequence leaves
most of the machine's arithmetic unused, so that draft tokens cost little; many use it for tokens of their
own. The more sequences, the fewer draft tokens pay.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spec_local.core.proposal import ALONE, MAX_DRAFT, CallLoad, Proposal
from spec_local.policies.choice import best_prefix
from spec_local.policies.cost_model import CostModel, Floats

_TIMED_EVERY = 8  # plain steps between two that are timed: timing takes 1 % of a small model's step
_PLAIN_AFTER = 32  # calls with draft tokens in a row, before one that shows what a plain one costs now


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Seconds of the main model's call as one of its sequences sees it.

    It is its share, if each has as many tokens. With one sequence, all costs are those of the table.

    Attributes:
        table: seconds of the whole call, by tokens of one sequence while the others have one each.
        load: what the call evaluates besides.
        max_rollback: see `SharedCosts`.
        needs_plain: calls have had draft tokens for so long that one without should show its cost.
    """

    drafts_blocks = False

    table: CostModel
    load: CallLoad = ALONE
    max_rollback: int = sys.maxsize
    needs_plain: bool = False

    @cached_property
    def plain(self) -> float:
        """Seconds without draft tokens."""
        return self.plain_s / self.load.n_parallel

    @cached_property
    def verifying(self) -> Floats:
        """Seconds with 0, 1, … draft tokens, up to the most that there may be: (MAX_DRAFT + 1,)."""
        return self.first(MAX_DRAFT + 1)[1:]

    @cached_property
    def needed(self) -> list[float]:
        """Minimum acceptance of the first of 1, 2, … tokens at which verifying them can break even."""
        losses = self.verifying[1:] / self.plain - 1.0
        needed: list[float] = np.minimum.accumulate(losses / np.arange(1.0, len(losses) + 1.0)).tolist()
        return needed

    def affordable(self, may_lose: float, spent: float = 0.0) -> int:
        """The most draft tokens whose rejection costs no more than `may_lose` plain steps.

        spent: seconds of drafting.
        """
        seconds = (1.0 + may_lose) * self.plain - spent
        return max(0, int(np.searchsorted(self.verifying, seconds, side="right")) - 1)

    @property
    def plain_s(self) -> float:
        """Seconds of the whole call without draft tokens, prompts and tokens evaluated again."""
        return self.table.seconds(1)

    def seconds(self, n: int) -> float:
        """A sequence's share of a call in which it has n tokens."""
        if self.load.is_alone and n <= 1 + self.max_rollback:
            return self.table.seconds(n)
        return float(self.first(n)[n])

    def first(self, n: int) -> Floats:
        """`seconds` of 0 … n tokens: float64 (n + 1,), the first 0; do not modify."""
        if self.load.is_alone:
            found = self.table.first(n)
        else:
            n_parallel = self.load.n_parallel
            plain, extra = self._extra(n_parallel * max(0, n - 1))
            found = np.zeros(n + 1)
            found[1:] = (plain + extra[::n_parallel][:n]) / n_parallel
        start = 2 + self.max_rollback
        if start <= n:
            found = found.copy()
            found[start:] += found[start:] - found[1]
        return found

    def shared(self, n_drafted: int) -> Floats:
        """Seconds of the whole call with 0, 1, … draft tokens of all sequences: float64 (n_drafted + 1,)."""
        plain, extra = self._extra(n_drafted)
        return plain + (extra if self.max_rollback else 2 * extra)

    def seconds_again(self, n_rejected: int, n_kept: int) -> float:
        """Return the extra seconds of the next call because it evaluates tokens of this one again.

        n_rejected, n_kept: rejected draft tokens, and other tokens of this call.
        """
        if n_rejected <= self.max_rollback:
            return 0.0
        table = self.table.first(1 + n_kept)
        return float(table[1 + n_kept] - table[1])

    def _extra(self, n: int) -> tuple[float, Floats]:
        """Seconds of the plain call, and those that 0 … n draft tokens add to it and the prompt tokens."""
        start = 1 + self.load.n_read
        table = self.table.first(start + n)
        return float(table[1]), table[start:] - table[start]


class SharedCosts:
    """What is known of the main model's costs in a session, by number of sequences that share a call.

    Args:
        costs: seconds of a call with one sequence, by number of tokens; kept up to date.
        max_rollback: see `Limits` in `core/sequence.py`. More draft tokens are priced as if all had to be
            evaluated again, since that can happen to the accepted ones.
    """

    def __init__(self, costs: CostModel, max_rollback: int = sys.maxsize) -> None:
        # By number of sequences, seconds of a call of one draft token less than the argument. They are kept
        # apart: several sequences read longer contexts than one does, and the machine's speed is seen in
        # plain calls of as many.
        self._tables = {1: costs}
        self._max_rollback = max_rollback
        self._n_speculative = 0  # calls in a row, up to now

    def at(self, load: CallLoad = ALONE) -> StepCosts:
        """The costs of a call with this load, as far as they are known now."""
        needs_plain = load.is_comparable and self._n_speculative >= _PLAIN_AFTER
        return StepCosts(self._table(load.n_parallel), load, self._max_rollback, needs_plain)

    def observe(self, load: CallLoad, n_drafted: int, seconds: float) -> None:
        """Record a call with so many draft tokens; ignored if it shows nothing about other calls."""
        if load.is_comparable:
            self._table(load.n_parallel).observe(1 + n_drafted, seconds)
            self._n_speculative = self._n_speculative + 1 if n_drafted else 0

    def _table(self, n_parallel: int) -> CostModel:
        if n_parallel not in self._tables:
            alone = self._tables[1]
            sizes = sorted({n_parallel, *(n for n in alone.costs if n > n_parallel)})
            if len(sizes) == 1:  # one size tells nothing about the cost of more
                sizes.append(2 * n_parallel)
            self._tables[n_parallel] = CostModel({n - n_parallel + 1: alone.seconds(n) for n in sizes})
        return self._tables[n_parallel]


class StepTiming:
    """Records the steps of an answer in the main model's costs, as far as it is alone."""

    def __init__(self, main: SharedCosts) -> None:
        self._main = main
        self._n_since_timed = 0  # steps
        self._n_plain = 0  # steps in a row, up to now
        self._as_usual = True  # the last step was plain, and took as long as plain steps do

    def observe(self, costs: StepCosts, n_verified: int, took: float) -> StepCosts:
        """Note a step with n_verified draft tokens, whose call took so long; returns the costs after it."""
        self._n_plain = 0 if n_verified else self._n_plain + 1
        self._n_since_timed += 1
        is_alone, was_usual = costs.load.is_alone, self._as_usual  # the engine times shared calls
        self._as_usual = not n_verified and (not is_alone or 0.8 < took / costs.plain < 1.25)
        # The step after an unusual one is timed, too: disturbed calls must not outnumber others in the table.
        is_usual = self._as_usual and was_usual and self._n_plain >= 3
        if not is_alone or (is_usual and self._n_since_timed < _TIMED_EVERY):
            return costs
        self._n_since_timed = 0
        self._main.observe(costs.load, n_verified, took)
        return self._main.at(costs.load)


class SharedCalls:
    """Divides the main model's calls among requests: a `spec_local.engine.engine.Planner`.

    Each request's policy proposes what would pay if the others did the same. Of all that is proposed,
    `choose` keeps the part with the highest expected tokens per second.

    Args:
        costs: returns those that the requests' policies use; None: no policy needs costs, and all that is
            proposed is verified.
    """

    def __init__(self, costs: Callable[[], SharedCosts | None]) -> None:
        self._costs = costs

    def choose(self, proposals: Sequence[Proposal], load: CallLoad, spent: float) -> Sequence[Proposal]:
        """The parts of the requests' proposals to verify, `spent` seconds after the step began.

        Only proposals whose tokens were chosen, and have values, are shortened.
        """
        found = list(proposals)
        open_to = [i for i, p in enumerate(found) if p.values and p.drawing == "chosen"]
        costs = self._costs()
        if not open_to or not costs:
            return found
        values = np.concatenate([found[i].values for i in open_to])
        owners = np.repeat(open_to, [len(found[i].tokens) for i in open_to])
        nodes = np.concatenate([np.arange(len(found[i].tokens)) for i in open_to])
        order = (-values).argsort(kind="stable")  # a parent comes before its equals
        n_fixed = sum(len(p.tokens) for p in found) - len(values)
        seconds = spent + costs.at(load).shared(n_fixed + len(values))[n_fixed:]
        kept = order[: best_prefix(values[order], seconds, len(found)).n]
        for i in open_to:
            mine = nodes[kept[owners[kept] == i]]
            if len(mine) < len(found[i].tokens):
                found[i] = found[i].part(mine.tolist())
        return found

    def observe(self, load: CallLoad, n_drafted: int, seconds: float) -> None:
        """See `spec_local.engine.engine.Planner`."""
        if costs := self._costs():
            costs.observe(load, n_drafted, seconds)
