"""The acceptance rate of a rule at one node, and the upper bound for any rule, to compare rules.

Sun et al. 2023 (arXiv 2310.15141) pose it as optimal transport; its dual, Hu et al. 2025 (arXiv
2502.18779), is a minimum over sets H of tokens: α* = 1 + min_H [p(H) − Pr(all children in H)].
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import Drawing
from spec_local.verifiers.base import Floats
from spec_local.verifiers.tree import NodeRule, without


def acceptance(rule: NodeRule, p: Floats, q: Floats, drawn: Sequence[int]) -> float:
    """The exact probability, over the rule's own rng, that it accepts one of these children."""
    rng = _RejectingRng(drawn)
    rule(p, q, drawn, rng)
    return 1.0 - rng.probability


class _RejectingRng:
    """Rng that rejects wherever it can, and multiplies the probabilities of these rejections."""

    def __init__(self, children: Sequence[int]) -> None:
        self._children = sorted(set(children))
        self.probability = 1.0

    def accept(self, probability: float) -> bool:
        self.probability *= max(0.0, 1.0 - probability)
        return probability >= 1.0

    def choose(self, weights: Floats) -> int:
        self.probability *= max(0.0, 1.0 - float(weights[self._children].sum() / weights.sum()))
        return self._children[0]

    def choose_at(self, position: int, weights: Floats, tokens: NDArray[np.intp] | None = None) -> int:
        return self.choose(weights)

    def rank_at(
        self, position: int, weights: Floats, tokens: NDArray[np.intp] | None, k: int
    ) -> tuple[NDArray[np.intp], Floats]:
        return np.array([self.choose(weights)]), np.ones(1)


def acceptance_bound(p: Floats, q: Floats, k: int, drawing: Drawing) -> float:
    """α* for k children of a node, (V,) each.

    Exact to rounding, also for large V: where children are drawn from q with or without replacement, the
    convexity of Pr implies that the best H contains the tokens with the smallest p/q, so that only V sets
    need to be tried. Without replacement and with k > 2, Pr is an integral, computed by quadrature to about
    1e-12; this takes seconds for V = 150,000.

    Args:
        k: number of children, at most the number of nonzero entries of q.
        drawing: "chosen" means the k most probable tokens of q.
    """
    k = min(k, int(np.count_nonzero(q)))
    if drawing == "one":
        k = 1
    best = np.argsort(-q, kind="stable")
    if drawing == "chosen":
        return float(p[best[:k]].sum())
    if drawing == "top and one":
        top = best[: k - 1]
        rest = q
        for token in top:
            rest = without(rest, int(token))
        return float(p[top].sum() + np.minimum(p, rest).sum())  # the rest of q is 0 on the top
    possible = q.nonzero()[0]  # other tokens would only increase p(H)
    order = possible[np.argsort(p[possible] / q[possible])]
    p, q = p[order], q[order]
    all_in = q.cumsum() ** k if drawing == "with replacement" else _all_without_replacement(q, k)
    return float(min(1.0, 1.0 + (p.cumsum() - all_in).min()))


def _all_without_replacement(q: Floats, k: int) -> Floats:
    """Probability that k tokens drawn without replacement are all among the first 1, 2, …; (V,)."""
    outside = np.append(q[:0:-1].cumsum()[::-1], 0.0)  # summed from the end, for precision near 0
    if k == 1:
        return 1.0 - outside
    if k == 2:
        others = 1.0 - q
        others[q.argmax()] = np.delete(q, q.argmax()).sum()
        return np.clip(1.0 - outside * (1.0 + (q / others).cumsum()), 0.0, 1.0)
    # Give each token an exponential clock of rate q: the first k to ring are k draws without
    # replacement, so k of the first m must ring before all others. Integrate over the time t of the
    # first of the others. On a logarithmic scale, the integrand is smooth and falls off fast at both
    # ends, so that a plain sum converges quickly.
    inside = np.where(outside > 0, 0.0, 1.0)
    step = 0.25
    last = np.log(40 / max(1e-300, outside[outside > 0].min(initial=1.0)))
    for t in np.exp(np.arange(-12.0, last + step, step)):
        x = outside * t
        inside += step * x * np.exp(-x) * _at_least(k, q * t)
    return np.clip(inside, 0.0, 1.0)


def _at_least(k: int, hazards: Floats) -> Floats:
    """The probability that at least k of the first 1, 2, … clocks rang, each with 1 − exp(−hazard); (V,)."""
    certain = hazards > 40.0  # counted separately, so that no power overflows
    n_certain: NDArray[np.int64] = certain.cumsum()
    hazards = np.where(certain, 0.0, hazards)
    odds = np.expm1(hazards)
    none = np.exp(-hazards.cumsum())
    sums = np.ones_like(odds)  # over all subsets of j of the first m clocks, the product of their odds
    fewer = np.zeros_like(odds)
    for j in range(k):
        fewer += np.where(n_certain + j < k, none * sums, 0.0)
        sums = (odds * np.append(0.0 if j else 1.0, sums[:-1])).cumsum()
    return np.maximum(1.0 - fewer, 0.0)
