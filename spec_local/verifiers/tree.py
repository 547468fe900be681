"""Verification of trees node by node: the common part of the rules for the children of one node.

A rule draws one token with exactly the main model's distribution p, in such a way that the token is likely to
be a child. If it is, the walk continues from that child; otherwise it ends. Deeper nodes do not matter, so
the shape of a tree may depend on anything except later draws.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from spec_local.core.proposal import Drawing, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import align
from spec_local.verifiers.base import Floats, MainDistribution, Verifier, walk

NodeRule = Callable[[Floats, Floats, Sequence[int], Rng], int]
"""``rule(p, q, drawn, rng) -> token``

p, q: float64 (V,), the main and the draft model's distribution at the node; must not be modified.
drawn: tokens of the node's children, in draw order.
token: drawn from p, over all draws of the children and of the rng; a child that has it is accepted.
"""


def tree_verifier(drawing: Drawing, rule: NodeRule) -> Verifier:
    """A verifier that walks from the root and applies a rule at each node."""
    return Verifier(drawing, partial(_verify_proposal, rule))


def _verify_proposal(
    rule: NodeRule, proposal: Proposal, p: MainDistribution, n_vocab: int, rng: Rng
) -> tuple[list[int], int]:
    def draw(node: int, children: Sequence[int], depth: int) -> int:
        if not children:
            return p(node).draw(rng)
        rows, columns = align([p(node), proposal.distributions[node]], n_vocab)
        tokens = np.array([proposal.tokens[child] for child in children])
        drawn = tokens if columns is None else columns.searchsorted(tokens)
        token = rule(rows[0], rows[1], drawn.tolist(), rng)
        return token if columns is None else int(columns[token])

    return walk(proposal, draw)


def ratio(p: Floats, q: Floats, token: int) -> float:
    """p/q of a drawn token.

    Raises:
        ValueError: q is 0, so that the token cannot have been drawn from q.
    """
    if q[token] <= 0:
        raise ValueError("a draft token has probability 0 in the distribution it was drawn from")
    return float(p[token] / q[token])


def normalized(weights: Floats) -> Floats:
    """Weights divided by their sum; all 0 if all weights are 0."""
    total = weights.sum()
    return weights / total if total > 0 else weights


def without(q: Floats, token: int) -> Floats:
    """q, (V,), without a token, normalized; all 0 if no other token is left."""
    q = q.copy()
    q[token] = 0.0
    return normalized(q)
