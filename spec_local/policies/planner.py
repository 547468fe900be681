"""The best tree to draft, and the best part of it to verify, from measured costs and acceptance rates.

The acceptance model is Sequoia's (Chen et al. 2024, arXiv 2402.12374, section 3.1): the child of rank j is
accepted with probability acceptance[j], the same at every node. The value of a node is the product along its
path: the probability that it is accepted. A step generates one token more than it accepts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import ROOT
from spec_local.policies.choice import best_chain
from spec_local.policies.cost_model import CallCosts, Floats

Ints = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Plan:
    """A tree, and what it is expected to yield.

    parents: of each node, level by level, siblings by rank; empty: do not speculate.
    tokens_per_step: expected, the bonus token included; 1 without speculation.
    seconds: of one step: the calls of the draft model and one of the main model.
    """

    parents: tuple[int, ...]
    tokens_per_step: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens_per_step / self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class BestTrees:
    """For every size m and depth d the best tree of exactly m nodes on at most d levels.

    tokens: float64 (d + 1, m + 1), expected tokens of a step; −inf if there is no such tree.
    reads: intp (d + 1, m + 1, d), number of nodes with children on each level, from the root's: what the
        draft model evaluates to draft that tree, a level a call.
    sizes: intp (d + 1, ranks, m + 1), nodes of the child of each rank, itself included, if m nodes are left
        for it and the ranks after it; 0: no child.
    """

    tokens: Floats
    reads: Ints
    sizes: Ints

    def parents(self, nodes: int, depth: int) -> tuple[int, ...]:
        """The best tree of this size and depth: level by level, siblings by rank.

        Raises:
            ValueError: there is no such tree.
        """
        if not np.isfinite(self.tokens[depth, nodes]):
            raise ValueError(f"no tree of {nodes} nodes has {depth} levels")
        parents: list[int] = []
        todo = [(ROOT, nodes, depth)]  # node, nodes below it, levels below it
        for node, below, levels in todo:  # the list grows meanwhile
            rank = 0
            while below:
                size = int(self.sizes[levels, rank, below])
                todo.append((len(parents), size - 1, levels - 1))
                parents.append(node)
                below -= size
                rank += 1
        return tuple(parents)


def best_trees(acceptance: Sequence[float], max_nodes: int, max_depth: int) -> BestTrees:
    """Sequoia's dynamic program (algorithm 1 of the paper): O(depth · ranks · nodes²).

    In a tree of depth d the nodes are divided between the child of rank 0, with the best tree of depth d−1
    of that size, and the ranks after it.

    Args:
        acceptance: by rank; a node's children take the first ranks without gaps.
        max_nodes, max_depth: limits of the tree, both at least 0. Deeper trees than nodes do not exist:
            `tokens` has min(max_nodes, max_depth) + 1 rows.

    Raises:
        ValueError: the acceptance is not in [0, 1], its sum exceeds 1, or a limit is negative.
    """
    _check(acceptance, max_nodes, max_depth)
    depth = min(max_nodes, max_depth)
    ranks = min(len(acceptance), max_nodes)
    # Values of 0, 1, … nodes without children; the last entry, index −1, is for an impossible division.
    nothing = np.full(max_nodes + 2, -np.inf)
    nothing[0] = 0.0
    tokens = np.full((depth + 1, max_nodes + 1), -np.inf)
    tokens[:, 0] = 1.0
    reads = np.zeros((depth + 1, max_nodes + 1, depth), np.intp)
    sizes = np.zeros((depth + 1, ranks, max_nodes + 1), np.intp)
    size = np.arange(1, max_nodes + 1)
    left = size[:, None] - size  # (nodes to divide, nodes of a child) -> nodes for the ranks after it
    left[left < 0] = -1
    for d in range(1, depth + 1):
        below = tokens[d - 1, :-1]
        possible = np.isfinite(below)
        best = nothing
        for rank in reversed(range(ranks)):
            child = np.full(max_nodes, -np.inf)
            child[possible] = acceptance[rank] * below[possible]  # 0 · inf is NaN
            values = child + best[left]
            choice = values.argmax(axis=1)
            best = nothing.copy()
            best[1:-1] = values[size - 1, choice]
            sizes[d, rank, 1:] = choice + 1
        tokens[d] = 1.0 + best[:-1]
        _count_reads(reads, sizes, d)
    return BestTrees(tokens, reads, sizes)


def _count_reads(reads: Ints, sizes: Ints, d: int) -> None:
    """Compute `reads` of depth d, for all sizes at once, from those of depth d−1."""
    nodes = np.arange(reads.shape[1])
    reads[d, 1:, 0] = 1
    for chosen in sizes[d]:
        having = nodes.nonzero()[0]  # sizes with nodes left for this rank
        size = chosen[nodes[having]]
        reads[d, having, 1:] += reads[d - 1, size - 1, :-1]
        nodes[having] -= size


def plan(
    acceptance: Sequence[float], main: CallCosts, draft: CallCosts, max_nodes: int, max_depth: int
) -> Plan:
    """The tree with the least time per token; a chain or nothing where verification is expensive.

    The draft model evaluates a level a call, only nodes with children; the main model evaluates all nodes
    and the last token of the history in one call. The dynamic program ignores that wide levels cost the
    draft model more. It is therefore repeated for narrow trees, and the best trees are compared at their
    full cost. If all calls of the draft model cost the same, the result is the best of all trees; otherwise
    it is within about one percent of it.

    Args:
        acceptance: by rank; the sum is at most 1. No node gets more children than there are ranks.
        main, draft: seconds a call.
        max_nodes, max_depth: limits of the tree, both at least 0.

    Raises:
        ValueError: the acceptance is not in [0, 1], its sum exceeds 1, a limit is negative, or a cost model
            is empty.
    """
    best = plan_chain(acceptance, main, draft, max_nodes, max_depth)
    width = 2
    while width // 2 < min(len(acceptance), max_nodes):
        tree = _best(acceptance[:width], main, draft, max_nodes, max_depth)
        # A tree must not win against an equal chain by rounding.
        if tree.seconds / tree.tokens_per_step < best.seconds / best.tokens_per_step * (1 - 1e-9):
            best = tree
        width *= 2
    return best


def plan_chain(
    acceptance: Sequence[float], main: CallCosts, draft: CallCosts, max_nodes: int, max_depth: int
) -> Plan:
    """The chain, or nothing, with the least time per token; arguments and errors of `plan`."""
    _check(acceptance, max_nodes, max_depth)
    step = best_chain(sum(acceptance[:1]), main, draft, min(max_nodes, max_depth))
    return Plan(tuple(range(ROOT, step.n - 1)), step.tokens, step.seconds)


def _best(
    acceptance: Sequence[float], main: CallCosts, draft: CallCosts, max_nodes: int, max_depth: int
) -> Plan:
    """Of the best trees of every size and depth the one with the least time per token, then the smallest."""
    trees = best_trees(acceptance, max_nodes, max_depth)
    verifying = main.first(max_nodes + 1)[1:]
    if draft.drafts_blocks:
        seconds = draft.first(len(trees.tokens) - 1)[:, None] + verifying
    else:
        seconds = draft.first(max_nodes)[trees.reads].sum(axis=2) + verifying
    per_token = np.full_like(seconds, np.inf)
    np.divide(seconds, trees.tokens, out=per_token, where=np.isfinite(trees.tokens))
    depth, nodes = divmod(int(per_token.argmin()), max_nodes + 1)
    parents = trees.parents(nodes, depth)
    return Plan(parents, float(trees.tokens[depth, nodes]), float(seconds[depth, nodes]))


def _check(acceptance: Sequence[float], max_nodes: int = 0, max_depth: int = 0) -> None:
    if max_nodes < 0 or max_depth < 0:
        raise ValueError(f"there is no tree of {max_nodes} nodes on {max_depth} levels: give 0 or more")
    total = sum(acceptance)
    if not all(0 <= a <= 1 for a in acceptance) or not total <= 1 + 1e-9:
        raise ValueError(
            f"acceptance by rank must be probabilities that sum to at most 1, not {list(acceptance)}"
        )
