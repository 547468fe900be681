"""Verification of chains: the token rule, and the block rule, which accepts more.

Shapes: k draft tokens, V columns (all tokens, or those that are possible in any of the distributions).
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import align
from spec_local.verifiers.base import Floats, MainDistribution, Verifier, residual

ChainRule = Callable[[Floats, Floats, Floats, Rng], tuple[int, float]]
"""``rule(p, q, ratio, rng) -> (n_accepted, scale)``

p: (k+1, V), the main model's distribution at each position and after the last. q: (k, V), that each draft
token was drawn from. ratio: (k,), p/q of each draft token.
n_accepted: length of the accepted prefix. scale: if the prefix is not the whole draft, the next token is
drawn from the residual max(scale·p − q, 0) at its end: the position there must have been rejected by a random
test of the rule. Stopping without one biases the output.
"""


def chain_verifier(rule: ChainRule) -> Verifier:
    """A verifier for drawn chains that applies a rule."""
    return Verifier("one", partial(_verify_proposal, rule))


def _verify_proposal(
    rule: ChainRule, proposal: Proposal, main: MainDistribution, n_vocab: int, rng: Rng
) -> tuple[list[int], int]:
    k = len(proposal.tokens)
    # The list is temporary: over a whole vocabulary, each distribution takes a megabyte.
    dense, columns = align(
        [*map(main, range(ROOT, k)), *(proposal.distributions[i] for i in range(ROOT, k - 1))], n_vocab
    )
    p, q = dense[: k + 1], dense[k + 1 :]
    drafted = np.asarray(proposal.tokens, np.intp)
    if columns is not None:
        drafted = columns.searchsorted(drafted)
    at = np.arange(k), drafted
    if (q[at] <= 0).any():
        raise ValueError("a draft token has probability 0 in the distribution it was drawn from")
    n, scale = rule(p, q, p[at] / q[at], rng)
    token = rng.choose(p[n] if n == k else residual(p[n], q[n], scale))
    return list(range(n)), token if columns is None else int(columns[token])


def token_rule(p: Floats, q: Floats, ratio: Floats, rng: Rng) -> tuple[int, float]:
    """Accept each draft token with probability min(1, p/q), up to the first rejection; a `ChainRule`.

    Leviathan et al. 2022 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
    A token is accepted with probability Σ min(p, q) = 1 − TV(p, q).
    """
    # Positions after a rejection are decided, too: the number of rng calls does not depend on the outcome.
    accepted = [rng.accept(r) for r in ratio]
    return [*accepted, False].index(False), 1.0


def block_rule(p: Floats, q: Floats, ratio: Floats, rng: Rng) -> tuple[int, float]:
    """Test every prefix of the draft, and accept the longest one that passes; a `ChainRule`.

    Sun et al. 2024 (arXiv 2403.10444), algorithm 2. In expectation, it accepts at least as many tokens as
    token verification, for every p and q. For one draft token, or a draft without probabilities, the two are
    equal.
    """
    # weight[n]: p_n of the paper, the running product of the ratios, capped at 1 at each token.
    weight = [1.0]
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


TOKEN, BLOCK = chain_verifier(token_rule), chain_verifier(block_rule)
