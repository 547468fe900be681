"""A policy chooses, step by step, among a draft model, copies of earlier text, and nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spec_local.dice import Dice
from spec_local.policies.base import Offer, Policy
from spec_local.proposal import Proposal
from spec_local.proposers.base import Lap, Limit
from spec_local.proposers.draft_model import DraftModel
from spec_local.proposers.prompt_lookup import Copy, PromptLookup
from spec_local.proposers.shapes import Shape


class Guided:
    """Asks whom the policy names, and tells it what became of the guesses.

    Args:
        policy: the same that the draft's chain asks how far to go.
        draft: a draft model whose shape is that chain.
        lookup: copies of earlier text.
        tree: the draft's shape in steps where the policy wants a tree.
    """

    def __init__(
        self,
        policy: Policy,
        draft: DraftModel | None = None,
        lookup: PromptLookup | None = None,
        tree: Shape | None = None,
    ) -> None:
        self._policy, self._draft, self._lookup = policy, draft, lookup
        self._shapes = {"draft": draft.shape, "tree": tree or draft.shape} if draft else {}
        self._copy = Copy((), 0)
        self._proposal = Proposal()
        self._length: int | None = None  # of the history that was proposed for

    def prefill(self, history: Sequence[int]) -> Iterator[int]:
        if self._draft and self._policy.wants_draft:
            yield from self._draft.prefill(history)

    def propose(self, history: Sequence[int], limit: Limit, dice: Dice, lap: Lap) -> Proposal:
        most = min(limit.depth, limit.nodes)
        self._copy = self._lookup.find(history, most) if self._lookup else Copy((), 0)
        lap("lookup")
        unread = self._draft.unread(history) if self._draft else 0
        source = self._policy.begin(Offer(most, len(self._copy.tokens), self._copy.match, unread))
        proposal = Proposal()
        if source == "lookup":
            n = self._policy.keeps(len(self._copy.tokens))
            proposal = Proposal.chain(self._copy.tokens[:n], source="lookup")
        elif source in self._shapes and self._draft:
            self._draft.shape = self._shapes[source]
            if source == "tree":
                limit = replace(
                    limit,
                    nodes=min(limit.nodes, self._policy.tree_nodes),
                    depth=min(limit.depth, self._policy.tree_depth),
                )
            proposal = replace(self._draft.propose(history, limit, dice, lap), source=source)
        self._proposal, self._length = proposal, len(history)
        self._policy.drafted()
        lap("policy")
        return proposal

    def commit(self, history: Sequence[int]) -> None:
        if self._length is not None and self._length < len(history):
            said = history[self._length :]
            guesses = self._draft.guesses if self._draft and self._proposal.source != "lookup" else ()
            self._policy.learn(guesses, self._copy.tokens, said, len(self._proposal.tokens))
        self._length = None
        if self._draft:
            self._draft.commit(history)
