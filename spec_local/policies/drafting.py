"""The option to ask the draft model: what it promises, what it reads of the history, and what it drafts."""

from collections.abc import Sequence
from dataclasses import replace

from spec_local.core.proposal import CallLoad, Limit, depth_of, is_chain
from spec_local.policies.base import NOTHING, WINDOWS, Decision, DraftReading, Offer, PolicyOptions
from spec_local.policies.choice import best_chain, could_gain
from spec_local.policies.cost_model import CostModel, chain_seconds
from spec_local.policies.drafted_chain import DraftedChain
from spec_local.policies.experience import Experience
from spec_local.policies.planner import plan
from spec_local.policies.sharing import SharedCosts, StepCosts

_REPLANNED_EVERY = 16  # decisions between two comparisons of trees with chains: one takes milliseconds
_TREE_MARGIN = 1.03  # of a chain's speed that a tree must promise: trees cost the caches a copy
_BY_RANK = (0.34, 0.14, 0.09)  # of rejected tokens: the draft model's second to fourth choice was right
# Tokens of an answer too short to repay the reading of its prompt, and between two times that it is
# considered.
_SHORT = 8
_MAX_TRIAL = 16  # tokens that the draft model may read although only this step is known to repay it
# Times the cost of reading a prompt that its expected gain must be. With 1, simulated answers are up to 14 %
# slower than without drafts.
_DOUBT = 2.0
_DEFAULT_ACCEPTANCE = 0.85  # of an untried draft model: 0.5B for 1.5B Qwen2.5-Coder at temperature 0
# Of that, what a draft model reaches that has read the last tokens only: of a 0.5B's
# agreement with a 1.5B's greedy answers on 14 held-out prompts, three parts of ordinary ones and one of
# summaries.
_BY_WINDOW = {0: 1.0, 32: 0.75, 128: 0.80, 512: 0.98, 2048: 1.0}


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
        self._main, self.costs, self._known = main, draft, known
        self._max_tree, self._max_tokens = options.tree_nodes, options.max_tokens
        self._max_draft = min(max_calls, options.max_draft or max_calls)
        self._considered = 0  # tokens of the answer when long reading was last considered
        self._could_gain: dict[CallLoad, bool] = {}  # once an answer
        self._n_decisions = 0
        self._tree: tuple[int, int] | None = None  # its depth and nodes, if trees promise more than chains

    def usual_gain(self, n_running: int, window: int = 0) -> float:
        """Plain steps that a usual draft model saves per token, at least 0: see `PastAnswers.gains`."""
        main, acceptance = self._main.at(CallLoad(n_running)), _DEFAULT_ACCEPTANCE * _BY_WINDOW[window]
        return 1.0 - 1.0 / (best_chain(acceptance, main, self.costs, self._max_draft).rate * main.plain)

    def decide(self, offer: Offer, costs: StepCosts, rate: float) -> Decision:
        """Choose the draft model if it promises more tokens per second than `rate`, within the budget."""
        draft, limit = self.costs, offer.limit
        if not offer.readings:
            return NOTHING
        if limit.load not in self._could_gain:
            self._could_gain[limit.load] = could_gain(costs, draft, self._max_draft)
        if not self._could_gain[limit.load]:
            return NOTHING
        if self._max_tree and self._n_decisions % _REPLANNED_EVERY == 0:
            self._plan_tree(limit, costs)
        self._n_decisions += 1
        reading = self._best_reading(offer.readings, limit.load.n_running)
        if not reading:
            return NOTHING
        acceptance = self._known.acceptance.recent
        n_unread = 1 if reading.n_unread > _MAX_TRIAL else reading.n_unread  # later steps repay the rest
        n = 1  # tokens that the first call drafts
        if draft.drafts_blocks:
            n = best_chain(acceptance.mean, costs, draft, self._max_draft, least=1).n
            limit = replace(limit, depth=min(limit.depth, n))
        loss = float(chain_seconds(draft, n_unread, n)[n] + costs.verifying[1]) - costs.plain
        if loss > self._known.budget.may_lose("draft") * costs.plain:
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
        limit, spent = decision.limit, 0.0
        if decision.reading.n_unread > _MAX_TRIAL:
            spent = -self._reading_seconds(decision.reading)
            self._known.budget.invest(-spent / costs.plain)
        if decision.source == "tree":
            return spent, None
        n_max, may_lose = min(self._max_draft, limit.depth, limit.nodes), self._known.budget.may_lose("draft")
        rate = self._known.acceptance.recent.mean
        return spent, DraftedChain(costs, self.costs, rate, n_max, may_lose, may_truncate, spent)

    def _best_reading(self, readings: Sequence[DraftReading], n_running: int) -> DraftReading | None:
        """Return the part of the history to draft from; None: reading none of them is expected to gain.

        n_running: answers at the same time.
        """
        if len(readings) == 1 and readings[0].n_unread <= _MAX_TRIAL:
            return readings[0]
        known = self._known
        if known.n_tokens < self._considered + _SHORT:
            return None
        self._considered = known.n_tokens
        # An answer that is already longer than usual is expected to double.
        left = max(known.answers.length - known.n_tokens, known.n_tokens)
        if self._max_tokens is not None:
            left = min(left, self._max_tokens - known.n_tokens)
        plain = self._main.at(CallLoad(n_running)).plain
        best, most = None, 0.0
        for reading in readings:
            seconds = self._reading_seconds(reading)
            per_token = known.answers.gain(n_running, _window(reading), self.usual_gain)
            gain = per_token * left * plain - _DOUBT * seconds
            if gain > most and seconds <= known.budget.may_invest * plain:
                best, most = reading, gain
        known.n_running = n_running
        if best:
            known.window = _window(best)
        return best

    def _reading_seconds(self, reading: DraftReading) -> float:
        """Seconds that the draft model takes to read what it has not read of it."""
        return float(chain_seconds(self.costs, reading.n_unread, 1)[1])

    def _plan_tree(self, limit: Limit, costs: StepCosts) -> None:
        """Choose between chains and trees, and how large a tree."""
        first = self._known.acceptance.recent.mean
        ranks = [first, *((1.0 - first) * share for share in _BY_RANK)]
        n_max = min(self._max_tree, limit.depth, limit.nodes)
        depth = min(n_max, self._max_draft)
        tree = plan(ranks, costs, self.costs, n_max, depth)
        chain = plan(ranks[:1], costs, self.costs, n_max, depth)
        pays = not is_chain(tree.parents) and tree.speed > _TREE_MARGIN * chain.speed
        self._tree = (depth_of(tree.parents), len(tree.parents)) if pays else None


def _window(reading: DraftReading) -> int:
    """The one of `WINDOWS` that a part of the history has at least; 0: it is all of it."""
    return max((w for w in WINDOWS if w <= reading.window), default=WINDOWS[0]) if reading.window else 0
