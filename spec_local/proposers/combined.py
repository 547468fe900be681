"""A policy chooses, step by step, among a draft model, copies of what stood before, and nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spec_local.core.language_model import Logits
from spec_local.core.proposal import EMPTY, Proposal
from spec_local.core.rng import Rng
from spec_local.lookups.base import Candidates, Lookup
from spec_local.policies.base import Offer, Policy
from spec_local.proposers.base import Lap, Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Shape


class CombinedProposer:
    """Asks whom the policy names, and tells it what became of the guesses.

    Args:
        policy: the same that the draft's chain asks how far to go.
        draft: a draft model whose shape is that chain.
        lookups: are asked in every step; of equals the first is taken.
        tree: the draft's shape in steps where the policy wants a tree.
        branches: most branches of what the lookups find. 1: chains.
        nodes: most of their nodes, where they may branch.
    """

    def __init__(
        self,
        policy: Policy,
        draft: DraftModel | None = None,
        lookups: Sequence[Lookup] = (),
        tree: Shape | None = None,
        *,
        branches: int = 1,
        nodes: int = 64,
    ) -> None:
        self._policy, self._draft, self._lookups = policy, draft, lookups
        self._shapes = {"draft": draft.shape, "tree": tree or draft.shape} if draft else {}
        self._branches, self._nodes = branches, nodes
        self.needs_logits = any(lookup.needs_logits for lookup in lookups)
        self._proposal = EMPTY
        self._length: int | None = None  # of the history that was proposed for
        self._asked = False  # whether the draft was, since the last commit
        # What was found in the last steps, of which the policy knows nothing yet, and the length of the history.
        self._rested: list[tuple[Sequence[Candidates], int]] = []
        self._rests = False  # in this step, too

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        if not self._draft:
            return
        self._draft.commit(history)  # it may have read another text
        if self._policy.wants_draft(self._draft.unread(history)):
            yield from self._draft.prefill(history)

    def propose(self, history: Sequence[int], limit: Limit, rng: Rng, lap: Lap) -> Proposal:
        copies: list[Candidates] = []
        if self._lookups:
            most = limit
            if limit.branches > 1:
                branches = min(limit.branches, self._branches)
                nodes = min(limit.nodes, self._nodes if branches > 1 else limit.depth)
                most = Limit(limit.depth, nodes, branches)
            copies = [found for lookup in self._lookups if (found := lookup.find(history, most)).tokens]
            lap("lookup")
        policy = self._policy
        if len(self._rested) < policy.rests and not any(map(policy.hopes, copies)):
            self._rested.append((copies, len(history)))
            self._rests = True
            return EMPTY
        self._tell(history)
        unread = self._draft.unread(history) if self._draft else 0
        source = policy.begin(Offer(limit, copies, unread))
        proposal = EMPTY
        if source == "lookup":
            proposal = policy.copy
        elif source in self._shapes and self._draft:
            self._draft.shape = self._shapes[source]
            if source == "tree":
                limit = replace(
                    limit,
                    nodes=min(limit.nodes, policy.tree_nodes),
                    depth=min(limit.depth, policy.tree_depth),
                )
            self._asked = True
            proposal = replace(self._draft.propose(history, limit, rng, lap), source=source)
        self._proposal, self._length = proposal, len(history)
        policy.drafted()
        lap("policy")
        return proposal

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        for lookup in self._lookups:
            if lookup.needs_logits:
                lookup.observe(tokens, logits)

    def commit(self, history: Sequence[int]) -> None:
        if self._rests:
            self._rests = False
            return
        if self._length is not None and self._length < len(history):
            guesses = self._draft.guesses if self._draft and self._asked else ()
            self._policy.learn(guesses, history[self._length :], len(self._proposal.tokens))
        if self._draft and (self._asked or self._length is None):
            self._draft.commit(history)
            self._asked = False
        if self._length is None:
            self._tell(history)  # the answer has ended
        self._length = None

    def _tell(self, history: Sequence[int]) -> None:
        if self._rested:
            self._policy.rested([(copies, history[place]) for copies, place in self._rested])
            self._rested = []
