"""The likeliest nodes of a tree whose nodes say themselves what may follow them, wherever they are."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from spec_local.core.proposal import ROOT, Limit
from spec_local.lookups.base import Candidates

Child = TypeVar("Child", bound=tuple[Any, ...])


def likeliest(
    first: Sequence[Child],
    follow: Callable[[Child, int], Sequence[Child]],
    limit: Limit,
    least: float,
    source: str,
) -> Candidates:
    """Grow a tree, the likeliest node next; nothing where none is likely enough.

    Args:
        first: what may come first, the likeliest first. A child is its token, the chance that it stands if its parent does, and
            whatever `follow` wants to know.
        follow: what may follow a child of a depth (the first ones have 1), the likeliest first.
        least: chance of being reached, and of standing, below which nothing is guessed.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    n_leaves = 0
    # The next child of each node: its value with the sign turned, parent, rank, depth, siblings, and the parent's value.
    heap: list[tuple[float, int, int, int, Sequence[Child], float]] = []

    def offer(parent: int, rank: int, depth: int, siblings: Sequence[Child], worth: float) -> None:
        if rank < len(siblings) and worth * siblings[rank][1] >= least:
            heapq.heappush(heap, (-worth * siblings[rank][1], parent, rank, depth, siblings, worth))

    offer(ROOT, 0, 1, first, 1.0)
    while heap and len(tokens) < limit.nodes:
        value, parent, rank, depth, siblings, worth = heapq.heappop(heap)
        if rank and n_leaves == limit.branches:
            continue
        child = siblings[rank]
        n_leaves += rank > 0 or parent == ROOT  # a first child takes its parent's place
        tokens.append(child[0])
        parents.append(parent)
        confidence.append(child[1])
        offer(parent, rank + 1, depth, siblings, worth)
        if depth < limit.depth:
            offer(len(tokens) - 1, 0, depth + 1, follow(child, depth), -value)
    return Candidates(tokens, parents, confidence, source) if tokens else Candidates()
