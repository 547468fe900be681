"""Simulate sessions in the modes in which drafting has been seen to lose, on a virtual clock.

    python benchmarks/sessions.py
    python benchmarks/sessions.py --quick
    python benchmarks/sessions.py --machine "Zen 3" --mode clients

A row of the table is a mode on a machine: see `simulate.py` for the clock. Its figures are speeds relative to
plain decoding of the same requests in the same order: 0.97 means that an answer took 1 / 0.97 of the time.
`mean` is the geometric mean over the answers, `kind` that of the worst kind of prompt, `answer` the worst
answer, `tenth` the worst decile, `< .97` the share of answers below that. The first group counts the time of
the prompt, which both models read; the second one begins after it. Neither counts the time in which the main
model reads the prompts of other clients: it is the same in all, but not for each. `own` charges the draft
tokens and draft calls of an answer to that answer, however many clients wait for them: it shows which answers
should not have drafted. `tokens/s` are those of all clients, and of all that happens.

A pair of models is *known* when an earlier session has taught the policy. It is *new* when nothing has: the
costs were measured before the first answer, as in `chat` and `serve`, or are estimated from one call, as in
`generate`, whose time is counted. New sessions have eight answers, one of each kind. With several clients,
each begins its next answer when its last one has ended, and all share calls. Times vary by a few percent, and
other processes make some calls 10 to 30 times slower; in slow phases, all calls take half as long again for
seconds. The policy sees these times, but the figures are computed without them.
"""

import copy
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
from common import geometric_mean, note, parser, table
from processors import DRAFT, call_times, processors
from simulate import (
    PAIRS,
    Machine,
    Moment,
    Pair,
    Replay,
    ReplayContext,
    Role,
    Served,
    costs,
    draft_model,
    serve,
)
from traces import Group, Trace, recorded

from spec_local.calibration.estimates import CPU_ESTIMATES
from spec_local.calibration.known_costs import FIRST_DRAFT, FIRST_MAIN
from spec_local.calibration.measure import measure
from spec_local.kernels.choice import most_tokens
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import PolicyOptions
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Experience, PastAnswers
from spec_local.policies.loss_budget import LossBudget
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.base import Proposer
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import DraftModel

# Machines -------------------------------------------------------------------------------------------------

_MS = 30.0  # of a plain step, where only multiples are known: of a 1.5B in Q4_K_M on two cores
_SHARE = 0.33  # of a plain step that a draft token takes, where it is not known
# fmt: off
_OFF = {1: 1, 2: 1.7, 3: 2.2, 4: 2.75, 8: 4.9, 16: 5.65}  # Q4_K_M without specdec's kernels
_Q6_K_LEFT = {1: 1, 2: 1.49, 4: 2.18, 8: 5.29, 16: 6.58}  # Zen 4, when Q6_K was left to llama.cpp
# fmt: on


def machine(name: str, main: Mapping[int, float], draft: Mapping[int, float] | None = None) -> Pair:
    """A machine of known multiples: of a plain step, and of a draft token's (None: as those of main)."""
    multiples = {n: time / main[1] for n, time in main.items()}
    return Pair(
        name, costs(_MS, multiples), costs(_MS * _SHARE, multiples) if draft is None else costs(_MS, draft)
    )


@cache
def museum() -> dict[str, Pair]:
    """The processors of processors.toml: with the kernels that are chosen there, and without any."""
    found = {}
    for processor in processors():
        chosen = {kind: most_tokens(kind, times) for kind, times in processor.times.items()}
        name = f"{processor.name}, on"
        found[name] = machine(name, call_times(processor, chosen))
        if any(most != 0 for most in chosen.values()):
            name = f"{processor.name}, off"
            found[name] = machine(name, call_times(processor, dict.fromkeys(chosen, 0)))
    return found


def machines(every: bool = False) -> list[Pair]:
    """The usual machines, or all that are known."""
    there = museum()
    usual = {
        "Zen 4": "Zen 4, AVX-512 VNNI: Q4_K + Q6_K, on",
        "Zen 3": "Zen 3, AVX2: Q4_K, on",
        "Zen 3 off": "Zen 3, AVX2: Q4_K, off",
        "Zen 4 AVX2": "Zen 4, AVX2 against llama.cpp's AVX-512: Q4_K, on",
        "Zen 5 Q8_0": "Zen 5, AVX-512 VNNI: Q8_0, on",
    }
    found = [machine("kernels off", _OFF), machine("Zen 4, Q6_K left", _Q6_K_LEFT)]
    found += [replace(there[key], name=name) for name, key in usual.items()]
    found[2] = replace(found[2], draft=costs(_MS, DRAFT))
    found.append(PAIRS[0])
    return [*found, *PAIRS[1:], *there.values()] if every else found


