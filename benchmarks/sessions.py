"""Simulate whole sessions on the virtual clock of `simulate.py`, including the draft model's prefill.

    python benchmarks/sessions.py

A session consists of all recorded answers in random order, so that the policy uses for each answer what it
learned from earlier ones. Times vary by a few percent, and occasionally another process makes some calls 10
to 30 times slower. The first columns are speed-ups over plain decoding: the geometric mean over all answers,
after the prompt, as `specdec bench` measures it; the same with the draft model's prefill; and the minimum
over the answers, after the prompt. The other columns are for comparison, after the prompt and without noise:
the best fixed variant for all answers, and the best one for each answer, both chosen in hindsight; and the
fastest division into steps.
"""

from collections.abc import Sequence

import numpy as np
from common import geometric_mean, note, parser, table
from simulate import PAIRS, Machine, Pair, adaptive, costs, fixed_calls, least, one_by_one, seconds
from traces import Group, Trace, recorded

# fmt: off
_F16 = {1: 1, 2: 1.27, 3: 1.37, 4: 1.45, 5: 1.62, 6: 1.7, 7: 1.76, 8: 2.03, 9: 1.98, 12: 2.36, 16: 2.67,
        24: 3.63, 32: 4.71, 64: 7.88}
_BF16 = {1: 1, 2: 1.28, 3: 1.34, 4: 1.47, 5: 1.57, 6: 1.66, 7: 1.7, 8: 1.87, 9: 1.96, 12: 2.3, 16: 2.54,
         24: 3.42, 32: 3.96, 64: 6.54}
_SMALL = {1: 1, 2: 2.74, 3: 3.25, 4: 3.47, 5: 4.72, 8: 4.87, 9: 6.03, 16: 7.36, 24: 8.51, 32: 10.31,
          64: 18.88}
_LIGHT = {1: 1, 2: 1.62, 3: 2.28, 4: 1.53, 5: 2.21, 6: 2.86, 7: 3.53, 8: 2.72, 9: 3.38, 12: 3.9, 16: 4.04,
          24: 6.48, 32: 7.93, 64: 14.93}
# fmt: on
# The first machine while other processes use memory bandwidth; arithmetic is as fast as before.
BUSY = Pair("x86 F16, memory busy", costs(79.9, _F16), costs(17.6, _SMALL))
# The same machines with a copy of the draft model that is all Q4_0; it agrees 2 % less often than in the
# traces.
LIGHT = costs(8.9, _LIGHT)
LIGHTER = (
    Pair("x86 F16, Q4_0 draft model", PAIRS[0].main, LIGHT),
    Pair("x86 F16, both", BUSY.main, LIGHT),
    Pair("x86 BF16, Q4_0 draft model", costs(64.3, _BF16), LIGHT),
    Pair("x86 Q8_0, Q4_0 draft model", PAIRS[1].main, LIGHT),
    Pair("x86 Q4_K_M, Q4_0 draft model", PAIRS[2].main, LIGHT),
)


def session(pair: Pair, traces: Sequence[Trace], seed: int) -> list[tuple[float, float]]:
    """Speed-up over plain decoding for each answer, without and with the draft model's prefill."""
    machine = Machine(pair, Group("session", traces, noisy=True), seed)
    answers = one_by_one(machine, traces, adaptive(machine))
    return [(each.plain / each.drafted, each.plain / (each.drafted + each.draft_reading)) for each in answers]


def hindsight(pair: Pair, answers: Sequence[Group]) -> tuple[float, float, float]:
    """Speed-ups of the best fixed variant for all answers, the best for each, and the fastest division."""
    gains: dict[str, list[float]] = {}
    highest = []
    for group in answers:
        plain = group.n_tokens * float(pair.main[1])
        highest.append(plain / least(pair, group.traces[0]))
        for name, calls in fixed_calls(group).items():
            if pair.draft is not None or not name.startswith("draft"):
                gains.setdefault(name, []).append(plain / seconds(calls, pair, group))
    for_all = max(map(geometric_mean, gains.values()))
    for_each = geometric_mean([max(several) for several in zip(*gains.values(), strict=True)])
    return for_all, for_each, geometric_mean(highest)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--orders", type=int, default=4, help="number of random orders, a session each")
    options = arguments.parse_args()

    traces = [trace for several in recorded().values() for trace in several]
    answers = [Group("answer", [trace]) for trace in traces]
    rows = []
    for pair in (*PAIRS, BUSY, *LIGHTER):
        note(pair.name)
        ratios: list[tuple[float, float]] = []
        for seed in range(options.orders):
            order = np.random.default_rng(seed).permutation(len(traces))
            ratios += session(pair, [traces[i] for i in order], seed)
        after, whole = zip(*ratios, strict=True)
        figures = geometric_mean(after), geometric_mean(whole), min(after), *hindsight(pair, answers)
        rows.append([pair.name, *(f"{figure:.2f}" for figure in figures)])
    note("")
    head = ["machine", "after the prompt", "with the draft model's prefill", "minimum"]
    table([*head, "best fixed", "best fixed for each answer", "oracle"], rows)


if __name__ == "__main__":
    main()
