"""Top and one: the k−1 most probable tokens of q, and one drawn from the rest of q, which is tested first.

If the drawn child is rejected, the token is drawn from the residual, and may be one of the other children.
This reaches the maximum acceptance rate for such children: Σ p of the top tokens + Σ min(p, rest of q) over
the other tokens.
"""

from collections.abc import Sequence

from spec_local.core.rng import Rng
from spec_local.verifiers.base import Floats, residual
from spec_local.verifiers.tree import normalized, ratio, tree_verifier


def top_one_rule(p: Floats, q: Floats, drawn: Sequence[int], rng: Rng) -> int:
    """See `spec_local.verifiers.tree.NodeRule`."""
    *top, token = drawn
    rest = q.copy()
    rest[top] = 0.0
    rest = normalized(rest)
    if rng.accept(ratio(p, rest, token)):
        return token
    return rng.choose(residual(p, rest))


VERIFIER = tree_verifier("top and one", top_one_rule)
