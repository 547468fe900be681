"""Verification of trees node by node, with a rule for the children of one node: SpecTr's.

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


def without(q: Floats, token: int) -> Floats:
    """q, (V,), without a token, normalized; all 0 if no other token is left."""
    q = q.copy()
    q[token] = 0.0
    total = q.sum()
    return q / total if total > 0 else q


def spectr_rule(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """SpecTr's k-sequential selection, for children drawn independently from q; a `NodeRule`.

    Each child is accepted with probability min(1, p/(ρq)). Sun et al. 2023 (arXiv 2310.15141), algorithm 3.
    The number of a node's children must not depend on their draws.
    """
    k = len(drawn)
    rho = _rho(p, q, k)
    overlap = np.minimum(p / rho, q)
    beta = float(overlap.sum())
    for token in drawn:
        if rng.accept(ratio(p, q, token) / rho):
            return token
    # Probability that one of k is accepted, over the probability β of one: 1 + (1−β) + … + (1−β)^(k−1)
    tries = sum((1.0 - beta) ** i for i in range(k))
    rest = np.maximum(p - overlap * tries, 0.0)
    return rng.choose(rest if rest.any() else p)


def _rho(p: Floats, q: Floats, k: int) -> float:
    """The smallest ρ ∈ [1, k] with 1 − (1−β)^k ≤ ρβ, where β = Σ min(p/ρ, q); rounded up."""
    low, high = 1.0, float(k)
    for _ in range(60):
        middle = (low + high) / 2
        beta = float(np.minimum(p / middle, q).sum())
        if 1.0 - (1.0 - beta) ** k > middle * beta:
            low = middle
        else:
            high = middle
        if high - low <= 1e-15 * high:
            break
    return high


SPECTR = tree_verifier("with replacement", spectr_rule)
