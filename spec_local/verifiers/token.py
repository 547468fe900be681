"""Token verification: accept each draft token with probability min(1, p/q), up to the first rejection.

Leviathan et al. 2022 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
A token is accepted with probability Σ min(p, q) = 1 − TV(p, q).
"""

from spec_local.core.rng import Rng
from spec_local.verifiers.base import Floats
from spec_local.verifiers.chain import chain_verifier


def token_rule(p: Floats, q: Floats, ratio: Floats, rng: Rng) -> tuple[int, float]:
    """See `spec_local.verifiers.chain.ChainRule`."""
    # Positions after a rejection are decided, too: the number of rng calls does not depend on the outcome.
    accepted = [rng.accept(r) for r in ratio]
    return [*accepted, False].index(False), 1.0


VERIFIER = chain_verifier(token_rule)
