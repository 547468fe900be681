"""The proposer of an answer: in each step a policy chooses a lookup, the draft model or a plain step."""

from collections.abc import Sequence
from dataclasses import replace

from spec_local.core.calls import Logits
from spec_local.core.constraint import Constraint
from spec_local.core.proposal import EMPTY, Limit, Proposal
from spec_local.core.rng import Rng
from spec_local.core.span import GrowingText
from spec_local.lookups.base import Lookup
from spec_local.policies.base import Offer, Policy
from spec_local.proposers.draft_model import DraftModel, Shape


class CombinedProposer:
    """Proposes what the policy chooses, and reports to it what was accepted.

    Args:
        policy: chooses what drafts, and how much of it is verified.
        draft: None: lookups only.
        lookups: searched in every step; the first one wins where candidates are equal.
        constraint: of the answer; candidates end before a token that it forbids.
        tree: the draft model's shape when the policy chooses a tree; None: its usual one.
        branches: maximum number of branches of lookup candidates; 1: chains.
        nodes: maximum number of nodes of lookup candidates with branches.
    """

    def __init__(
        self,
        policy: Policy,
        draft: DraftModel | None = None,
        lookups: Sequence[Lookup] = (),
        tree: Shape | None = None,
        *,
        constraint: Constraint | None = None,
        branches: int = 1,
        nodes: int = 64,
    ) -> None:
        self._policy, self._draft, self._lookups, self._tree = policy, draft, lookups, tree
        self._constraint, self._branches, self._nodes = constraint, branches, nodes
        self.head = draft.head if draft else None
        self.main_costs = policy.main_costs
        self.needs_logits = any(lookup.needs_logits for lookup in lookups)
        self._proposal = EMPTY
        self._has_begun = False
        self._text: GrowingText | None = None
        """What lookups and draft models read of a history with cells; a head has states of images, too."""
        self._length: int | None = None  # of the history that was proposed for
        self._draft_used = False  # since the last commit

    async def prefill(self, history: Sequence[int]) -> None:
        if not self._draft:
            return
        if not self._has_begun:
            self._begin(history)
        if self._text and not self.head:
            history = self._text.of(history)
        self._draft.commit(history)  # discards the cache of another history
        self._draft.recall(history)
        if reading := self._policy.reads(self._draft.readings(history)):
            await self._draft.prefill(history, reading)

    async def propose(self, history: Sequence[int], limit: Limit, rng: Rng) -> Proposal:
        draft, policy = self._draft, self._policy
        if not self._has_begun:
            self._begin(history)
        text, position = self._text.of(history) if self._text else history, len(history)
        found, history = self._find(text, limit), history if self.head else text
        offer = Offer(limit, found, draft.readings(history) if draft else ())
        decision = policy.choose(offer)
        proposal = decision.proposal
        if draft and decision.by_draft_model:
            self._draft_used = True
            shape = self._tree if decision.source == "tree" else None
            drafted = await draft.propose(
                history, decision.limit or limit, rng, shape, policy, decision.reading, position
            )
            proposal = policy.trim(replace(drafted, source=decision.source))
            draft.shorten(proposal)
        else:
            proposal = policy.trim(proposal)
        self._proposal, self._length = proposal, len(history)
        return proposal

    def shorten(self, proposal: Proposal) -> None:
        self._proposal = proposal

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        for lookup in self._lookups:
            if lookup.needs_logits:
                lookup.observe(tokens, logits)

    def commit(self, history: Sequence[int]) -> None:
        if self._text and not self.head:
            history = self._text.of(history)
        if self._length is not None and self._length < len(history):
            output = history[self._length :]
            drafted = self._draft.drafted(output) if self._draft and self._draft_used else ()
            self._policy.observe(drafted, output, len(self._proposal.tokens))
        if self._draft and (self._draft_used or self._length is None):
            self._draft.commit(history)
            self._draft_used = False
        self._length = None

    def _begin(self, history: Sequence[int]) -> None:
        """Note whether the history, whose prompt is known now, has cells."""
        self._has_begun = True
        if min(history) < 0:
            self._text = GrowingText()

    def _find(self, history: Sequence[int], limit: Limit) -> list[Proposal]:
        if limit.branches > 1:
            branches = min(limit.branches, self._branches)
            nodes = min(limit.nodes, self._nodes if branches > 1 else limit.depth)
            limit = Limit(limit.depth, nodes, branches)
        candidates = [lookup.find(history, limit) for lookup in self._lookups]
        if self._constraint and (state := self._constraint.after(history)):
            candidates = [c.first(state.n_allowed(c.tokens)) if c.is_chain else c for c in candidates]
        return [found for found in candidates if found.tokens]
