"""Best-first search for the most probable nodes of a tree."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from spec_local.core.proposal import EMPTY, ROOT, Limit, Proposal

Child = TypeVar("Child", bound=tuple[Any, ...])


def best_first(
    first: Sequence[Child],
    follow: Callable[[Child, int], Sequence[Child]],
    limit: Limit,
    min_probability: float,
    source: str,
) -> Proposal:
    """Repeatedly add the most probable node to a tree, as long as it reaches a minimum probability.

    Args:
        first: children of the root, the most probable first. A child consists of its token, the probability
            that it is accepted if its parent is, and whatever `follow` needs.
        follow: returns the children of a child at a depth (1 for `first`), the most probable first.
        min_probability: minimum probability that a node and all its ancestors are accepted.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    n_leaves = 0
    # The next child of each node: its negated probability, parent, rank, depth, siblings, and its
    # parent's probability.
    heap: list[tuple[float, int, int, int, Sequence[Child], float]] = []

    def offer(parent: int, rank: int, depth: int, siblings: Sequence[Child], reach: float) -> None:
        if rank < len(siblings) and reach * siblings[rank][1] >= min_probability:
            heapq.heappush(heap, (-reach * siblings[rank][1], parent, rank, depth, siblings, reach))

    offer(ROOT, 0, 1, first, 1.0)
    while heap and len(tokens) < limit.nodes:
        probability, parent, rank, depth, siblings, reach = heapq.heappop(heap)
        if rank and n_leaves == limit.branches:
            continue
        child = siblings[rank]
        n_leaves += rank > 0 or parent == ROOT  # a first child replaces its parent as a leaf
        tokens.append(child[0])
        parents.append(parent)
        confidence.append(child[1])
        offer(parent, rank + 1, depth, siblings, reach)
        if depth < limit.depth:
            offer(len(tokens) - 1, 0, depth + 1, follow(child, depth), -probability)
    return Proposal(tokens, parents, source=source, confidence=confidence) if tokens else EMPTY
