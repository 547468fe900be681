"""The token rule: each drafted token stands with min(1, p/q), up to the first that falls.

Leviathan et al. 2022 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
A token is accepted with Σ min(p, q) = 1 − TV(p, q).
"""

from collections.abc import Sequence

import numpy as np

from spec_local.core.rng import Rng
from spec_local.verifiers.chain import (
    Floats,
    Ints,
    Verdict,
    check,
    drafted_probabilities,
    residual,
    verdict,
)


def verify_tokens(
    p: Floats, q: Floats, drafted: Ints, lengths: Ints, rng: Sequence[Rng], *, strict: bool = False
) -> Verdict:
    """See `spec_local.verifiers.chain.ChainRule`."""
    if strict:
        check(p, q, drafted, lengths, rng)
    p_drafted, q_drafted, real = drafted_probabilities(p, q, drafted, lengths)
    ratio = p_drafted / q_drafted
    accepted = np.zeros(drafted.shape, bool)
    for row, n in enumerate(lengths):
        # Every position is decided, also behind a rejection: `accepted` then tells the acceptance rate
        # by position, and a row asks its rng equally often whatever happens.
        accepted[row, :n] = [rng[row].accept(r) for r in ratio[row, :n]]
    n_accepted = (accepted | ~real).cumprod(axis=1, dtype=np.int64).sum(axis=1)
    n_accepted = np.minimum(n_accepted, lengths)
    return verdict(
        p, drafted, lengths, rng, accepted, n_accepted, lambda row, n: residual(p[row, n], q[row, n])
    )
