"""SpecInfer: recursive rejection sampling for children drawn independently from q.

Miao et al. 2023 (arXiv 2305.09781), algorithm 2.
"""

from collections.abc import Sequence

from spec_local.core.rng import Rng
from spec_local.verifiers.base import Floats, residual
from spec_local.verifiers.tree import normalized, ratio, tree_verifier


def specinfer_rule(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """See `spec_local.verifiers.tree.NodeRule`."""
    for token in drawn:
        if rng.accept(ratio(p, q, token)):
            return token
        p = normalized(residual(p, q))
    return rng.choose(p)


VERIFIER = tree_verifier("with replacement", specinfer_rule)
