"""SpecTr's k-sequential selection, for children drawn independently from q.

Sun et al. 2023 (arXiv 2310.15141), algorithm 3. The number of a node's children must not depend on their
draws.
"""

from collections.abc import Sequence

import numpy as np

from spec_local.core.rng import Rng
from spec_local.verifiers.base import Floats
from spec_local.verifiers.tree import ratio, tree_verifier


def spectr_rule(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """Accept each child with probability min(1, p/(ρq)). See `spec_local.verifiers.tree.NodeRule`."""
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


VERIFIER = tree_verifier("with replacement", spectr_rule)
