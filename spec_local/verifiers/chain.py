"""Verification of chains: the common part of the token and the block rule.

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
