"""The adaptive policy: in each step do what has the highest expected tokens per second, within a loss budget.

The options are a plain step, a part of what lookups found, and the draft model; after each draft token,
another call or verification. `AcceptanceModel` gives expected tokens, `CostModel` expected seconds, `choice`
compares the options, and `LossBudget` bounds what wrong estimates may cost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from spec_local.core.proposal import MAX_DRAFT, Proposal
from spec_local.policies.acceptance_model import Floats
from spec_local.policies.base import (
    NOTHING,
    WINDOWS,
    Choice,
    DraftOutput,
    Offer,
    Policy,
    PolicyOptions,
    Reading,
)
from spec_local.policies.candidates import merged, path_values
from spec_local.policies.choice import Step, best_chain, best_prefix
from spec_local.policies.cost_model import CallCosts, CostModel, chain_seconds
from spec_local.policies.experience import Experience
from spec_local.policies.loss_budget import Kind
from spec_local.policies.planner import plan
from spec_local.policies.sharing import RowCosts

MAX_CALLS = 16
"""Maximum number of draft calls a step: no pair of models that was measured gained from more."""
# Steps:
_TIMED_EVERY = 8  # plain ones between two that are timed: timing takes 1 % of a small model's step
_REPLANNED_EVERY = 16  # between two comparisons of trees with chains: one takes milliseconds
_PLAIN_AFTER = 32  # speculative ones in a row, before one that shows what plain decoding costs now
# Tokens:
_MAX_OBSERVED = 64  # of a draft call whose cost is observed: longer ones read prompts
# Of an answer too short to repay the reading of its prompt, and between two times that reading is considered.
_SHORT = 8
_MAX_TRIAL = 16  # that the draft model may read although only this step is known to repay it
# Shares and ratios:
_TREE_MARGIN = 1.03  # of a chain's speed that a tree must promise: trees cost the caches a copy
# Times the cost of reading a prompt that its expected gain must be. With 1, simulated answers are up to 14 %
# slower than without drafts.
_DOUBT = 2.0
_DEFAULT_ACCEPTANCE = 0.85  # of an untried draft model: 0.5B for 1.5B Qwen2.5-Coder at temperature 0
# Of that, what a draft model reaches that has read the last tokens only: of a 0.5B's agreement with a 1.5B's
# greedy answers on 14 held-out prompts, three parts of ordinary ones and one of summaries.
_BY_WINDOW = {0: 1.0, 32: 0.75, 128: 0.80, 512: 0.98, 2048: 1.0}
_BY_RANK = (0.34, 0.14, 0.09)  # of rejected tokens: the draft model's second to fourth choice was right


class Adaptive(Policy):
    """Never slower than plain decoding for long, and as fast as acceptance allows.

    Args:
        main, draft: seconds a call; kept up to date. draft None: there is no draft model. With `RowCosts`,
            the main model's calls are shared with other rows. Those of the draft model count in full: the
            other rows wait for them, and rarely draft in the same step.
        experience: of earlier answers; grows.
        may_truncate: see `Policy`.
        tree: maximum nodes of a tree; 0: chains only.
        max_draft: maximum number of tokens that the draft model drafts in a row.
        max_tokens: of the answer, if known.
        clock: seconds.
    """

    draft_max = MAX_DRAFT

    def __init__(
        self,
        main: CostModel | RowCosts,
        draft: CostModel | RowCosts | None = None,
        experience: Experience | None = None,
        *,
        may_truncate: bool = True,
        tree: int = 0,
        max_draft: int = MAX_CALLS,
        max_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(may_truncate)
        self._main_costs = RowCosts(main) if isinstance(main, CostModel) else main
        self._any_draft_costs = RowCosts(draft) if isinstance(draft, CostModel) else draft
        self._clock = clock
        self._experience = known = experience or Experience()
        self._acceptance, self._budget = known.acceptance, known.budget
        self._max_tree, self._max_tokens = tree, max_tokens
        self._max_calls = min(MAX_CALLS, max_draft)
        self._n_steps = 0
        self._n_plain = self._n_speculative = 0  # steps in a row, up to now
        self._plain_seconds, self._draft_costs = self._main_costs.seconds(1), self._any_draft_costs
        self._take_costs()
        # Of the step at hand:
        self._call_began = clock()  # when the call at hand began
        self._rate_without_draft = (
            1.0 / self._plain_seconds
        )  # tokens per second expected without the draft model
        self._begin(Offer(None))
        # Of steps up to now:
        self._as_usual = True  # the last step was plain, and took as long as plain steps do
        self._timed, self._planned = 0, -_REPLANNED_EVERY  # the last step in which it was done
        self._considered = 0  # tokens of the answer when reading was last considered
        self._tree: tuple[int, int] | None = None  # its depth and nodes, if trees promise more than chains
        known.start(self._usual_gain)

    def _begin(self, offer: Offer) -> None:
        self._offer, self._choice = offer, NOTHING
        self._max_path = min(offer.limit.depth, offer.limit.nodes) if offer.limit else 0
        self._spent = 0.0  # seconds on drafting
        self._n_calls = 0  # of the draft model
        self._confidence: list[float] = []
        self._values = [1.0]  # probability that draft tokens 1 … i are all accepted; first that of none

    @classmethod
    def create(cls, options: PolicyOptions) -> Self:
        return cls(
            *options.costs(),
            options.experience,
            may_truncate=options.may_truncate,
            tree=options.tree_nodes,
            max_draft=MAX_CALLS if options.max_draft is None else options.max_draft,
            max_tokens=options.max_tokens,
            clock=options.clock,
        )

    @property
    def plain_s(self) -> float | None:
        return self._main_costs.plain_s

    def choose(self, offer: Offer) -> Choice:
        if not offer.limit:
            return NOTHING  # the draft model reads when the answer has turned out not to be short
        self._begin(offer)
        self._n_steps += 1
        if self._version != self._main_costs.version:
            self._take_costs()
        if self._n_speculative >= _PLAIN_AFTER or self._main_costs.needs_plain:
            return NOTHING  # the cost of a plain step must stay known
        best = Step(1.0, self._plain_seconds)
        for candidates in self._calibrated([found for found in offer.candidates if self._could_pay(found)]):
            step, choice = self._best_part(candidates)
            if step.rate > best.rate:
                best, self._choice = step, choice
        self._rate_without_draft = best.rate
        drafting = self._draft_choice(best.rate)
        if drafting.limit and drafting.reading:
            self._choice, self._max_path = drafting, min(drafting.limit.depth, drafting.limit.nodes)
            if drafting.reading.n_unread > _MAX_TRIAL:
                seconds = self._reading_seconds(drafting.reading)
                self._budget.invest(seconds / self._plain_seconds)
                self._spent = -seconds  # later steps repay it, too
        if self._choice.source != "none":
            self._call_began = self._clock()
        return self._choice

    def wants_more(self, output: DraftOutput | None = None) -> bool:
        if output:
            return self._wants_token(output)
        if self._n_calls:
            ahead = self._ahead(self._values[-1], self._max_calls, 1)
            if not len(ahead) or self._rate_ahead(ahead, 1) <= self._rate_now():
                return False
        self._call_began = self._clock()
        return True

    def _wants_token(self, output: DraftOutput) -> bool:
        """Note the output of a call, and return whether to draw a draft token from it."""
        assert self._draft_costs
        if output.n_read:
            if output.n_read <= _MAX_OBSERVED and self._main_costs.is_alone:
                self._draft_costs.observe(output.n_read, self._clock() - self._call_began)
            self._spent += self._draft_costs.seconds(output.n_read)
        self._n_calls += 1
        self._confidence.append(output.confidence)
        value = self._values[-1] * self._acceptance.draft.rate(output.confidence)
        if not self.may_truncate:  # what is drawn must be verified: see that it pays before
            ahead = np.concatenate(([value], self._ahead(value, self._max_calls - len(self._values), 0)))
            if self._rate_ahead(ahead, 0) <= self._rate_now():
                return False
        self._values.append(value)
        return True

    def trim(self, proposal: Proposal) -> Proposal:
        now, n = self._clock(), len(proposal.tokens)
        if self._n_calls:  # a chain
            values = np.array(self._values[1 : n + 1])
            if self.may_truncate and n:
                n = best_prefix(values, self._spent + self._step_seconds).n
            proposal = replace(proposal, values=values.tolist()).first(n)
        elif self._choice.source in ("draft", "tree"):
            self._spent = now - self._call_began
        self._call_began = now
        return proposal

    def observe(self, drafted: Sequence[int], output: Sequence[int], n_verified: int) -> None:
        took = self._clock() - self._call_began
        self._time_step(took, n_verified)
        source = self._choice.source
        kind: Kind | None = "draft" if source == "tree" else None if source == "none" else source
        if kind == "draft":
            self._acceptance.observe_draft(drafted, output, self._confidence)
        else:
            self._acceptance.recent.forget()
        self._acceptance.observe_lookups(self._offer.candidates, output)
        self._experience.n_tokens += len(output)
        self._settle(kind, took, len(output), n_verified)

    def _time_step(self, took: float, n_verified: int) -> None:
        """Observe the cost of the main model's call, if this step is one that is timed."""
        self._n_speculative = self._n_speculative + 1 if n_verified else 0
        self._n_plain = 0 if n_verified else self._n_plain + 1
        alone = self._main_costs.is_alone  # the engine times shared calls
        was_usual = self._as_usual
        self._as_usual = not n_verified and (not alone or 0.8 < took / self._plain_seconds < 1.25)
        # The step after an unusual one is timed, too: disturbed calls must not outnumber others in the table.
        if alone and (
            not (self._as_usual and was_usual)
            or self._n_plain < 3
            or self._n_steps - self._timed >= _TIMED_EVERY
        ):
            self._observe_costs(n_verified + 1, took)

    def _settle(self, kind: Kind | None, took: float, n_output: int, n_verified: int) -> None:
        """Account for what a step gained or lost."""
        known, plain = self._experience, self._plain_seconds
        seconds = float(self._step_seconds[n_verified]) if n_verified else plain
        if n_verified and self._main_costs.is_alone:
            # Noise is no loss of speculation, but the table may be outdated: the clock counts within bounds.
            seconds = min(2.0 * seconds, max(0.5 * seconds, took))
        seconds += self._spent + self._main_costs.seconds_again(n_verified + 1 - n_output, n_output)
        p_loss = 1.0 - self._acceptance.recent.mean if kind == "draft" else 1.0
        n_rows = self._main_costs.n_rows
        self._budget.settle(kind, n_output - seconds / plain, seconds / plain, p_loss, n_rows)
        if kind == "draft":
            # Of each step only what it gained over the best option without the draft model.
            known.gained = (known.gained or 0.0) + (n_output / self._rate_without_draft - seconds) / plain

    def _best_reading(self, readings: Sequence[Reading]) -> Reading | None:
        """Return the part of the history that is expected to gain most, reading counted; None: none gains."""
        known = self._experience
        # An answer that is already longer than usual is expected to double.
        left = max(known.answers.length - known.n_tokens, known.n_tokens)
        if self._max_tokens is not None:
            left = min(left, self._max_tokens - known.n_tokens)
        known.n_running = n = self._main_costs.n_running
        if not readings or not self._any_draft_costs or (n == 1 and not self._draft_costs):
            return None
        plain = self._main_costs.at(n).seconds(1)
        best, most = None, 0.0
        for reading in readings:
            seconds = self._reading_seconds(reading)
            gain = known.answers.gain(n, _window(reading), self._usual_gain) * left * plain - _DOUBT * seconds
            if gain > most and seconds <= self._budget.may_invest * plain:
                best, most = reading, gain
        if best:
            known.window = _window(best)
        return best

    def _reading_seconds(self, reading: Reading) -> float:
        """Seconds that the draft model takes to read what it has not read of it."""
        assert self._any_draft_costs
        return float(chain_seconds(self._any_draft_costs, reading.n_unread, 1)[0])

    def _could_pay(self, candidates: Proposal) -> bool:
        """Return whether verifying these candidates may be worth the main model's time."""
        acceptance = self._acceptance.lookups[candidates.source].rate(candidates.confidence[0])
        return acceptance >= self._needed[min(len(candidates.tokens), len(self._needed)) - 1]

    def _observe_costs(self, n: int, took: float) -> None:
        self._timed = self._n_steps
        self._main_costs.observe(n, took)
        before, self._plain_seconds = self._plain_seconds, self._main_costs.seconds(1)
        if not 0.8 < self._plain_seconds / before < 1.25:
            self._budget.restore()
        self._refresh()

    def _take_costs(self) -> None:
        """Take the costs at the current number of rows."""
        self._version = self._main_costs.version
        self._plain_seconds = self._main_costs.seconds(1)
        drafts = self._any_draft_costs
        gains = drafts is not None and could_gain(self._main_costs, drafts, self._max_calls)
        self._draft_costs = drafts if gains else None
        self._refresh()

    def _refresh(self) -> None:
        """Take what follows from the main model's costs."""
        self._step_seconds = self._main_costs.first(MAX_DRAFT + 1)[1:]  # with 0, 1, … draft tokens
        gained = np.arange(1.0, len(self._step_seconds))
        # Minimum acceptance of the first of 1, 2, … tokens at which verifying them can break even.
        self._needed: list[float] = np.minimum.accumulate(
            (self._step_seconds[1:] / self._plain_seconds - 1.0) / gained
        ).tolist()

    def _calibrated(self, candidates: Sequence[Proposal]) -> Sequence[Proposal]:
        """Candidates with learned acceptance rates; in one tree where there may be branches."""
        lookups = self._acceptance.lookups
        found = [
            replace(c, confidence=lookups[c.source].rates(np.array(c.confidence)).tolist())
            for c in candidates
        ]
        return [merged(found)] if self._max_tree and len(found) > 1 else found

    def _best_part(self, candidates: Proposal) -> tuple[Step, Choice]:
        """Return the part of these candidates with the most expected tokens per second."""
        limit, values = self._offer.limit, path_values(candidates)
        assert limit
        n_max = limit.nodes if candidates.is_chain else min(limit.nodes, limit.branches)
        order = (-values).argsort(kind="stable")[:n_max]  # a parent comes before its equals
        n_max = self._affordable(self._budget.may_lose("lookup", 1.0 - candidates.confidence[0]), 0.0)
        step = best_prefix(values[order], self._step_seconds[: n_max + 1])
        part = replace(candidates, values=values.tolist()).part(order[: step.n].tolist())
        return step, Choice("lookup", proposal=part)

    def _draft_choice(self, rate: float) -> Choice:
        """Choose the draft model if it promises more tokens per second than `rate`, within the budget."""
        limit, readings = self._offer.limit, self._offer.readings
        if not self._draft_costs or not readings or not limit:
            return NOTHING
        if self._max_tree and self._n_steps - self._planned >= _REPLANNED_EVERY:
            self._plan_tree()
        reading: Reading | None = readings[0]
        n_unread = readings[0].n_unread
        if len(readings) > 1 or n_unread > _MAX_TRIAL:
            if self._experience.n_tokens < self._considered + _SHORT:
                return NOTHING
            self._considered = self._experience.n_tokens
            reading, n_unread = self._best_reading(readings), 1
        if not reading:
            return NOTHING
        step = self._draft_step(self._acceptance.recent.upper, n_unread)
        n = 1  # tokens that the first call drafts
        if self._draft_costs.drafts_blocks:
            n = self._draft_step(self._acceptance.recent.mean).n
            limit = replace(limit, depth=min(limit.depth, n))
        first = float(chain_seconds(self._draft_costs, n_unread, n)[-1])
        loss = first + float(self._step_seconds[1]) - self._plain_seconds
        if step.rate <= rate or loss > self._budget.may_lose("draft") * self._plain_seconds:
            return NOTHING
        if not self._tree:
            return Choice("draft", limit, reading=reading)
        depth, nodes = self._tree
        limit = replace(limit, depth=min(limit.depth, depth), nodes=min(limit.nodes, nodes))
        return Choice("tree", limit, reading=reading)

    def _draft_step(self, acceptance: float, n_unread: int = 1) -> Step:
        """Return the expected outcome of asking the draft model."""
        return best_chain(acceptance, self._main_costs, self._draft_costs, self._max_calls, n_unread)

    def _usual_gain(self, n_running: int, window: int = 0) -> float:
        """`usual_gain` with so many answers at the same time, from this part of the history."""
        main, draft = self._main_costs.at(n_running), self._any_draft_costs
        acceptance = _DEFAULT_ACCEPTANCE * _BY_WINDOW[window]
        return usual_gain(main, draft, self._max_calls, acceptance) if draft else 0.0

    def _plan_tree(self) -> None:
        """Choose between chains and trees, and how large a tree."""
        assert self._draft_costs
        self._planned = self._n_steps
        first = self._acceptance.recent.mean
        ranks = [first, *((1.0 - first) * share for share in _BY_RANK)]
        n_max = min(self._max_tree, self._max_path)
        depth = min(n_max, self._max_calls)
        tree = plan(ranks, self._main_costs, self._draft_costs, n_max, depth)
        chain = plan(ranks[:1], self._main_costs, self._draft_costs, n_max, depth)
        pays = not tree.is_chain and tree.speed > _TREE_MARGIN * chain.speed
        self._tree = (tree.depth, len(tree.parents)) if pays else None

    def _affordable(self, may_lose: float, spent: float) -> int:
        """The most draft tokens whose rejection the budget survives, after so many seconds of drafting."""
        seconds = (1.0 + may_lose) * self._plain_seconds - spent
        return max(0, int(np.searchsorted(self._step_seconds, seconds, side="right")) - 1)

    @property
    def _later(self) -> float:
        """Seconds of another call of the draft model; 0: the first one has drafted all."""
        assert self._draft_costs
        return 0.0 if self._draft_costs.drafts_blocks else self._draft_costs.seconds(1)

    def _rate_now(self) -> float:
        """Tokens per second of verifying what is drafted, or its best part."""
        values = np.array(self._values[1:])
        if self.may_truncate:
            return best_prefix(values, self._spent + self._step_seconds).rate
        return float((1.0 + values.sum()) / (self._spent + self._step_seconds[len(values)]))

    def _ahead(self, value: float, n: int, n_calls: int) -> Floats:
        """Acceptance of the next n draft tokens, or of fewer if the budget ends after n_calls more calls."""
        assert self._draft_costs
        spent = self._spent + n_calls * self._later
        affordable = self._affordable(self._budget.may_lose("draft"), spent)
        n_max = min(self._max_calls, self._max_path, affordable)
        found: Floats = value * self._acceptance.recent.mean ** np.arange(
            1.0, min(n, n_max - len(self._values) + 1) + 1.0
        )
        return found

    def _rate_ahead(self, values: Floats, n_calls: int) -> float:
        """The best tokens per second with more draft tokens of these values, the first after n_calls."""
        assert self._draft_costs
        n = len(self._values)
        values = values[: len(self._step_seconds) - n]
        calls = self._later * np.arange(n_calls, n_calls + len(values))
        tokens = sum(self._values) + values.cumsum()
        rates = tokens / (self._spent + calls + self._step_seconds[n : n + len(values)])
        return float(rates.max(initial=0.0))


def usual_gain(
    main: CallCosts,
    draft: CallCosts,
    max_draft: int = MAX_CALLS,
    acceptance: float = _DEFAULT_ACCEPTANCE,
) -> float:
    """Plain steps that a draft model of usual acceptance saves per token; 0 if it never gains."""
    if not could_gain(main, draft, max_draft):
        return 0.0
    usual = best_chain(acceptance, main, draft, max_draft)
    return 1.0 - 1.0 / (usual.rate * main.seconds(1))


def _window(reading: Reading) -> int:
    """The one of `WINDOWS` that a part of the history has at least; 0: it is all of it."""
    return max((w for w in WINDOWS if w <= reading.window), default=WINDOWS[0]) if reading.window else 0


def could_gain(main: CallCosts, draft: CallCosts, max_draft: int = MAX_CALLS) -> bool:
    """Return whether a draft model would gain at 95 % acceptance; one that would not is never asked."""
    return best_chain(0.95, main, draft, max_draft).rate > 1.02 / main.seconds(1)
