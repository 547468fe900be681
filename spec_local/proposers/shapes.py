"""Trees that a draft model drafts: which tokens it evaluates, and which of them it proposes.

A shape that draws tokens (`Drawn`, and `Chain` in `spec_local.proposers.draft_model`) fixes the number of a
node's children before it draws any of them, and proposes all that it drew, even if the draft model's context
is full; every verifier for its drawing is lossless then. A shape that chooses tokens (`Coupled`, `BestFirst`,
`Beam`) may look at anything, since its proposals have no probabilities.
"""

import heapq
import math
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import ROOT, Drawing, Limit, Proposal, path_to
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution
from spec_local.errors import ContextOverflow
from spec_local.policies.acceptance_model import RecentRate
from spec_local.policies.base import ALWAYS, Policy
from spec_local.policies.choice import best_prefix
from spec_local.policies.cost_model import CallCosts
from spec_local.policies.sharing import SharedCosts
from spec_local.proposers.draft_model import DraftTree, Shape


class _Divided(Shape):
    """A tree in which a node divides a budget of nodes among its children, as if each continued as a chain
    with the usual acceptance rate. Where the draft model is confident that gives a chain, elsewhere branches.

    Args:
        nodes: maximum number of nodes.
        width: maximum number of children of a node.
    """

    _drawing: Drawing = "chosen"

    def __init__(self, nodes: int, width: int = 4) -> None:
        self._nodes, self._width = nodes, width
        self._acceptance = RecentRate(8.0, 2.0, memory=50.0)

    async def build(self, tree: DraftTree, limit: Limit, rng: Rng, policy: Policy = ALWAYS) -> Proposal:
        distributions: dict[int, Distribution] = {}
        draws: list[int] = []
        level = {ROOT: min(limit.nodes, limit.branches, self._nodes)}
        depth = 0
        with suppress(ContextOverflow):
            while level and depth < limit.depth:
                below: dict[int, int] = {}
                after = await tree.distributions(list(level))
                for (parent, budget), q in zip(level.items(), after, strict=True):
                    if self._drawing != "chosen":
                        distributions[parent] = q
                    chain = self._rate ** np.arange(min(budget, limit.depth - depth))
                    by_token: dict[int, int] = {}
                    for token, share in self._children(q, budget, chain, rng, tree.position + depth):
                        if token not in by_token:
                            by_token[token] = tree.add(token, parent)
                        node = by_token[token]
                        draws.append(node)
                        if share > 1 and not tree.is_end(token):
                            below[node] = below.get(node, 0) + share - 1
                level, depth = below, depth + 1
        return Proposal(tree.tokens, tree.parents, self._drawing, distributions, draws)

    def observe(self, n_accepted: int, exhausted: bool) -> None:
        for accepted in [True] * n_accepted + [False] * (not exhausted):
            self._acceptance.observe(accepted)

    @property
    def _rate(self) -> float:
        """The usual acceptance rate."""
        return min(0.98, max(0.05, self._acceptance.mean))

    @abstractmethod
    def _children(
        self, q: Distribution, budget: int, chain: NDArray[np.floating], rng: Rng, position: int
    ) -> Iterable[tuple[int, int]]:
        """Tokens of a node's children, and the number of nodes for each, itself included.

        Args:
            chain: probability that 0, 1, … tokens after a child are accepted if it is.
            position: of the children in the history.
        """


