"""What a rule accepts of the children of one node, and the most that any rule can.

To measure the rules; no rule needs it. Sun et al. 2023 (arXiv 2310.15141) pose it as optimal transport; its dual, Hu et al. 2025 (arXiv 2502.18779), is a
minimum over sets H of tokens: α* = 1 + min_H [p(H) − Pr(all children in H)].
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import Drawing
from spec_local.verifiers.chain import Floats
from spec_local.verifiers.node import NodeRule, without


def acceptance(rule: NodeRule, p: Floats, q: Floats, drawn: Sequence[int]) -> float:
    """The chance that a rule accepts one of these children, over its own rng: exact, no coin is tossed."""
    rng = _AllFall(drawn)
    rule(p, q, drawn, rng)
    return 1.0 - rng.chance


class _AllFall:
    """Rng that let a rule reject whatever it can, and know how likely that was."""

    def __init__(self, children: Sequence[int]) -> None:
        self._children = sorted(set(children))
        self.chance = 1.0

    def accept(self, probability: float) -> bool:
        self.chance *= max(0.0, 1.0 - probability)
        return probability >= 1.0

    def choose(self, weights: Floats) -> int:
        self.chance *= max(0.0, 1.0 - float(weights[self._children].sum() / weights.sum()))
        return self._children[0]

    def choose_at(self, place: int, weights: Floats, tokens: NDArray[np.intp] | None = None) -> int:
        return self.choose(weights)


def acceptance_bound(p: Floats, q: Floats, k: int, drawing: Drawing) -> float:
    """α* for k children of a node, (V,) each.

    Exact to rounding, also for large V: where children are drawn from q with or without replacement, Pr is so
    convex that the best H holds the tokens of the least p/q, so that only V sets need to be tried. Without
    replacement and with k > 2, Pr is an integral, by quadrature to about 1e-12: some seconds for V = 150,000.

    Args:
        k: how many children are drawn; at most as many as q can give. "chosen" takes the k most probable of q.
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
    possible = q.nonzero()[0]  # others would only add to p(H)
    order = possible[np.argsort(p[possible] / q[possible])]
    p, q = p[order], q[order]
    all_in = q.cumsum() ** k if drawing == "with replacement" else _all_without_replacement(q, k)
    return float(min(1.0, 1.0 + (p.cumsum() - all_in).min()))


def _all_without_replacement(q: Floats, k: int) -> Floats:
    """The chance that k tokens, drawn without replacement, are all among the first 1, 2, … tokens; (V,)."""
    outside = np.append(
        q[:0:-1].cumsum()[::-1], 0.0
    )  # summed from its own end: next to 0 it keeps its digits
    if k == 1:
        return 1.0 - outside
    if k == 2:
        others = 1.0 - q
        others[q.argmax()] = np.delete(q, q.argmax()).sum()
        return np.clip(1.0 - outside * (1.0 + (q / others).cumsum()), 0.0, 1.0)
    # Every token gets a clock that rings after an exponential time of rate q: the first k to ring are k draws
    # without replacement. So k of the first m must ring before any of the others does, at time t. On a
    # logarithmic scale the integrand is smooth and falls off fast at both ends: there the plain sum converges quickest.
    inside = np.where(outside > 0, 0.0, 1.0)
    step = 0.25
    last = np.log(40 / max(1e-300, outside[outside > 0].min(initial=1.0)))
    for t in np.exp(np.arange(-12.0, last + step, step)):
        x = outside * t
        inside += step * x * np.exp(-x) * _chance_of(k, q * t)
    return np.clip(inside, 0.0, 1.0)


def _chance_of(k: int, hazards: Floats) -> Floats:
    """The chance that at least k of the first 1, 2, … clocks have rung, each with 1 − exp(−hazard); (V,)."""
    sure = hazards > 40.0  # counted apart, so that no power overflows
    n_sure: NDArray[np.int64] = sure.cumsum()
    hazards = np.where(sure, 0.0, hazards)
    odds = np.expm1(hazards)
    none = np.exp(-hazards.cumsum())
    sums = np.ones_like(odds)  # over all j of the first m clocks, the product of their odds
    fewer = np.zeros_like(odds)
    for j in range(k):
        fewer += np.where(n_sure + j < k, none * sums, 0.0)
        sums = (odds * np.append(0.0 if j else 1.0, sums[:-1])).cumsum()
    return np.maximum(1.0 - fewer, 0.0)
