"""The block rule: the draft is judged as a whole, and the LAST position that passes counts.

Sun et al. 2024 (arXiv 2403.10444), algorithm 2. It accepts at least as many tokens as the token rule, in
expectation, for every p and q; with one drafted token, or a draft without probabilities, both are equal.
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


def verify_block(
    p: Floats, q: Floats, drafted: Ints, lengths: Ints, rng: Sequence[Rng], *, strict: bool = False
) -> Verdict:
    """See `spec_local.verifiers.chain.ChainRule`."""
    if strict:
        check(p, q, drafted, lengths, rng)
    p_drafted, q_drafted, _ = drafted_probabilities(p, q, drafted, lengths)
    ratio = p_drafted / q_drafted
    # weight[i]: P of the paper, the chance that the first i tokens may still stand
    weight = np.ones((len(p), p.shape[1]))
    accepted = np.zeros(drafted.shape, bool)
    n_accepted = np.zeros(len(p), np.int64)
    for row, length in enumerate(lengths):
        for i in range(length):
            w = weight[row, i + 1] = min(1.0, weight[row, i] * ratio[row, i])
            accepted[row, i] = rng[row].accept(_pass(p[row], q[row], w, i + 1, int(length)))
            if accepted[row, i]:
                n_accepted[row] = i + 1
    return verdict(
        p,
        drafted,
        lengths,
        rng,
        accepted,
        n_accepted,
        lambda row, n: residual(p[row, n], q[row, n], weight[row, n]),
    )


def _pass(p: Floats, q: Floats, weight: float, n: int, length: int) -> float:
    """The chance that the first n tokens pass, (h of the paper): p (k+1, V), q (k, V) of one row."""
    if n == length:
        return weight
    if weight <= 0:
        return 0.0  # S = 0
    excess = p[n] * weight
    excess -= q[n]
    total = float(np.maximum(excess, 0.0, out=excess).sum())
    denominator = total + (1.0 - weight)
    return total / denominator if denominator > 0 else 1.0
