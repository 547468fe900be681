"""The adaptive policy: in each step do what has the highest expected tokens per second, within a loss budget.

The options are a plain step, a part of what lookups found (`best_candidates`), and the draft model
(`Drafting`); after each draft token, another call or verification (`DraftedChain`).
"""

from collections.abc import Sequence

from spec_local.core.proposal import MAX_DRAFT, Proposal
from spec_local.policies.base import (
    NOTHING,
    Decision,
    DraftOutput,
    DraftReading,
    Offer,
    Policy,
    PolicyOptions,
)
from spec_local.policies.candidates import best_candidates
from spec_local.policies.drafted_chain import DraftedChain
from spec_local.policies.drafting import Drafting
from spec_local.policies.experience import Experience
from spec_local.policies.sharing import SharedCosts, StepTiming

MAX_CALLS = 16
"""Maximum number of draft calls a step: no pair of models that was measured gained from more."""
_MAX_OBSERVED = 64  # tokens of a draft call whose cost is observed: longer ones read prompts


class Adaptive(Policy):
    """Never slower than plain decoding for long, and as fast as acceptance allows."""

    draft_max = MAX_DRAFT

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        main, draft = options.costs()
        self.main_costs: SharedCosts = main
        self._known = known = options.experience or Experience()
        self._clock, self._as_tree = options.clock, options.tree_nodes > 0
        self._timing = StepTiming(main)
        self._drafting = Drafting(main, draft, known, options, MAX_CALLS) if draft else None
        known.start(self._drafting.usual_gain if self._drafting else lambda n_running, window: 0.0)
        # Of the step at hand:
        self._candidates: Sequence[Proposal] = ()
        self._decision, self._costs = NOTHING, main.at()
        self._chain: DraftedChain | None = None
        self._spent = 0.0  # seconds on drafting that this step must repay
        self._call_began = 0.0
        self._rate_without_draft = 0.0  # tokens per second expected without the draft model

    def reads(self, readings: Sequence[DraftReading]) -> DraftReading | None:
        return None  # the draft model reads when the answer has turned out not to be short

    def choose(self, offer: Offer) -> Decision:
        self._candidates, limit = offer.candidates, offer.limit
        if limit.load != self._costs.load or not limit.load.is_alone:  # other requests observe costs, too
            self._costs = self.main_costs.at(limit.load)
        costs = self._costs
        self._decision, self._chain, self._spent = NOTHING, None, 0.0
        self._call_began = self._clock()
        if costs.needs_plain:
            return NOTHING
        known, as_tree = self._known, self._as_tree
        best, part = best_candidates(offer, costs, known.acceptance, known.budget, as_tree=as_tree)
        self._rate_without_draft = best.rate
        if self._drafting and (drafted := self._drafting.decide(offer, costs, best.rate)).reading:
            self._decision = drafted
            self._spent, self._chain = self._drafting.begin(self._decision, costs, self.may_truncate)
        elif part.tokens:
            self._decision = Decision("lookup", proposal=part)
        return self._decision

    def wants_call(self) -> bool:
        assert self._chain
        wanted = self._chain.wants_call()
        self._call_began = self._clock()
        return wanted

    def wants_token(self, output: DraftOutput) -> bool:
        assert self._chain
        assert self._drafting
        if 0 < output.n_read <= _MAX_OBSERVED and self._costs.load.is_alone:
            self._drafting.costs.observe(output.n_read, self._clock() - self._call_began)
        return self._chain.wants_token(output, self._known.acceptance.draft.rate(output.confidence))

    def trim(self, proposal: Proposal) -> Proposal:
        now = self._clock()
        if self._chain and self._chain.confidence:
            proposal, self._spent = self._chain.best_part(proposal), self._chain.spent
        elif self._decision.reading:
            self._spent += now - self._call_began
        self._call_began = now
        return proposal

    def observe(self, drafted: Sequence[int], output: Sequence[int], n_verified: int) -> None:
        took, before = self._clock() - self._call_began, self._costs.plain
        self._costs = self._timing.observe(self._costs, n_verified, took)
        if not 0.8 < self._costs.plain / before < 1.25:
            self._known.budget.restore()
        acceptance = self._known.acceptance
        if self._decision.by_draft_model:
            acceptance.observe_draft(drafted, output, self._chain.confidence if self._chain else ())
        else:
            acceptance.recent.forget()
        acceptance.observe_lookups(self._candidates, output)
        self._known.n_tokens += len(output)
        self._settle(took, len(output), n_verified)

    def _settle(self, took: float, n_output: int, n_verified: int) -> None:
        """Account for what a step gained or lost."""
        known, costs, decision = self._known, self._costs, self._decision
        seconds = float(costs.verifying[n_verified]) if n_verified else costs.plain
        if n_verified and costs.load.is_alone:
            # Noise is no loss of speculation, but the table may be outdated: the clock counts within bounds.
            seconds = min(2.0 * seconds, max(0.5 * seconds, took))
        seconds += self._spent + costs.seconds_again(n_verified + 1 - n_output, n_output)
        plain = costs.plain
        if decision.by_draft_model:
            # Of each step only what it gained over the best option without the draft model.
            known.gained = (known.gained or 0.0) + (n_output / self._rate_without_draft - seconds) / plain
        known.budget.settle(
            "draft" if decision.by_draft_model else "lookup" if decision.proposal.tokens else None,
            n_output - seconds / plain,
            seconds / plain,
            1.0 - known.acceptance.recent.mean if decision.by_draft_model else 1.0,
            costs.load.n_parallel,
        )
