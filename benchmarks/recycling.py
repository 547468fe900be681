"""Measure the calibration, acceptance and possible speed-up of token recycling.

    python benchmarks/recycling.py --main main.gguf

The main model answers built-in prompts at temperature 0, and each step verifies the whole tree that
recycling proposes. Smaller trees are its first nodes, which are the most probable ones. Speed-ups are
computed from cost tables.
"""

import time
from collections.abc import Sequence

import numpy as np
from common import chat_text, model_options, note, table, tokens_of

from spec_local.bench.prompts import load, select
from spec_local.core.calls import Logits
from spec_local.core.proposal import ROOT, Limit, Proposal, path_to
from spec_local.core.rng import Rng, SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.events import Step
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.lookups.base import Candidates
from spec_local.lookups.recycling import Recycling
from spec_local.testing import decode
from spec_local.verifiers import VERIFIERS

COSTS = {  # of calls of 1, 2, 4, 8, 16 and 32 tokens, relative to a call of one
    "flat (as on Metal)": (1.0, 1.03, 1.08, 1.15, 1.35, 2.2),
    "steep (two x86 cores, Q4_K_M)": (1.0, 1.72, 2.75, 4.9, 5.65, 9.0),
}
SIZES = (1, 2, 4, 8, 16, 31)
EDGES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.01)


class Recorder:
    """Proposes the candidates of recycling, and records them and the times."""

    needs_logits = True
    head = main_costs = None

    def __init__(self, nodes: int) -> None:
        self._lookup, self._nodes = Recycling(), nodes
        self.found = Candidates()
        self.finding: list[float] = []
        self.observing: list[float] = []

    async def prefill(self, history: Sequence[int]) -> None:
        pass

    async def propose(self, history: Sequence[int], limit: Limit, rng: Rng) -> Proposal:
        started = time.perf_counter()
        self.found = self._lookup.find(
            history, Limit(limit.depth, min(limit.nodes, self._nodes), limit.branches)
        )
        self.finding.append(time.perf_counter() - started)
        return Proposal(self.found.tokens, self.found.parents, source=self.found.source)

    def shorten(self, proposal: Proposal) -> None:
        pass

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        started = time.perf_counter()
        self._lookup.observe(tokens, logits)
        self.observing.append((time.perf_counter() - started) / len(tokens))

    def commit(self, history: Sequence[int]) -> None:
        pass


def n_accepted(step: Step, nodes: int) -> int:
    """Number of accepted tokens if the tree had had only its first nodes."""
    part = Proposal(step.proposal.tokens[:nodes], step.proposal.parents[:nodes])
    return len(part.follow(step.tokens[: step.n_accepted]))


def main() -> None:
    arguments = model_options(__doc__, draft="none", n=128)
    arguments.add_argument("--per-category", type=int, default=1, help="number of prompts in each category")
    arguments.add_argument("--nodes", type=int, default=31, help="maximum size of a tree")
    options = arguments.parse_args()

    model = Model(options.main)
    context = open_sequence(
        model,
        n_ctx=options.ctx,
        max_logits=options.nodes + 1,
        max_branches=options.nodes,
        threads=options.threads,
    )
    steps: list[Step] = []
    nodes: list[tuple[float, bool]] = []
    finding: list[float] = []
    observing: list[float] = []
    for entry in select(load(), per_category=options.per_category):
        note(str(entry))
        recorder = Recorder(options.nodes)
        for event in decode(
            context,
            tokens_of(model, chat_text(model, entry.text)),
            sampler=Sampler(SamplingSettings(temperature=0)),
            rng=SeededRng(0),
            proposer=recorder,
            verifier=VERIFIERS["exact-match"],
            draft_max=16,
            max_tokens=options.n,
            is_end=model.vocabulary.is_end,
        ):
            if isinstance(event, Step):
                steps.append(event)
                nodes += reached_nodes(event, recorder.found)
        finding += recorder.finding
        observing += recorder.observing
    note("")

    confidence, accepted = (np.array(column, float) for column in zip(*nodes, strict=True))
    bins = np.digitize(confidence, EDGES)
    table(
        ("confidence", "nodes", "mean confidence", "accepted"),
        [
            (
                f"{EDGES[b - 1]:.2f}–{min(1.0, EDGES[b]):.2f}",
                int((bins == b).sum()),
                float(confidence[bins == b].mean()),
                float(accepted[bins == b].mean()),
            )
            for b in np.unique(bins)
        ],
    )
    ranks = [0] * 8
    for step in steps:
        if step.n_accepted:
            first = [t for t, p in zip(step.proposal.tokens, step.proposal.parents, strict=True) if p == ROOT]
            ranks[first.index(step.tokens[0])] += 1
    table(("the next token has rank", *"12345678"), [("share of steps", *(n / len(steps) for n in ranks))])
    reached = [sum(step.n_accepted >= depth for step in steps) / len(steps) for depth in range(1, 7)]
    table(("accepted at least", *"123456"), [("share of steps", *reached)])
    rows: list[tuple[object, ...]] = []
    for n in (n for n in SIZES if n <= options.nodes):
        tokens = sum(n_accepted(step, n) + 1 for step in steps)
        speedups = [tokens / sum(cost(costs, step, n) for step in steps) for costs in COSTS.values()]
        rows.append((n, tokens / len(steps), *speedups))
    table(("maximum nodes", "tokens per step", *(f"times plain, {name}" for name in COSTS)), rows)
    for what, times in (("find", finding), ("observe, a row", observing)):
        print(f"{what}: median {1e6 * np.median(times):.0f} µs ({model.vocabulary.n_tokens} tokens)")


def reached_nodes(step: Step, found: Candidates) -> list[tuple[float, bool]]:
    """Confidence of each node whose parent was accepted, and whether it was accepted."""
    path = step.proposal.follow(step.tokens[: step.n_accepted])
    reached = {ROOT, *(node for node in path if len(path_to(found.parents, node)) < len(step.tokens))}
    return [
        (confidence, node in path)
        for node, (parent, confidence) in enumerate(zip(found.parents, found.confidence, strict=True))
        if parent in reached
    ]


def cost(costs: Sequence[float], step: Step, nodes: int) -> float:
    n = 1 + min(nodes, len(step.proposal.tokens))
    return float(np.interp(n, (1, 2, 4, 8, 16, 32), costs))


if __name__ == "__main__":
    main()
