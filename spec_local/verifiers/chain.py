"""What every rule for chains takes and returns, and the checks they share.

Shapes: B rows (independent generations), k drafted tokens at most, V columns (tokens, or the tokens that any
of the distributions can give). A row may draft fewer than k: `lengths` says how many, and what lies
beyond is ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.core.rng import Rng

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which drafted tokens stand.

    tokens: int64 (B, k+1): the accepted tokens of a row, then the one drawn after them, then −1.
    accepted: bool (B, k): the rule's decision at each position, as if all before it stood.
    accepted_prefix: bool (B, k): the tokens that stand; a row's True come first.
    """

    tokens: NDArray[np.int64]
    accepted: Bools
    accepted_prefix: Bools

    @property
    def n_accepted(self) -> NDArray[np.int64]:
        """int64 (B,)"""
        return np.asarray(self.accepted_prefix.sum(axis=1), np.int64)

    def acceptance_rate(self, lengths: Ints) -> float:
        """Accepted of drafted tokens, over all rows."""
        return float(self.n_accepted.sum() / max(1, int(lengths.sum())))

    def system_efficiency(self) -> float:
        """Emitted tokens of those that full acceptance would have emitted (vLLM's measure)."""
        return float((self.n_accepted + 1).sum() / self.tokens.size)


ChainRule = Callable[..., Verdict]
"""``verify(p, q, drafted, lengths, rng, *, strict=False) -> Verdict``

p: float64 (B, k+1, V), main's distribution at each position and after the last.
q: float64 (B, k, V), the draft's, from which each token was drawn; one-hot for a guess without one.
drafted: int (B, k), columns. lengths: int (B,), drafted tokens of each row. rng: one per row.
strict: check shapes, types, bounds and sums first (ValueError).
"""


def check(p: Floats, q: Floats, drafted: Ints, lengths: Ints, rng: Sequence[Rng]) -> None:
    """Refuse arrays that no rule could be right on.

    Raises:
        ValueError: a shape, type, bound or sum is wrong; says which.
    """
    if p.ndim != 3 or p.dtype != np.float64 or q.dtype != np.float64:
        raise ValueError(f"p and q must be float64 of three axes, not {p.dtype} {p.shape} and {q.dtype}")
    rows, k, n = p.shape[0], p.shape[1] - 1, p.shape[2]
    if q.shape != (rows, k, n) or drafted.shape != (rows, k) or lengths.shape != (rows,) or len(rng) != rows:
        raise ValueError(
            f"p {p.shape} wants q {(rows, k, n)}, drafted {(rows, k)}, lengths {(rows,)} and {rows} rng; "
            f"got {q.shape}, {drafted.shape}, {lengths.shape} and {len(rng)}"
        )
    if not np.issubdtype(drafted.dtype, np.integer) or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError("drafted and lengths must be integers")
    if ((lengths < 0) | (lengths > k)).any():
        raise ValueError(f"lengths must be 0 to {k}")
    real = np.arange(k) < lengths[:, None]
    if (drafted[real] < 0).any() or (drafted[real] >= n).any():
        raise ValueError(f"a drafted token is outside of the {n} columns")
    used = np.concatenate([p[np.arange(k + 1) <= lengths[:, None]], q[real]])
    if (used < 0).any() or (abs(used.sum(axis=-1) - 1) > 1e-6).any():
        raise ValueError("a distribution has a negative entry or does not sum to 1")


def drafted_probabilities(p: Floats, q: Floats, drafted: Ints, lengths: Ints) -> tuple[Floats, Floats, Bools]:
    """p and q of the drafted tokens, (B, k) each (1 beyond a row's length), and the mask of real positions.

    Raises:
        ValueError: a drafted token has q = 0: it cannot have been drawn from q.
    """
    real = np.arange(drafted.shape[1]) < lengths[:, None]
    index = np.where(real, drafted, 0)[..., None]
    p_drafted = np.where(real, np.take_along_axis(p[:, :-1], index, -1)[..., 0], 1.0)
    q_drafted = np.where(real, np.take_along_axis(q, index, -1)[..., 0], 1.0)
    if (q_drafted <= 0).any():
        raise ValueError("a drafted token has probability 0 in the draft's distribution")
    return p_drafted, q_drafted, real


def residual(p: Floats, q: Floats, scale: float = 1.0) -> Floats:
    """max(scale·p − q, 0), (V,), unnormalised; p itself where nothing is left (p = q up to rounding)."""
    weights = p * scale
    weights -= q
    np.maximum(weights, 0.0, out=weights)
    return weights if weights.any() else p


def verdict(
    p: Floats,
    drafted: Ints,
    lengths: Ints,
    rng: Sequence[Rng],
    accepted: Bools,
    n_accepted: Ints,
    after: Callable[[int, int], Floats],
) -> Verdict:
    """Draw each row's last token and put the arrays together.

    after(row, n): weights of the token that follows n accepted ones, where n is not the whole draft;
    after the whole draft comes the bonus token, from p.
    """
    tokens = np.full((p.shape[0], p.shape[1]), -1, np.int64)
    for row, n in enumerate(n_accepted):
        tokens[row, :n] = drafted[row, :n]
        tokens[row, n] = rng[row].choose(p[row, n] if n == lengths[row] else after(row, int(n)))
    return Verdict(tokens, accepted, np.arange(drafted.shape[1]) < n_accepted[:, None])
