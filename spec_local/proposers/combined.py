"""The proposer of an answer: in each step a policy chooses a lookup, the draft model or a plain step."""

from collections.abc import Sequence
from dataclasses import replace

from spec_local.core.calls import Logits
from spec_local.core.proposal import EMPTY, Proposal
from spec_local.core.rng import Rng
from spec_local.lookups.base import Candidates, Lookup
from spec_local.policies.base import Offer, Policy
from spec_local.proposers.base import Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.shapes import Shape


class CombinedProposer:
    """Proposes what the policy chooses, and reports to it what was accepted.

    Args:
        policy: the same object as that of the draft model's chain.
        draft: a draft model whose shape is that chain; None: lookups only.
        lookups: searched in every step; the first one wins where candidates are equal.
        tree: the draft model's shape when the policy chooses a tree.
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
        branches: int = 1,
        nodes: int = 64,
    ) -> None:
        self._policy, self._draft, self._lookups = policy, draft, lookups
        self._shapes = {"draft": draft.shape, "tree": tree or draft.shape} if draft else {}
        self._branches, self._nodes = branches, nodes
        self.head = draft.head if draft else None
        self.needs_logits = any(lookup.needs_logits for lookup in lookups)
        self._proposal = EMPTY
        self._length: int | None = None  # of the history that was proposed for
        self._draft_used = False  # since the last commit
        # Skipped steps that the policy has not observed: candidates, and the length of the history.
        self._skipped: list[tuple[Sequence[Candidates], int]] = []
        self._is_skipping = False  # in this step

    async def prefill(self, history: Sequence[int]) -> None:
        if not self._draft:
            return
        self._draft.commit(history)  # discards the cache of another history
        if self._policy.reads_prompt(self._draft.unread(history)):
            await self._draft.prefill(history)

    async def propose(self, history: Sequence[int], limit: Limit, rng: Rng) -> Proposal:
        policy = self._policy
        candidates = self._find(history, limit) if self._lookups else []
        if len(self._skipped) < policy.n_skippable and not any(map(policy.could_pay, candidates)):
            self._skipped.append((candidates, len(history)))
            self._is_skipping = True
            return EMPTY
        self._report_skipped(history)
        n_unread = self._draft.unread(history) if self._draft else 0
        source = policy.choose(Offer(limit, candidates, n_unread))
        proposal = EMPTY
        if source == "lookup":
            proposal = policy.lookup_proposal
        elif source in self._shapes and self._draft:
            depth = policy.chain_depth
            if source == "tree":
                depth = policy.tree_depth
                limit = replace(limit, nodes=min(limit.nodes, policy.tree_nodes))
            limit = replace(limit, depth=min(limit.depth, depth))
            self._draft_used = True
            drafted = await self._draft.propose(history, limit, rng, self._shapes[source])
            proposal = replace(drafted, source=source)
        values = policy.values(proposal) if proposal.tokens else ()
        if values:
            proposal = replace(proposal, values=values)
        self._proposal, self._length = proposal, len(history)
        policy.on_drafted()
        return proposal

    def shorten(self, proposal: Proposal) -> None:
        self._proposal = proposal

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        for lookup in self._lookups:
            if lookup.needs_logits:
                lookup.observe(tokens, logits)

    def commit(self, history: Sequence[int]) -> None:
        if self._is_skipping:
            self._is_skipping = False
            return
        if self._length is not None and self._length < len(history):
            output = history[self._length :]
            drafted = self._draft.drafted(output) if self._draft and self._draft_used else ()
            self._policy.observe(drafted, output, len(self._proposal.tokens))
        if self._draft and (self._draft_used or self._length is None):
            self._draft.commit(history)
            self._draft_used = False
        if self._length is None:
            self._report_skipped(history)  # the answer has ended
        self._length = None

    def _find(self, history: Sequence[int], limit: Limit) -> list[Candidates]:
        if limit.branches > 1:
            branches = min(limit.branches, self._branches)
            nodes = min(limit.nodes, self._nodes if branches > 1 else limit.depth)
            limit = Limit(limit.depth, nodes, branches)
        return [c for lookup in self._lookups if (c := lookup.find(history, limit)).tokens]

    def _report_skipped(self, history: Sequence[int]) -> None:
        if self._skipped:
            self._policy.observe_skipped([(candidates, history[n]) for candidates, n in self._skipped])
            self._skipped = []
