"""The option to ask the draft model: what it promises, and what it drafts."""

from dataclasses import replace

from spec_local.core.proposal import Limit
from spec_local.policies.base import NOTHING, Decision, Offer, PolicyOptions
from spec_local.policies.choice import best_chain
from spec_local.policies.cost_model import CostModel, chain_seconds
from spec_local.policies.drafted_chain import DraftedChain
from spec_local.policies.experience import Experience
from spec_local.policies.planner import plan
from spec_local.policies.reading import ReadingChoice
from spec_local.policies.sharing import SharedCosts, StepCosts

_REPLANNED_EVERY = 16  # decisions between two comparisons of trees with chains: one takes milliseconds
_TREE_MARGIN = 1.03  # of a chain's speed that a tree must promise: trees cost the caches a copy
_BY_RANK = (0.34, 0.14, 0.09)  # of rejected tokens: the draft model's second to fourth choice was right


class Drafting:
    """Decides whether the draft model drafts in a step, a chain or a tree, from which part of the history.

    Args:
        main, draft: seconds a call. Calls of the draft model count in full: the other requests wait for
            them, and rarely draft in the same step.
        known: of earlier answers, and of this one.
        max_calls: maximum number of calls of the draft model in a step.
    """

    def __init__(
        self, main: SharedCosts, draft: CostModel, known: Experience, options: PolicyOptions, max_calls: int
    ) -> None:
        self.costs = draft
        self._acceptance, self._budget, self._max_tree = known.acceptance, known.budget, options.tree_nodes
        self._max_draft = min(max_calls, options.max_draft or max_calls)
        self.reading = ReadingChoice(main, draft, known, self._max_draft, options.max_tokens)
        self._n_decisions = 0
        self._tree: tuple[int, int] | None = None  # its depth and nodes, if trees promise more than chains

    def decide(self, offer: Offer, costs: StepCosts, rate: float) -> Decision:
        """Choose the draft model if it promises more tokens per second than `rate`, within the budget."""
        draft, limit = self.costs, offer.limit
        if not offer.readings:
            return NOTHING
        if self._max_tree and self._n_decisions % _REPLANNED_EVERY == 0:
            self._plan_tree(limit, costs)
        self._n_decisions += 1
        reading = self.reading.best(offer.readings, limit.load.n_running)
        if not reading:
            return NOTHING
        acceptance = self._acceptance.recent
        n_unread = 1 if self.reading.is_long(reading) else reading.n_unread
        n = 1  # tokens that the first call drafts
        if draft.drafts_blocks:
            n = best_chain(acceptance.mean, costs, draft, self._max_draft, least=1).n
            limit = replace(limit, depth=min(limit.depth, n))
        loss = float(chain_seconds(draft, n_unread, n)[n] + costs.verifying[1]) - costs.plain
        if loss > self._budget.may_lose("draft") * costs.plain:
            return NOTHING
        if best_chain(acceptance.upper, costs, draft, self._max_draft, n_unread).rate <= rate:
            return NOTHING
        if not self._tree:
            return Decision("draft", limit, reading=reading)
        depth, nodes = self._tree
        limit = replace(limit, depth=min(limit.depth, depth), nodes=min(limit.nodes, nodes))
        return Decision("tree", limit, reading=reading)

    def begin(
        self, decision: Decision, costs: StepCosts, may_truncate: bool
    ) -> tuple[float, DraftedChain | None]:
        """Begin to draft: `spent` as in `DraftedChain`, and the chain; None: it is a tree."""
        assert decision.reading
        assert decision.limit
        limit, spent = decision.limit, -self.reading.invest(decision.reading, costs.plain)
        if decision.source == "tree":
            return spent, None
        n_max, may_lose = min(self._max_draft, limit.depth, limit.nodes), self._budget.may_lose("draft")
        rate = self._acceptance.recent.mean
        return spent, DraftedChain(costs, self.costs, rate, n_max, may_lose, may_truncate, spent)

    def _plan_tree(self, limit: Limit, costs: StepCosts) -> None:
        """Choose between chains and trees, and how large a tree."""
        first = self._acceptance.recent.mean
        ranks = [first, *((1.0 - first) * share for share in _BY_RANK)]
        n_max = min(self._max_tree, limit.depth, limit.nodes)
        depth = min(n_max, self._max_draft)
        tree = plan(ranks, costs, self.costs, n_max, depth)
        chain = plan(ranks[:1], costs, self.costs, n_max, depth)
        pays = not tree.is_chain and tree.speed > _TREE_MARGIN * chain.speed
        self._tree = (tree.depth, len(tree.parents)) if pays else None
