"""Compare chains, trees and beams of equal size: tokens per step and tokens per second.

    python benchmarks/shapes.py --main MAIN.gguf --draft DRAFT.gguf --plot shapes.png

The main model answers every prompt by plain decoding. Then, at the same positions of these answers, each
variant proposes with each size and several random seeds; the main model evaluates the proposal, and the
verifier processes it. All variants are thus compared on the same contexts. A chain of n draft tokens has
depth n; a tree or beams of n nodes have at most that depth. Tokens per step show the gain if verification
cost nothing; tokens per second, computed from the time of drafting, evaluation and one verification, show the
gain on this machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import chat_text, interval, machine, model_options, note, numbers, table, tokens_of

from spec_local import GenerationSettings, SamplingSettings, Session, Text
from spec_local.bench.figures import Estimate
from spec_local.bench.prompts import load, select
from spec_local.core.calls import run
from spec_local.core.language_model import prefill
from spec_local.core.proposal import MAX_DRAFT, ROOT
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import UNCHANGED, Distribution, Sampler
from spec_local.proposers.base import Limit, Proposer
from spec_local.verifiers import VERIFIERS
from spec_local.verifiers.base import Verifier


@dataclass(frozen=True, slots=True)
class Variant:
    """A shape, its verifier and its size."""

    name: str
    nodes: int
    proposer: Proposer
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class Outcome:
    """One proposal: the mean number of tokens that the step generates, and its seconds."""

    tokens: float
    seconds: float


def main() -> None:
    arguments = model_options(__doc__, draft="required")
    arguments.add_argument("--nodes", type=numbers(int), default=[4, 8, 16])
    arguments.add_argument("--temperatures", type=numbers(float), default=[0.0, 0.8])
    arguments.add_argument("--top-p", type=float, default=1.0)
    arguments.add_argument(
        "--variants", nargs="+", default=["chain", "tree", "beam"], help="a shape, or shape:verifier"
    )
    arguments.add_argument("--per-category", type=int, default=3, help="number of prompts in each category")
    arguments.add_argument(
        "--seeds", type=int, default=4, help="proposals at each position above temperature 0"
    )
    arguments.add_argument("--positions", type=int, default=4, help="of each answer")
    arguments.add_argument("--every", type=int, default=10, help="number of tokens between two positions")
    arguments.add_argument("--plot", type=Path, help="draw the figure into this file (needs matplotlib)")
    options = arguments.parse_args()
    figure: dict[tuple[float, str], list[float]] = {}
    with Session.open(
        options.main, options.draft, n_ctx=options.ctx, threads=options.threads, branches=MAX_DRAFT
    ) as session:
        print(
            f"main {options.main.name}, draft {options.draft.name}, "
            f"{options.per_category} prompts per category, {options.positions} positions each; {machine()}\n"
        )
        for temperature in options.temperatures:
            print(f"## Temperature {temperature:g}\n")
            outcomes = measure(session, options, temperature)
            rows = []
            for nodes in options.nodes:
                first = outcomes[options.variants[0], nodes]
                for name in options.variants:
                    found = outcomes[name, nodes]
                    figure.setdefault((temperature, name), []).append(tokens_a_step(found))
                    cells = [str(nodes), name]
                    for rate in (tokens_a_step, tokens_a_second):
                        cells += [f"{rate(found):.2f}", interval(ratio(found, first, rate))]
                    rows.append(cells)
            base = f"against {options.variants[0]}"
            table(["nodes", "variant", "tokens per step", base, "tokens/s", base], rows)
    if options.plot:
        plot(options, figure)


def measure(session: Session, options: Any, temperature: float) -> dict[tuple[str, int], list[Outcome]]:
    sampling = replace(UNCHANGED, temperature=temperature, top_p=options.top_p)
    sampler = Sampler(sampling)
    variants = [
        make_variant(session, name, nodes, sampling) for nodes in options.nodes for name in options.variants
    ]
    outcomes: dict[tuple[str, int], list[Outcome]] = {(v.name, v.nodes): [] for v in variants}
    for seed, entry in enumerate(select(load(), per_category=options.per_category)):
        note(f"temperature {temperature:g}, {entry}")
        prompt = tokens_of(session.main.model, chat_text(session.main.model, entry.text))
        plain = GenerationSettings(
            sampling, seed=seed, max_tokens=options.positions * options.every, proposer="none"
        )
        answer = [
            token
            for event in session.generate(prompt, plain)
            if isinstance(event, Text)
            for token in event.tokens
        ]
        for at in range(options.every // 2, len(answer), options.every):
            for variant in variants:
                history = [*prompt, *answer[:at]]
                for i in range(1 if temperature == 0 else options.seeds):
                    outcome = propose(session, variant, sampler, history, 1000 * seed + i)
                    outcomes[variant.name, variant.nodes].append(outcome)
    note("")
    return outcomes


def make_variant(session: Session, name: str, nodes: int, sampling: SamplingSettings) -> Variant:
    shape, _, verifier = name.partition(":")
    settings = GenerationSettings(
        sampling=sampling,
        proposer="draft",
        policy="fixed",
        draft_max=nodes,
        shape=shape,  # type: ignore[arg-type]
        tree_nodes=nodes,
        beam_width=min(4, nodes),
        verifier=verifier or "auto",
    )
    slot = session._slots[0]
    proposer = session._factory.proposer(settings, Sampler(sampling), time.perf_counter, slot)
    assert proposer
    return Variant(name, nodes, proposer, VERIFIERS[settings.rule])


def propose(session: Session, variant: Variant, sampler: Sampler, history: list[int], seed: int) -> Outcome:
    main, proposer = session.main, variant.proposer
    run(prefill(main, history[:-1]))
    run(proposer.prefill(history))
    session.draft.truncate(len(history) - 1)  # type: ignore[union-attr]  # its last token is part of the step
    started = time.perf_counter()
    limit = Limit(variant.nodes, variant.nodes, main.max_branches)
    rng = SeededRng(seed)
    proposal = run(proposer.propose(history, limit, rng))
    logits = main.decode_tree([history[-1], *proposal.tokens], [ROOT, *(n + 1 for n in proposal.parents)])
    known: dict[int, Distribution] = {}

    def distribution(node: int) -> Distribution:
        if node not in known:
            known[node] = sampler.distribution(logits[node + 1])
        return known[node]

    path, token = variant.verifier(proposal, distribution, main.n_vocab, rng, len(history))
    seconds = time.perf_counter() - started
    main.commit(())
    # Some shapes learn from what was accepted.
    proposer.commit([*history, *(proposal.tokens[node] for node in path), token])
    return Outcome(len(path) + 1, seconds)


def tokens_a_step(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([o.tokens for o in outcomes]))


def tokens_a_second(outcomes: Sequence[Outcome]) -> float:
    """Rate from the median time per step, which a few disturbed steps do not affect."""
    return tokens_a_step(outcomes) / float(np.median([o.seconds for o in outcomes]))


def ratio(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], rate: Callable[[Sequence[Outcome]], float]
) -> Estimate:
    """Ratio of the rates, with its 95 % bootstrap interval over positions."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(1000):
        picks = rng.integers(0, len(ours), len(ours))
        ratios.append(rate([ours[i] for i in picks]) / rate([theirs[i] for i in picks]))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Estimate(rate(ours) / rate(theirs), float(low), float(high), len(ours))


def plot(options: Any, figure: dict[tuple[float, str], list[float]]) -> None:
    import matplotlib.pyplot as plt

    _, panels = plt.subplots(1, len(options.temperatures), figsize=(9, 3.5), sharey=True, squeeze=False)
    for panel, temperature in zip(panels[0], options.temperatures, strict=True):
        for name in options.variants:
            panel.plot(options.nodes, figure[temperature, name], marker="o", label=name)
        panel.set(title=f"temperature {temperature:g}", xlabel="nodes per step", xticks=options.nodes)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens per step")
    panels[0][-1].legend()
    plt.tight_layout()
    plt.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
