"""Chains, trees and beams of equal size: accepted tokens a step, and tokens a second beside it.

    python benchmarks/shapes.py --main MAIN.gguf --draft DRAFT.gguf --plot shapes.png

Main answers every question by itself. Then, at the same places of these answers, every way proposes once with each
size; main reads the proposal, and its rule judges it with many rng. So all ways are compared on the same texts, and
most of the chance is averaged out. A chain of n guesses is as deep as it has nodes; a tree and beams of n
nodes may be as deep. Tokens a step say what a shape is worth where checking costs nothing; tokens a second,
from the time that proposing, reading and one judgement took, what it is worth here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import chat_text, interval, machine, note, numbers, parser, table, tokens_of
from questions import QUESTIONS

from spec_local import Done, GenerationSettings, SamplingSettings, Session, Text
from spec_local.core.language_model import prefill
from spec_local.core.proposal import ROOT
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Distribution, Sampler
from spec_local.machine import default_threads
from spec_local.proposers import Limit, Proposer
from spec_local.settings import MAX_DRAFT
from spec_local.verifiers import VERIFIERS, Verifier


@dataclass(frozen=True, slots=True)
class Way:
    """A shape, its verifier and its size, ready to be asked."""

    name: str
    nodes: int
    proposer: Proposer
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class Outcome:
    """One proposal: mean tokens said with it, and seconds."""

    tokens: float
    seconds: float


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--main", type=Path, required=True)
    arguments.add_argument("--draft", type=Path, required=True)
    arguments.add_argument("--nodes", type=numbers(int), default=[4, 8, 16])
    arguments.add_argument("--temperatures", type=numbers(float), default=[0.0, 0.8])
    arguments.add_argument("--top-p", type=float, default=1.0)
    arguments.add_argument(
        "--ways", nargs="+", default=["chain", "tree", "beam"], help="a shape, or shape:verifier"
    )
    arguments.add_argument("--per-category", type=int, default=4, help="questions of each of 6 categories")
    arguments.add_argument("--places", type=int, default=4, help="of each answer")
    arguments.add_argument("--every", type=int, default=10, help="tokens from one place to the next")
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("--plot", type=Path, help="draw the figure into this file (needs matplotlib)")
    options = arguments.parse_args()
    figure: dict[tuple[float, str], list[float]] = {}
    with Session.open(
        options.main, options.draft, n_ctx=1024, threads=options.threads, branches=MAX_DRAFT
    ) as session:
        n_questions = len(QUESTIONS) * options.per_category
        print(
            f"main {options.main.name}, draft {options.draft.name}, {n_questions} questions of "
            f"{len(QUESTIONS)} categories, {options.places} places in each answer; {machine()}\n"
        )
        for temperature in options.temperatures:
            print(f"## Temperature {temperature:g}\n")
            outcomes = measure(session, options, temperature)
            rows = []
            for nodes in options.nodes:
                first = outcomes[options.ways[0], nodes]
                for name in options.ways:
                    found = outcomes[name, nodes]
                    figure.setdefault((temperature, name), []).append(tokens_a_step(found))
                    rows.append(
                        [
                            str(nodes),
                            name,
                            f"{tokens_a_step(found):.2f}",
                            interval(against(found, first, tokens_a_step)),
                            f"{tokens_a_second(found):.2f}",
                            interval(against(found, first, tokens_a_second)),
                        ]
                    )
            table(["nodes", "way", "tokens a step", "against chain", "tokens/s", "against chain "], rows)
    if options.plot:
        draw(options, figure)


def measure(session: Session, options: Any, temperature: float) -> dict[tuple[str, int], list[Outcome]]:
    sampling = SamplingSettings(temperature=temperature, top_p=options.top_p)
    sampler = Sampler(sampling)
    ways = [way(session, name, nodes, sampling) for nodes in options.nodes for name in options.ways]
    outcomes: dict[tuple[str, int], list[Outcome]] = {(w.name, w.nodes): [] for w in ways}
    questions = [q for category in QUESTIONS.values() for q in category[: options.per_category]]
    for seed, question in enumerate(questions):
        note(f"temperature {temperature:g}, question {seed + 1}/{len(questions)}")
        prompt = tokens_of(session.main.model, chat_text(session.main.model, question))
        plain = GenerationSettings(
            sampling=sampling, seed=seed, max_tokens=options.places * options.every, proposer="none"
        )
        said: list[int] = []
        for event in session.generate(prompt, plain):
            if isinstance(event, Text):
                said += event.tokens
            assert not isinstance(event, Done) or event.statistics.predicted_n > 0
        for at in range(options.every // 2, len(said), options.every):
            history = [*prompt, *said[:at]]
            for w in ways:
                outcomes[w.name, w.nodes].append(propose(session, w, sampler, history, seed))
    note("")
    return outcomes


def way(session: Session, name: str, nodes: int, sampling: SamplingSettings) -> Way:
    shape, _, verifier = name.partition(":")
    settings = GenerationSettings(
        sampling=sampling,
        proposer="draft",
        policy="fixed",
        draft_max=nodes,
        shape=shape,  # type: ignore[arg-type]
        tree_nodes=nodes,
        beam_width=min(4, nodes),
        verifier=verifier or ("block" if shape == "chain" else "auto"),
    )
    proposer = session._proposer(settings, Sampler(sampling), time.perf_counter)
    assert proposer
    return Way(name, nodes, proposer, VERIFIERS[settings.rule])


def propose(session: Session, way: Way, sampler: Sampler, history: list[int], seed: int) -> Outcome:
    main = session.main
    for _ in [*prefill(main, history[:-1]), *way.proposer.prefill(history)]:
        pass
    session.draft.truncate(len(history) - 1)  # type: ignore[union-attr]  # the last token is read with the proposal
    started = time.perf_counter()
    limit = Limit(way.nodes, way.nodes, main.max_branches)
    proposal = way.proposer.propose(history, limit, SeededRng(seed), lambda part: None)
    logits = main.decode_tree([history[-1], *proposal.tokens], [ROOT, *(n + 1 for n in proposal.parents)])
    known: dict[int, Distribution] = {}

    def mains(node: int) -> Distribution:
        if node not in known:
            known[node] = sampler.distribution(logits[node + 1])
        return known[node]

    lengths = []
    seconds = 0.0
    for i in range(1 if sampler.settings.temperature == 0 else 16):
        path, token = way.verifier(proposal, mains, main.n_vocab, SeededRng(1000 * seed + i))
        lengths.append(len(path) + 1)
        if not i:
            seconds = time.perf_counter() - started
            said = [*(proposal.tokens[node] for node in path), token]
    main.commit(())
    way.proposer.commit([*history, *said])  # a shape may learn from what stood
    return Outcome(float(np.mean(lengths)), seconds)


def tokens_a_step(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([o.tokens for o in outcomes]))


def tokens_a_second(outcomes: Sequence[Outcome]) -> float:
    """By the median step: on a machine that others use too, single steps take ten times as long."""
    return tokens_a_step(outcomes) / float(np.median([o.seconds for o in outcomes]))


def against(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], rate: Any, draws: int = 1000
) -> tuple[float, float, float]:
    """Ratio of the rates, and its 95 % bootstrap interval: places are drawn, the same for both."""
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(draws):
        picks = generator.integers(0, len(ours), len(ours))
        ratios.append(rate([ours[i] for i in picks]) / rate([theirs[i] for i in picks]))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return rate(ours) / rate(theirs), float(low), float(high)


def draw(options: Any, figure: dict[tuple[float, str], list[float]]) -> None:
    import matplotlib.pyplot as plt

    _, panels = plt.subplots(1, len(options.temperatures), figsize=(9, 3.5), sharey=True, squeeze=False)
    for panel, temperature in zip(panels[0], options.temperatures, strict=True):
        for name in options.ways:
            panel.plot(options.nodes, figure[temperature, name], marker="o", label=name)
        panel.set(title=f"temperature {temperature:g}", xlabel="nodes a step", xticks=options.nodes)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens a step")
    panels[0][-1].legend()
    plt.tight_layout()
    plt.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main()
