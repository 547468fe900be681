"""Block verification: test every prefix of the draft, and accept the longest one that passes.

Sun et al. 2024 (arXiv 2403.10444), algorithm 2. In expectation, it accepts at least as many tokens as token
verification, for every p and q. For one draft token, or a draft without probabilities, the two are equal.
"""

import numpy as np

from spec_local.core.rng import Rng
from spec_local.verifiers.base import Floats
from spec_local.verifiers.chain import chain_verifier


def block_rule(p: Floats, q: Floats, ratio: Floats, rng: Rng) -> tuple[int, float]:
    """See `spec_local.verifiers.chain.ChainRule`."""
    weight = [
        1.0
    ]  # weight[n]: p_n of the paper, the running product of the ratios, capped at 1 at each token
    n_accepted = 0
    for n, r in enumerate(ratio, 1):
        weight.append(min(1.0, weight[-1] * r))
        passes = weight[n] if n == len(ratio) else _pass_probability(p[n], q[n], weight[n])
        if rng.accept(passes):
            n_accepted = n
    return n_accepted, weight[n_accepted]


def _pass_probability(p: Floats, q: Floats, weight: float) -> float:
    """h of the paper, for a prefix of this weight; p and q, (V,), of the token after it."""
    if weight <= 0:
        return 0.0
    excess = p * weight
    excess -= q
    total = float(np.maximum(excess, 0.0, out=excess).sum())
    denominator = total + (1.0 - weight)
    return total / denominator if denominator > 0 else 1.0


VERIFIER = chain_verifier(block_rule)