_QUICK = ("kernels off", "Zen 4", "Zen 3")

# Modes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """The conditions of a session.

    pair: see the top. lengths: tokens of the answers in turn; empty: as recorded.
    """

    name: str
    pair: Literal["known", "measured", "estimated"] = "known"
    n_clients: int = 1
    lengths: Sequence[int] = ()
    slow_phases: bool = False


_UNEQUAL = (24, 128, 64)
MODES = (
    Mode("known"),
    Mode("known, slow phases", slow_phases=True),
    Mode("new, measured", "measured"),
    Mode("new, estimated", "estimated"),
    Mode("2 clients", n_clients=2, lengths=_UNEQUAL),
    Mode("4 clients", n_clients=4, lengths=_UNEQUAL),
    Mode("4 clients, 64 tokens each", n_clients=4, lengths=(64,)),
    Mode("4 clients, new", "measured", n_clients=4, lengths=_UNEQUAL),
    Mode("8 clients", n_clients=8, lengths=_UNEQUAL),
)
_QUICK_MODES = ("known", "new, estimated", "4 clients")


@dataclass
class Learned:
    """What a session leaves to later ones."""

    main: CostModel
    draft: CostModel | None
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    answers: PastAnswers = field(default_factory=PastAnswers)


def first_use(machine: Machine, *, measured: bool) -> Learned:
    """What is known of a new pair: the costs, from the calls that `KnownCosts` makes."""
    nothing = Trace([0], [0], [True], [0.5])

    def timed(role: Role, budget: float) -> CostModel:
        row, rows = Replay(ReplayContext(role, machine), nothing), None if role == "main" else 1
        if measured:
            return measure(row, n_logits=rows, budget=budget, clock=machine.clock)
        one = measure(row, FIRST_MAIN if role == "main" else FIRST_DRAFT, 1, rows, clock=machine.clock)
        return CostModel(one.costs, CPU_ESTIMATES)

    return Learned(timed("main", 1.5), None if machine.pair.draft is None else timed("draft", 0.5))


def session(
    pair: Pair, mode: Mode, traces: Sequence[Trace], seed: int, learned: Learned | None = None
) -> tuple[list[Served], Learned]:
    """Generate these answers under the adaptive policy; learned: by earlier sessions."""
    group = Group("session", traces, noisy=True, slow_phases=mode.slow_phases)
    here = Machine(pair, group, seed)
    if not learned and mode.pair != "estimated":
        learned = first_use(here, measured=True)
    shared: list[tuple[SharedCosts, CostModel | None]] = []
    budget = LossBudget()
    slots: list[list[Experience]] = [[] for _ in range(mode.n_clients)]

    def of(experience: list[Experience]) -> Callable[[Replay], Proposer]:
        def variant(model: Replay) -> Proposer:
            nonlocal learned
            if not learned:  # in the first answer
                learned = first_use(here, measured=False)
            if not shared:
                shared.append((SharedCosts(learned.main), learned.draft))
            if not experience:
                known = Experience(learned.acceptance, learned.answers, budget.of_another_answer())
                experience.append(known)
            n_tokens = len(model.trace.answer) if mode.lengths else _N_TOKENS
            policy = Adaptive(
                PolicyOptions(
                    costs=lambda: shared[0],
                    experience=experience[0],
                    max_tokens=n_tokens,
                    clock=here.clock,
                )
            )
            return CombinedProposer(
                policy, draft_model(model, DraftModel) if shared[0][1] else None, [SuffixLookup()]
            )

        return variant

    planner = SharedCalls(lambda: shared[0][0] if shared else None)
    answers = list(serve(here, traces, [of(each) for each in slots], planner=planner))
    for experience in itertools.chain(*slots):
        experience.end()
    assert learned
    return answers, learned


_N_TOKENS = 128  # of the recorded answers, at most


class _Counted(Machine):
    """It counts its calls instead of seconds, and records their tokens and those of prompts among them."""

    def __init__(self, group: Group) -> None:
        super().__init__(Pair("", np.ones(4097), None), group)
        self.sizes: list[tuple[int, int]] = []

    def call(self, role: Role, n: int, position: int, n_read: int = 0) -> None:
        self.sizes.append((n, n_read))
        super().call(role, n, position, n_read)


@cache
def _plain_calls(traces: tuple[Trace, ...], n_clients: int) -> tuple[list[tuple[int, int]], list[Served]]:
    """All calls of plain decoding, and the answers, with numbers of calls in place of seconds.

    Neither depends on costs, so one run serves all machines.
    """
    counted = _Counted(Group("plain", traces))
    answers = list(serve(counted, traces, [lambda row: None] * n_clients))
    return counted.sizes, answers


def plain(pair: Pair, traces: Sequence[Trace], n_clients: int) -> list[Served]:
    """The same answers by plain decoding."""
    calls, answers = _plain_calls(tuple(traces), n_clients)
    n, n_read = np.transpose(calls)
    seconds, rest = (
        np.concatenate(([0.0], each.cumsum()))
        for each in (pair.main[n], np.where(n > n_read, pair.main[n - n_read], 0.0))
    )

    def moment(counted: Moment) -> Moment:
        i = round(counted.seconds)
        return Moment(float(seconds[i]), float(rest[i]))

    return [Served(each.trace, moment(each.began), moment(each.read), moment(each.ended)) for each in answers]


@dataclass(frozen=True)
class Gain:
    """Speed of an answer relative to plain decoding; see the top for each."""

    kind: str
    whole: float
    after: float
    own: float


@dataclass(frozen=True)
class Cell:
    """A mode on a machine; speed: of all tokens."""

    mode: str
    machine: str
    gains: Sequence[Gain]
    speed: float

    def of_kind(self, kind: str, which: str = "whole") -> float:
        return geometric_mean([getattr(gain, which) for gain in self.gains if gain.kind == kind])


def simulate(pair: Pair, mode: Mode, kinds: Mapping[Trace, str], earlier: Learned | None) -> Cell:
    """Simulate one mode on one machine.

    Args:
        kinds: the answers, with the kind of each.
        earlier: what an earlier session has taught; None: a new pair.
    """
    traces = list(kinds)
    n = _NEW if not earlier and mode.n_clients == 1 else len(traces)
    gains: list[Gain] = []
    took = plain_took = 0.0
    for seed, first in enumerate(range(0, len(traces), n), 1):
        several = traces[first : first + n]
        answers, _ = session(pair, mode, several, seed, copy.deepcopy(earlier))
        plainly = {each.trace: each for each in plain(pair, several, mode.n_clients)}
        for each in answers:
            other, reading = plainly[each.trace], _reading(pair, len(each.trace.prompt) - 1)
            whole = (reading + other.ended.rest - other.began.rest) / (
                reading + each.ended.rest - each.began.rest
            )
            after = (other.ended.rest - other.read.rest) / (each.ended.rest - each.read.rest)
            gains.append(Gain(kinds[each.trace], whole, after, each.own.plain / each.own.seconds))
        took += _span(answers)
        plain_took += _span(plainly.values())
    return Cell(mode.name, pair.name, gains, plain_took / took)


def simulate_all(modes: Sequence[Mode], path: Path, n: int, pair: Pair) -> list[Cell]:
    """Simulate modes on one machine; path, n: see `answers`."""
    earlier: dict[tuple[int, Sequence[int]], Learned] = {}
    found = []
    for mode in modes:
        note(f"{pair.name}: {mode.name}")
        kinds, conditions = answers(path, n, mode.lengths), (mode.n_clients, mode.lengths)
        if mode.pair == "known" and conditions not in earlier:
            order = np.random.default_rng(0).permutation(len(kinds))
            _, earlier[conditions] = session(pair, mode, [list(kinds)[i] for i in order], 0)
        found.append(simulate(pair, mode, kinds, earlier[conditions] if mode.pair == "known" else None))
    return found


def _reading(pair: Pair, n: int) -> float:
    """Seconds in which the main model reads n tokens of a prompt alone."""
    most = ReplayContext.max_tokens
    return sum(float(pair.main[min(most, n - first)]) for first in range(0, n, most))


def _span(answers: Collection[Served]) -> float:
    return max(each.ended.seconds for each in answers) - min(each.began.seconds for each in answers)


_NEW = 8  # answers of a session of a new pair


@cache
def answers(path: Path, n: int, lengths: Sequence[int] = ()) -> dict[Trace, str]:
    """The first n recorded answers of each kind, all kinds in turn, and the kind of each.

    The first token of each is unique, so that no two prompts have a prefix in common: tokens are numbered in
    each trace on its own.

    Args:
        lengths: of the answers, in turn; empty: as recorded.
    """
    kinds = recorded(path)
    turns = itertools.cycle(lengths or (_N_TOKENS,))
    found: dict[Trace, str] = {}
    for several in itertools.islice(zip(*kinds.values(), strict=True), n):
        for kind, trace in zip(kinds, several, strict=True):
            found[trace.from_token(-1 - len(found)).first(next(turns))] = kind
    return found


# Tables ---------------------------------------------------------------------------------------------------


def figures(cell: Cell) -> list[str]:
    """A row of the table."""
    found = []
    for which in ("whole", "after", "own"):
        values = [getattr(gain, which) for gain in cell.gains]
        by_kind = {gain.kind: cell.of_kind(gain.kind, which) for gain in cell.gains}
        worst = min(by_kind, key=by_kind.__getitem__)
        found += [f"{geometric_mean(values):.3f}", f"{by_kind[worst]:.3f} {worst}"]
        if which != "own":
            below = f"{100 * float(np.mean(np.array(values) < 0.97)):.0f} %"
            found += [f"{min(values):.3f}", f"{np.quantile(values, 0.1):.3f}", below]
    return [*found, f"{cell.speed:.3f}"]


_FIGURES = ("mean", "kind", "answer", "tenth", "< .97")
HEAD = (
    *("mode", "machine", *_FIGURES),
    *(f"after: {name}" for name in _FIGURES),
    *(f"own: {name}" for name in _FIGURES[:2]),
    "tokens/s",
)


def summary(cells: Sequence[Cell]) -> Iterator[str]:
    """One line for each mode."""
    for mode in dict.fromkeys(cell.mode for cell in cells):
        some = [cell for cell in cells if cell.mode == mode]
        means = {cell.machine: geometric_mean([gain.whole for gain in cell.gains]) for cell in some}
        lowest = min(means, key=means.__getitem__)
        every = [(cell, gain) for cell in some for gain in cell.gains]
        worst = {
            "kind": min((cell.of_kind(gain.kind), gain.kind, cell.machine) for cell, gain in every),
            "own": min((cell.of_kind(gain.kind, "own"), gain.kind, cell.machine) for cell, gain in every),
            "answer": min((gain.whole, gain.kind, cell.machine) for cell, gain in every),
        }
        shown = (f"{name} {value:.3f} ({kind}, {on})" for name, (value, kind, on) in worst.items())
        below = 100 * float(np.mean([gain.whole < 0.97 for _, gain in every]))
        speed = geometric_mean([cell.speed for cell in some])
        yield (
            f"{mode}: {geometric_mean(list(means.values())):.3f}; worst machine {means[lowest]:.3f} "
            f"({lowest}), {', '.join(shown)}; {below:.0f} % below .97; tokens/s {speed:.3f}"
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="few machines, modes and answers")
    arguments.add_argument(
        "--all", action="store_true", help="all machines of processors.toml and simulate.py"
    )
    arguments.add_argument("--machine", default="", help="only machines whose name contains this")
    arguments.add_argument("--mode", default="", help="only modes whose name contains this")
    arguments.add_argument(
        "--traces", type=Path, default=Path(__file__).with_name("traces_q4_k_m.json"), help="recorded answers"
    )
    arguments.add_argument("--answers", type=int, help="of each kind; default: 2, or 1 with --quick")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = arguments.parse_args()

    n = options.answers or (1 if options.quick else 2)
    quick = options.quick
    pairs = [
        pair
        for pair in machines(options.all)
        if options.machine in pair.name and (pair.name in _QUICK or not quick)
    ]
    modes = [mode for mode in MODES if options.mode in mode.name and (mode.name in _QUICK_MODES or not quick)]
    with ProcessPoolExecutor(options.jobs) as pool:
        by_machine = list(pool.map(partial(simulate_all, modes, options.traces, n), pairs))
    note("")
    cells = [cell for several in zip(*by_machine, strict=True) for cell in several]
    table(HEAD, [[cell.mode, cell.machine, *figures(cell)] for cell in cells])
    rows = []
    for kind in dict.fromkeys(gain.kind for gain in cells[0].gains):
        means = [
            geometric_mean([cell.of_kind(kind) for cell in cells if cell.mode == mode.name]) for mode in modes
        ]
        rows.append([kind, *(f"{mean:.3f}" for mean in means)])
    table(["with the prompt", *(mode.name for mode in modes)], rows)
    for line in summary(cells):
        print(line)


if __name__ == "__main__":
    main()
