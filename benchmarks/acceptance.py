"""What each rule accepts of the children of one node, against the most that any rule could.

    python benchmarks/acceptance.py

No model is needed: main's logits fall with the logarithm of a token's rank, roughly as a language model's do, with some
noise, and the draft's are main's with more of it. A cell is the mean of the chance that one of k children is
accepted, / the mean of α* for children that are drawn so. Given the draws that chance is exact, and nothing is
timed. Traversal is sequoia where only one node has children.
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


def pair(seed: int, temperature: float, n_vocab: int, noise: float = 0.9) -> tuple[Floats, Floats]:
    """p and q, float64 (n_vocab,)."""
    mains, drafts = np.random.default_rng(seed).normal(size=(2, n_vocab))
    logits = 0.9 * mains - 3.0 * np.log(np.arange(1, n_vocab + 1))
    p, q = (np.exp((x - x.max()) / temperature) for x in (logits, logits + noise * drafts))
    return p / p.sum(), q / q.sum()


def children(q: Floats, k: int, drawing: Drawing, rng: Rng) -> list[int]:
    """k tokens in draw order."""
    whole = Distribution(None, q)
    if drawing == "chosen":
        return whole.top(k)[0].tolist()
    return draw_children(whole, k, drawing, rng)


def accepted(rule: str, p: Floats, q: Floats, k: int, draws: int, seed: int = 0) -> float:
    """The mean over several draws of the children; one suffices where nothing is drawn."""
    drawing, judge = RULES[rule]
    rng = SeededRng(seed)
    return float(
        np.mean(
            [
                acceptance(judge, p, q, children(q, k, drawing, rng))
                for _ in range(1 if drawing == "chosen" else draws)
            ]
        )
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--vocabulary", type=int, default=32_000, help="tokens")
    arguments.add_argument(
        "--noise", type=float, default=0.9, help="of the draft's logits, standard deviation"
    )
    arguments.add_argument("--temperatures", type=numbers(float), default=[1.0, 0.3])
    arguments.add_argument("--k", type=numbers(int), default=[1, 2, 4], help="children")
    arguments.add_argument("--pairs", type=int, default=30, help="of p and q")
    arguments.add_argument("--draws", type=int, default=50, help="of the children of each pair")
    options = arguments.parse_args()

    columns = [(temperature, k) for temperature in options.temperatures for k in options.k]
    figures: dict[tuple[str, float, int], list[float]] = {}
    for seed in range(options.pairs):
        note(f"pair {seed + 1}/{options.pairs}")
        for temperature, k in columns:
            p, q = pair(seed, temperature, options.vocabulary, options.noise)
            for rule in RULES:
                value = accepted(rule, p, q, k, options.draws, seed)
                figures.setdefault((rule, temperature, k), []).append(value)
            for drawing in {drawing for drawing, _ in RULES.values()}:
                bound = acceptance_bound(p, q, k, drawing)
                figures.setdefault((drawing, temperature, k), []).append(bound)
    note("")
    table(
        ["Rule", "Children", *(f"T={temperature:g}, k={k}" for temperature, k in columns)],
        [
            [rule, drawing, *(f"{np.mean(figures[rule, *c]):.3f} / {np.mean(figures[drawing, *c]):.3f}" for c in columns)]
            for rule, (drawing, _) in RULES.items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
