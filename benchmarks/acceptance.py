"""Compare the acceptance rates of the node rules with the highest that any rule could have.

    python benchmarks/acceptance.py

No model is needed: the main model's logits fall with the logarithm of a token's rank, roughly as a language
model's do, with some noise; the draft model's logits are the same with more noise. Each cell shows the mean
probability that one of k children is accepted / the mean of α* for children drawn in this way. Given the
draws, the probability is exact; nothing is timed. Traversal equals sequoia where only one node has
children. Gumbel-coupled children are counted, at as many positions as there are draws.
"""

from collections.abc import Mapping

import numpy as np
from common import note, numbers, parser, table
from numpy.typing import NDArray

from spec_local.core.proposal import Drawing
from spec_local.core.rng import Rng, SeededRng
from spec_local.core.sampling import Distribution
from spec_local.proposers.shapes import draw_children
from spec_local.verifiers.bound import acceptance, acceptance_bound
from spec_local.verifiers.sequoia import sequoia_rule
from spec_local.verifiers.specinfer import specinfer_rule
from spec_local.verifiers.spectr import spectr_rule
from spec_local.verifiers.top_one import top_one_rule
from spec_local.verifiers.tree import NodeRule

Floats = NDArray[np.float64]

RULES: Mapping[str, tuple[Drawing, NodeRule]] = {
    "exact-match": ("chosen", lambda p, q, drawn, rng: rng.choose(p)),
    "specinfer": ("with replacement", specinfer_rule),
    "spectr": ("with replacement", spectr_rule),
    "sequoia": ("without replacement", sequoia_rule),
    "top-one": ("top and one", top_one_rule),
}
COUPLED = "coupled"


def pair(seed: int, temperature: float, n_vocab: int, noise: float = 0.9) -> tuple[Floats, Floats]:
    """p and q, float64 (n_vocab,)."""
    main_noise, draft_noise = np.random.default_rng(seed).normal(size=(2, n_vocab))
    logits = 0.9 * main_noise - 3.0 * np.log(np.arange(1, n_vocab + 1))
    p, q = (np.exp((x - x.max()) / temperature) for x in (logits, logits + noise * draft_noise))
    return p / p.sum(), q / q.sum()


def children(q: Floats, k: int, drawing: Drawing, rng: Rng) -> list[int]:
    """k tokens in draw order."""
    whole = Distribution(None, q)
    if drawing == "chosen":
        return list(map(int, whole.top(k)[0]))
    return draw_children(whole, k, drawing, rng)


def coupled_rate(p: Floats, q: Floats, k: int, positions: int, seed: int) -> float:
    """Share of positions at which the draw from p is among the k coupled children."""
    main, draft, rng = Distribution(None, p), Distribution(None, q), SeededRng(seed)
    return float(np.mean([main.draw(rng, at) in draft.ranked(rng, at, k)[0] for at in range(positions)]))


def acceptance_rate(rule: str, p: Floats, q: Floats, k: int, draws: int, seed: int = 0) -> float:
    """Mean acceptance probability over several draws of the children; over one if they are not drawn."""
    drawing, node_rule = RULES[rule]
    rng = SeededRng(seed)
    n = 1 if drawing == "chosen" else draws
    return float(np.mean([acceptance(node_rule, p, q, children(q, k, drawing, rng)) for _ in range(n)]))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--vocabulary", type=int, default=32_000, help="number of tokens")
    arguments.add_argument(
        "--noise", type=float, default=0.9, help="standard deviation of the draft model's noise"
    )
    arguments.add_argument("--temperatures", type=numbers(float), default=[1.0, 0.3])
    arguments.add_argument("--k", type=numbers(int), default=[1, 2, 4], help="children")
    arguments.add_argument("--pairs", type=int, default=30, help="of p and q")
    arguments.add_argument("--draws", type=int, default=50, help="number of draws of the children per pair")
    options = arguments.parse_args()

    columns = [(temperature, k) for temperature in options.temperatures for k in options.k]
    figures: dict[tuple[str, float, int], list[float]] = {}
    for seed in range(options.pairs):
        note(f"pair {seed + 1}/{options.pairs}")
        for temperature, k in columns:
            p, q = pair(seed, temperature, options.vocabulary, options.noise)
            for rule in RULES:
                value = acceptance_rate(rule, p, q, k, options.draws, seed)
                figures.setdefault((rule, temperature, k), []).append(value)
            value = coupled_rate(p, q, k, options.draws, seed)
            figures.setdefault((COUPLED, temperature, k), []).append(value)
            for drawing in {drawing for drawing, _ in RULES.values()}:
                bound = acceptance_bound(p, q, k, drawing)
                figures.setdefault((drawing, temperature, k), []).append(bound)
    note("")
    table(
        ["Rule", "Children", *(f"T={temperature:g}, k={k}" for temperature, k in columns)],
        [
            [
                rule,
                drawing,
                *(f"{np.mean(figures[rule, *c]):.3f} / {np.mean(figures[drawing, *c]):.3f}" for c in columns),
            ]
            for rule, (drawing, _) in RULES.items()
        ]
        + [["exact-match", COUPLED, *(f"{np.mean(figures[COUPLED, *c]):.3f}" for c in columns)]],
    )


if __name__ == "__main__":
    main()