def _divide(
    rates: NDArray[np.float64], chain: NDArray[np.floating], budget: int
) -> tuple[float, NDArray[np.intp]]:
    """The best division of a budget among children with these acceptance rates: its value, and shares."""
    values = np.outer(rates, chain)
    order = np.argsort(-values, axis=None, kind="stable")[:budget]
    return float(values.ravel()[order].sum()), np.bincount(order // len(chain), minlength=len(rates))


class Coupled(_Divided):
    """A Gumbel-coupled tree, for exact-match verification.

    The children of a node are the tokens that the main model most probably draws with the random numbers of
    their position, as in a coupled `Chain`. With two or more children, the main model's token is among them
    more often than with any other drawing (docs/notes/experiments.md), and a seed determines the output.
    """

    def _children(
        self, q: Distribution, budget: int, chain: NDArray[np.floating], rng: Rng, position: int
    ) -> Iterable[tuple[int, int]]:
        tokens, probs = q.ranked(rng, position, min(self._width, budget))
        shares = _divide(probs, chain, budget)[1]
        return [(t, n) for t, n in zip(tokens.tolist(), shares.tolist(), strict=True) if n]


class Drawn(_Divided):
    """A tree of drawn tokens, for a verifier that uses q.

    Args:
        drawing: how children are drawn; the verifier's.
        nodes, width: see `_Divided`.
    """

    def __init__(self, drawing: Drawing, nodes: int, width: int = 4) -> None:
        super().__init__(nodes, 1 if drawing == "one" else width)
        self._drawing: Drawing = drawing

    def _children(
        self, q: Distribution, budget: int, chain: NDArray[np.floating], rng: Rng, position: int
    ) -> Iterable[tuple[int, int]]:
        top = q.top(min(self._width, budget))[1]
        best, shares = 0.0, [budget]
        for n in range(1, len(top) + 1):
            value, counts = _divide(self._child_rates(top, n), chain, budget)
            if value > best and counts.all():
                best, shares = value, counts.tolist()
        return zip(draw_children(q, len(shares), self._drawing, rng), shares, strict=True)

    def _child_rates(self, top: NDArray[np.float64], n: int) -> NDArray[np.float64]:
        """Estimated acceptance of n children before they are drawn, from the largest probabilities of q."""
        # Fitted to a 0.5B draft model of a 1.5B main model at an acceptance rate of 0.85.
        power = math.log(self._rate) / math.log(0.85)
        confidence = float((top**2).sum())  # the probability that two draws agree
        first = (0.35 + 0.62 * confidence) ** power
        second = (1.0 - first) * 0.5 * first
        return np.append(first, second * 0.5 ** np.arange(n - 1, dtype=np.float64))


def draw_children(q: Distribution, n: int, drawing: Drawing, rng: Rng) -> list[int]:
    """Draw n tokens for the children of a node; q must have as many tokens."""
    if drawing == "with replacement":
        return [q.draw(rng) for _ in range(n)]
    drawn: list[int] = []
    for _ in range(n):
        drawn.append(q.without(drawn).draw(rng))
    return drawn


class BestFirst(Shape):
    """The n most probable nodes of the whole tree.

    OPT-Tree (Wang et al. 2024, arXiv 2406.17276) and EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the value
    of a node is the product of the probabilities on its path, which is at most its parent's. The best n
    nodes are therefore found by evaluating, level by level, all nodes that are among the best n so far.

    Args:
        nodes: maximum number of nodes.
        width: maximum number of children of a node.
        costs: of the main and the draft model, to propose only nodes worth the main model's time; None: all
            of them.
    """

    def __init__(
        self, nodes: int, width: int = 8, costs: tuple[SharedCosts, CallCosts] | None = None
    ) -> None:
        self._nodes, self._width, self._costs = nodes, width, costs

    async def build(self, tree: DraftTree, limit: Limit, rng: Rng, policy: Policy = ALWAYS) -> Proposal:
        n = min(limit.nodes, limit.branches, self._nodes)
        values: list[float] = []
        depths: list[int] = []
        evaluated: set[int] = set()
        level, spent = [ROOT], 0.0
        best: list[int] = []
        with suppress(ContextOverflow):
            while level:
                ranked = await tree.most_probable(level, min(n, self._width))
                if self._costs:
                    draft = self._costs[1]
                    blocks = draft.drafts_blocks
                    spent = draft.seconds(limit.depth) if blocks else spent + draft.seconds(len(level))
                evaluated.update(level)
                for parent, (tokens, probs) in zip(level, ranked, strict=True):
                    value, depth = (1.0, 0) if parent == ROOT else (values[parent], depths[parent])
                    for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True):
                        tree.add(token, parent)
                        values.append(value * prob)
                        depths.append(depth + 1)
                best = heapq.nlargest(n, range(len(values)), key=values.__getitem__)
                level = [
                    node
                    for node in best
                    if node not in evaluated
                    and depths[node] < limit.depth
                    and not tree.is_end(tree.tokens[node])
                ][: limit.branches - len(evaluated)]
        if self._costs:
            seconds = spent + self._costs[0].at(limit.load).first(len(best) + 1)[1:]
            best = best[: best_prefix(np.array([values[node] for node in best]), seconds).n]
        return Proposal(tree.tokens, tree.parents).part(best)


class Beam(Shape):
    """The paths of a beam search, merged into a tree.

    Args:
        width: number of paths.
        nodes: maximum number of nodes of the tree; the search stops before it exceeds them.
    """

    def __init__(self, width: int, nodes: int) -> None:
        self._width, self._nodes = width, nodes

    async def build(self, tree: DraftTree, limit: Limit, rng: Rng, policy: Policy = ALWAYS) -> Proposal:
        max_nodes = min(limit.nodes, self._nodes)
        width = min(self._width, max_nodes, limit.branches)
        n_evaluated = 0
        beams = {ROOT: 1.0}  # probability of each path by its last node
        kept: set[int] = set()
        with suppress(ContextOverflow):
            for _ in range(limit.depth):
                level = [b for b in beams if b == ROOT or not tree.is_end(tree.tokens[b])]
                n_evaluated += len(level)
                if not level or n_evaluated > limit.branches:
                    break
                candidates = [(value, b, None) for b, value in beams.items() if b not in level]
                ranked = await tree.most_probable(level, width)
                for parent, (tokens, probs) in zip(level, ranked, strict=True):
                    for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True):
                        candidates.append((beams[parent] * prob, parent, token))
                best = heapq.nlargest(width, candidates, key=lambda c: c[0])
                beams = {
                    node if token is None else tree.add(token, node): value for value, node, token in best
                }
                merged = {node for beam in beams for node in path_to(tree.parents, beam)}
                if len(merged) > max_nodes:
                    break
                kept = merged
        return Proposal(tree.tokens, tree.parents).part(kept)
