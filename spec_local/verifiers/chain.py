"""Verification of chains: the common part of the token and the block rule.

Shapes: B rows (independent generations), up to k draft tokens, V columns (all tokens, or those that are
possible in any of the distributions). A row may have fewer than k draft tokens: `lengths` has their number,
and the entries beyond are ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import align
from spec_local.verifiers.base import Floats, MainDistribution, Verifier, residual

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]

ChainRule = Callable[[Floats, Floats, Floats, Rng], tuple[list[bool], int, float]]
"""``rule(p, q, ratio, rng) -> (accepted, n_accepted, scale)`` for one row of n draft tokens.

p: (n+1, V). q: (n, V). ratio: (n,), p/q of each draft token.
accepted: the decision at each position. n_accepted: length of the accepted prefix. scale: if the prefix
is not the whole draft, the next token is drawn from the residual max(scale·p − q, 0) at its end: the position
there must have been rejected by a random test of the rule. Stopping without one biases the output.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted draft tokens, and the token after them.

    tokens: int64 (B, k+1): the accepted tokens of a row, then the one drawn after them, then −1.
    accepted: bool (B, k): the decision at each position, regardless of earlier positions.
    accepted_prefix: bool (B, k): True for the accepted tokens, which come first in each row.
    """

    tokens: NDArray[np.int64]
    accepted: Bools
    accepted_prefix: Bools

    @property
    def n_accepted(self) -> NDArray[np.int64]:
        """int64 (B,)"""
        return np.asarray(self.accepted_prefix.sum(axis=1), np.int64)

    def acceptance_rate(self, lengths: Ints) -> float:
        """Accepted draft tokens / draft tokens, over all rows."""
        return float(self.n_accepted.sum() / max(1, int(lengths.sum())))

    def system_efficiency(self) -> float:
        """Generated tokens / those that full acceptance would have generated (vLLM's measure)."""
        return float((self.n_accepted + 1).sum() / self.tokens.size)


def chain_verifier(rule: ChainRule) -> Verifier:
    """A verifier for drawn chains that applies a rule."""
    return Verifier("one", partial(_verify_proposal, rule))


def _verify_proposal(
    rule: ChainRule, proposal: Proposal, p: MainDistribution, n_vocab: int, rng: Rng
) -> tuple[list[int], int]:
    k = len(proposal.tokens)
    q = proposal.distributions
    # The list is temporary: over a whole vocabulary, each distribution takes a megabyte.
    rows, columns = align([*map(p, range(ROOT, k)), *(q[i] for i in range(ROOT, k - 1))], n_vocab)
    drafted = np.asarray(proposal.tokens, np.int64)
    if columns is not None:
        drafted = columns.searchsorted(drafted)
    verdict = verify(rule, rows[None, : k + 1], rows[None, k + 1 :], drafted[None], np.array([k]), [rng])
    n = int(verdict.n_accepted[0])
    token = int(verdict.tokens[0, n])
    return list(range(n)), token if columns is None else int(columns[token])


def verify(
    rule: ChainRule,
    p: Floats,
    q: Floats,
    drafted: Ints,
    lengths: Ints,
    rng: Sequence[Rng],
    *,
    strict: bool = False,
) -> Verdict:
    """Apply a rule to each row, and draw the token after the accepted ones.

    Args:
        p: float64 (B, k+1, V), the main model's distribution at each position and after the last.
        q: float64 (B, k, V), the distribution that each draft token was drawn from; one-hot if
            there was none.
        drafted: int (B, k), the column of each draft token.
        lengths: int (B,), number of draft tokens of each row.
        rng: one per row.
        strict: check shapes, types, bounds and sums first.

    Raises:
        ValueError: a draft token has q = 0, so that it cannot have been drawn from q; or a strict check
            failed.
    """
    if strict:
        _check(p, q, drafted, lengths, rng)
    tokens = np.full(p.shape[:2], -1, np.int64)
    accepted = np.zeros(drafted.shape, bool)
    n_accepted = np.zeros(len(p), np.int64)
    for row, length in enumerate(lengths):
        at = np.arange(length), drafted[row, :length]
        if (q[row][at] <= 0).any():
            raise ValueError("a draft token has probability 0 in the distribution it was drawn from")
        ratio = p[row][at] / q[row][at]
        accepted[row, :length], n, scale = rule(p[row, : length + 1], q[row, :length], ratio, rng[row])
        n_accepted[row] = n
        tokens[row, :n] = drafted[row, :n]
        weights = p[row, n] if n == length else residual(p[row, n], q[row, n], scale)
        tokens[row, n] = rng[row].choose(weights)
    return Verdict(tokens, accepted, np.arange(drafted.shape[1]) < n_accepted[:, None])


def _check(p: Floats, q: Floats, drafted: Ints, lengths: Ints, rng: Sequence[Rng]) -> None:
    """Raise ValueError for arrays of a wrong shape or type, or with wrong bounds or sums."""
    if p.ndim != 3 or p.dtype != np.float64 or q.dtype != np.float64:
        raise ValueError(f"p and q must be float64 with 3 axes, not {p.dtype} {p.shape} and {q.dtype}")
    rows, k, n = p.shape[0], p.shape[1] - 1, p.shape[2]
    if q.shape != (rows, k, n) or drafted.shape != (rows, k) or lengths.shape != (rows,) or len(rng) != rows:
        raise ValueError(
            f"p {p.shape} needs q {(rows, k, n)}, drafted {(rows, k)}, lengths {(rows,)} and {rows} rng; "
            f"got {q.shape}, {drafted.shape}, {lengths.shape} and {len(rng)}"
        )
    if not np.issubdtype(drafted.dtype, np.integer) or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError("drafted and lengths must be integers")
    if ((lengths < 0) | (lengths > k)).any():
        raise ValueError(f"lengths must be 0 to {k}")
    real = np.arange(k) < lengths[:, None]
    if (drafted[real] < 0).any() or (drafted[real] >= n).any():
        raise ValueError(f"a draft token is outside the {n} columns")
    used = np.concatenate([p[np.arange(k + 1) <= lengths[:, None]], q[real]])
    if (used < 0).any() or (abs(used.sum(axis=-1) - 1) > 1e-6).any():
        raise ValueError("a distribution has a negative entry or does not sum to 1")
