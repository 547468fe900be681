"""Rules for the children of one node of a tree, and the walk from the root that applies them.

Each draws one token with exactly main's distribution p, in such a way that it is likely to be a child: the walk
goes on there if it is, and ends with it if not. What lies further down plays no part, so that a tree may
be grown by looking at anything but the draws that are still to come (and for `k_sequential`, which must know
how many children there are, at none of the node's own).

Arrays: p and q, float64 (V,), main's and the draft's distribution at the node; `drawn`, int, the children in draw
order. A rule must not change them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution, align
from spec_local.verifiers.chain import Floats, residual

Mains = Callable[[int], Distribution]
"""Main's distribution after a node (`ROOT`: after the text); computed when asked for."""

NodeRule = Callable[[Floats, Floats, Sequence[int], Rng], int]
"""``rule(p, q, drawn, rng) -> token``"""


def walk_by_exact_match(proposal: Proposal, p: Mains, rng: Rng, place: int = 0) -> tuple[list[int], int]:
    """Main draws, and is followed as long as it draws children. Right for children of any origin.

    Main draws with the randomness of the places, so that what it says is the same whatever was guessed.

    Args:
        place: of the first token, counted from the start of the text.

    Returns:
        the accepted path, and the token after it.
    """
    return _walk(proposal, lambda node, children, depth: p(node).draw(rng, place + depth))


def walk(rule: NodeRule, proposal: Proposal, p: Mains, n_vocab: int, rng: Rng) -> tuple[list[int], int]:
    """As `walk_by_exact_match`, with a rule that knows how the children were drawn."""

    def draw(node: int, children: Sequence[int], depth: int) -> int:
        if not children:
            return p(node).draw(rng)
        rows, columns = align([p(node), proposal.distributions[node]], n_vocab)
        tokens = np.array([proposal.tokens[child] for child in children])
        drawn = tokens if columns is None else columns.searchsorted(tokens)
        token = rule(rows[0], rows[1], drawn.tolist(), rng)
        return token if columns is None else int(columns[token])

    return _walk(proposal, draw)


def _walk(proposal: Proposal, draw: Callable[[int, Sequence[int], int], int]) -> tuple[list[int], int]:
    by_parent = proposal.children()
    path: list[int] = []
    node = ROOT
    while True:
        children = by_parent.get(node, ())
        token = draw(node, children, len(path))
        child = next((child for child in children if proposal.tokens[child] == token), None)
        if child is None:
            return path, token
        path.append(child)
        node = child


def with_replacement(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """SpecInfer, Miao et al. 2023 (arXiv 2305.09781), algorithm 2: children drawn independently from q."""
    for token in drawn:
        if rng.accept(_ratio(p, q, token)):
            return token
        p = _normalised(residual(p, q))
    return rng.choose(p)


def without_replacement(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """Sequoia, Chen et al. 2024 (arXiv 2402.12374), algorithm 2: each child drawn from what q has left."""
    for token in drawn:
        if rng.accept(_ratio(p, q, token)):
            return token
        p = _normalised(residual(p, q))
        q = without(q, token)
    return rng.choose(p)


def k_sequential(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """SpecTr, Sun et al. 2023 (arXiv 2310.15141), algorithm 3: children drawn independently from q.

    Every child stands with min(1, p/(ρq)), where ρ is the one at which the rest is a distribution.
    """
    k = len(drawn)
    rho = _rho(p, q, k)
    overlap = np.minimum(p / rho, q)
    beta = float(overlap.sum())
    for token in drawn:
        if rng.accept(_ratio(p, q, token) / rho):
            return token
    # The chance that one of k stands, over the chance that one does: 1 + (1−β) + … + (1−β)^(k−1)
    tries = sum((1.0 - beta) ** i for i in range(k))
    rest = np.maximum(p - overlap * tries, 0.0)
    return rng.choose(rest if rest.any() else p)


def _rho(p: Floats, q: Floats, k: int) -> float:
    """The least ρ ∈ [1, k] with 1 − (1−β)^k ≤ ρβ, β = Σ min(p/ρ, q); rounded up, so that nothing is negative."""
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


def top_and_one(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """The k−1 most probable tokens of q, and one drawn from the rest of q, which is tried first.

    If it falls, main draws from what is left of p, and may draw one of the others. Accepts the most that its
    children allow: p of the top tokens + Σ min(p, rest of q) off them.
    """
    *top, token = drawn
    rest = q.copy()
    rest[top] = 0.0
    rest = _normalised(rest)
    if rng.accept(_ratio(p, rest, token)):
        return token
    return rng.choose(residual(p, rest))


def without(q: Floats, token: int) -> Floats:
    """What is left of q, (V,), when a token is not drawn again; zero if nothing is."""
    q = q.copy()
    q[token] = 0.0
    return _normalised(q)


def _normalised(weights: Floats) -> Floats:
    total = weights.sum()
    return weights / total if total > 0 else weights


def _ratio(p: Floats, q: Floats, token: int) -> float:
    if q[token] <= 0:
        raise ValueError("a drafted token has probability 0 in the draft's distribution")
    return float(p[token] / q[token])
