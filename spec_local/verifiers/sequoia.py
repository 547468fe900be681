"""Sequoia: recursive rejection sampling for children drawn from q without replacement.

Chen et al. 2024 (arXiv 2402.12374), algorithm 2.
"""

from collections.abc import Sequence

from spec_local.core.rng import Rng
from spec_local.verifiers.base import Floats, residual
from spec_local.verifiers.tree import normalized, ratio, tree_verifier, without


def sequoia_rule(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """See `spec_local.verifiers.tree.NodeRule`."""
    for token in drawn:
        if rng.accept(ratio(p, q, token)):
            return token
        p = normalized(residual(p, q))
        q = without(q, token)
    return rng.choose(p)


VERIFIER = tree_verifier("without replacement", sequoia_rule)
