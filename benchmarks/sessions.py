"""Simulate sessions in the modes in which drafting has been seen to lose, on a virtual clock.

    python benchmarks/sessions.py
    python benchmarks/sessions.py --quick
    python benchmarks/sessions.py --machine "Zen 3" --mode clients

A row of the table is a mode on a machine: see `simulate.py` for the clock. Its figures are speeds relative to
plain decoding of the same requests in the same order: 0.97 means that an answer took 1 / 0.97 of the time.
`mean` is the geometric mean over the answers, `kind` that of the worst kind of prompt, `answer` the worst
answer, `tenth` the worst decile, `< .97` the share of answers below that. The first group counts the time of
the prompt, which both models read; the second one begins after it. `tokens/s` are those of all clients.

A pair of models is *known* when an earlier session has taught the policy. It is *new* when nothing has: the
costs were measured before the first answer, as in `chat` and `serve`, or are estimated from one call, as in
`generate`, whose time is counted. New sessions have eight answers, one of each kind. With several clients,
each begins its next answer when its last one has ended, and all share calls. Times vary by a few percent, and
other processes make some calls 10 to 30 times slower; in slow phases, all calls take half as long again for
seconds. The policy sees these times, but the figures are computed without them.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from common import geometric_mean, note, parser, table
from processors import DRAFT, call_times, processors
from simulate import PAIRS, Machine, Pair, Replay, ReplayContext, Role, Served, costs, draft_model, serve
from traces import Group, Trace, recorded

from spec_local.calibration.known_costs import ON_CPU
from spec_local.calibration.measure import measure
from spec_local.kernels.choice import most_tokens
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.acceptance_model import AcceptanceModel
from spec_local.policies.adaptive import Adaptive
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Answers, Experience
from spec_local.policies.sharing import RowCosts, SharedCalls
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
    """The usual machines, or also all of the museum."""
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
    found += [replace(pair, name=f"{pair.name} ") for pair in PAIRS if pair.name in _ALSO]
    return found + list(there.values()) * every


_ALSO = ("x86 F16 + 0.5B", "Metal 13B, draft 0.08")
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
    answers: Answers = field(default_factory=Answers)


def first_use(machine: Machine, *, measured: bool) -> Learned:
    """What is known of a new pair: the costs, from the calls that `KnownCosts` makes."""
    nothing = Trace([0], [0], [True], [0.5])

    def timed(role: Role, budget: float) -> CostModel:
        row, rows = Replay(ReplayContext(role, machine), nothing), None if role == "main" else 1
        if measured:
            return measure(row, rows=rows, budget=budget, clock=machine.clock)
        one = measure(row, (1,), 1, rows, clock=machine.clock)
        return CostModel(one.costs, ON_CPU)

    return Learned(timed("main", 1.5), None if machine.pair.draft is None else timed("draft", 0.5))


def session(
    pair: Pair, mode: Mode, traces: Sequence[Trace], seed: int, learned: Learned | None = None
) -> tuple[list[Served], Learned]:
    """Generate these answers under the adaptive policy; learned: by earlier sessions."""
    group = Group("session", traces, noisy=True, slow_phases=mode.slow_phases)
    here = Machine(pair, group, seed)
    if not learned and mode.pair != "estimated":
        learned = first_use(here, measured=True)
    shared: list[tuple[RowCosts, RowCosts | None]] = []

    def slot() -> Callable[[Replay], Proposer]:
        experience: list[Experience] = []

        def variant(model: Replay) -> Proposer:
            nonlocal learned
            if not learned:  # in the first answer
                learned = first_use(here, measured=False)
            if not shared:
                shared.append((RowCosts(learned.main), RowCosts(learned.draft) if learned.draft else None))
            if not experience:
                experience.append(Experience(learned.acceptance, learned.answers))
            n_tokens = len(model.trace.answer) if mode.lengths else _N_TOKENS
            policy = Adaptive(*shared[0], experience[0], max_tokens=n_tokens, clock=here.clock)
            return CombinedProposer(
                policy, draft_model(model, DraftModel) if shared[0][1] else None, [SuffixLookup()]
            )

        return variant

    planner = SharedCalls(lambda: shared[0] if shared else None)
    answers = list(serve(here, traces, [slot() for _ in range(mode.n_clients)], planner=planner))
    assert learned
    return answers, learned


_N_TOKENS = 128  # of the recorded answers, at most


class _Counted(Machine):
    """Its clock counts calls of the main model, and it records their sizes."""

    def __init__(self, group: Group) -> None:
        super().__init__(Pair("", np.ones(4097), None), group)
        self.sizes: list[int] = []

    def call(self, role: Role, n: int, position: int, reads: bool = False) -> None:
        self.sizes.append(n)
        super().call(role, n, position, reads)


@cache
def _plain_calls(traces: tuple[Trace, ...], n_clients: int) -> tuple[list[int], list[Served]]:
    """The sizes of all calls of plain decoding, and the number of calls before each event of the answers.

    Neither depends on costs, so one run serves all machines.
    """
    counted = _Counted(Group("plain", traces))
    answers = list(serve(counted, traces, [lambda row: None] * n_clients))
    return counted.sizes, answers


def plain(pair: Pair, traces: Sequence[Trace], n_clients: int) -> list[Served]:
    """The same answers by plain decoding."""
    sizes, answers = _plain_calls(tuple(traces), n_clients)
    seconds = np.concatenate(([0.0], pair.main[sizes].cumsum()))
    return [
        Served(each.trace, *(float(seconds[round(n)]) for n in (each.began, each.read, each.ended)))
        for each in answers
    ]


@dataclass(frozen=True)
class Gain:
    """Speed of an answer relative to plain decoding."""

    kind: str
    whole: float
    after: float


@dataclass(frozen=True)
class Cell:
    """A mode on a machine; speed: of all tokens."""

    mode: str
    machine: str
    gains: Sequence[Gain]
    speed: float

    def of_kind(self, kind: str) -> float:
        return geometric_mean([gain.whole for gain in self.gains if gain.kind == kind])


def simulate(pair: Pair, mode: Mode, kinds: Mapping[Trace, str], earlier: Sequence[Trace]) -> Cell:
    """Simulate one mode on one machine.

    Args:
        kinds: the answers, with the kind of each.
        earlier: answers of the earlier session of a known pair.
    """
    traces = list(kinds)
    sessions = [traces]
    learned = None
    if mode.pair == "known":
        _, learned = session(pair, mode, earlier, 0)
    elif mode.n_clients == 1:
        sessions = [traces[i : i + _NEW] for i in range(0, len(traces), _NEW)]
    gains: list[Gain] = []
    took = plain_took = 0.0
    for seed, several in enumerate(sessions, 1):
        answers, _ = session(pair, mode, several, seed, copy.deepcopy(learned))
        plainly = {each.trace: each for each in plain(pair, several, mode.n_clients)}
        for each in answers:
            other = plainly[each.trace]
            whole = (other.ended - other.began) / (each.ended - each.began)
            after = (other.ended - other.read) / (each.ended - each.read)
            gains.append(Gain(kinds[each.trace], whole, after))
        took += max(each.ended for each in answers) - min(each.began for each in answers)
        plain_took += max(each.ended for each in plainly.values())
    return Cell(mode.name, pair.name, gains, plain_took / took)


_NEW = 8  # answers of a session of a new pair


def answers(path: Path, n: int) -> dict[Trace, str]:
    """The first n recorded answers of each kind, all kinds in turn.

    The first token of each is unique, so that no two prompts have a prefix in common: tokens are numbered in
    each trace on its own.
    """
    kinds = recorded(path)
    found: dict[Trace, str] = {}
    for several in itertools.islice(zip(*kinds.values(), strict=True), n):
        for kind, trace in zip(kinds, several, strict=True):
            found[trace.from_token(-1 - len(found))] = kind
    return found


def of_lengths(kinds: Mapping[Trace, str], lengths: Sequence[int]) -> dict[Trace, str]:
    """The answers, cut to these lengths in turn."""
    if not lengths:
        return dict(kinds)
    turns = itertools.cycle(lengths)
    return {trace.first(next(turns)): kind for trace, kind in kinds.items()}


def shuffled(traces: Sequence[Trace], seed: int) -> list[Trace]:
    return [traces[i] for i in np.random.default_rng(seed).permutation(len(traces))]


# Tables ---------------------------------------------------------------------------------------------------


def figures(cell: Cell) -> list[str]:
    """A row of the table."""
    found = []
    kinds = dict.fromkeys(gain.kind for gain in cell.gains)
    for which in ("whole", "after"):
        values = [getattr(gain, which) for gain in cell.gains]
        by_kind = {
            kind: geometric_mean([getattr(gain, which) for gain in cell.gains if gain.kind == kind])
            for kind in kinds
        }
        worst = min(by_kind, key=by_kind.__getitem__)
        found += [
            f"{geometric_mean(values):.3f}",
            f"{by_kind[worst]:.3f} {worst}",
            f"{min(values):.3f}",
            f"{np.quantile(values, 0.1):.3f}",
            f"{100 * float(np.mean(np.array(values) < 0.97)):.0f} %",
        ]
    return [*found, f"{cell.speed:.3f}"]


_FIGURES = ("mean", "kind", "answer", "tenth", "< .97")
HEAD = ("mode", "machine", *_FIGURES, *(f"after: {name}" for name in _FIGURES), "tokens/s")


def summary(cells: Sequence[Cell]) -> Iterator[str]:
    """One line for each mode."""
    for mode in dict.fromkeys(cell.mode for cell in cells):
        some = [cell for cell in cells if cell.mode == mode]
        means = {cell.machine: geometric_mean([gain.whole for gain in cell.gains]) for cell in some}
        lowest = min(means, key=means.__getitem__)
        value, kind, where = min(
            (cell.of_kind(gain.kind), gain.kind, cell.machine) for cell in some for gain in cell.gains
        )
        answer, of, on = min((gain.whole, gain.kind, cell.machine) for cell in some for gain in cell.gains)
        below = float(np.mean([gain.whole < 0.97 for cell in some for gain in cell.gains]))
        yield (
            f"{mode}: {geometric_mean(list(means.values())):.3f}; worst machine {means[lowest]:.3f} "
            f"({lowest}), kind {value:.3f} ({kind}, {where}), answer {answer:.3f} ({of}, {on}); "
            f"{100 * below:.0f} % below .97; tokens/s {geometric_mean([cell.speed for cell in some]):.3f}"
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="few machines, modes and answers")
    arguments.add_argument("--museum", action="store_true", help="also all machines of processors.toml")
    arguments.add_argument("--machine", default="", help="only machines whose name contains this")
    arguments.add_argument("--mode", default="", help="only modes whose name contains this")
    arguments.add_argument(
        "--traces", type=Path, default=Path(__file__).with_name("traces_q4_k_m.json"), help="recorded answers"
    )
    arguments.add_argument("--answers", type=int, help="of each kind; default: 3, or 2 with --quick")
    options = arguments.parse_args()

    n = options.answers or (2 if options.quick else 3)
    recordings = answers(options.traces, n)
    cells = []
    for mode in MODES:
        kinds = of_lengths(recordings, mode.lengths)
        earlier = shuffled(list(kinds), 0)
        for pair in machines(options.museum):
            chosen = options.machine in pair.name and options.mode in mode.name
            quick = pair.name in _QUICK and mode.name in _QUICK_MODES
            if chosen and (quick or not options.quick):
                note(f"{mode.name}: {pair.name}")
                cells.append(simulate(pair, mode, kinds, earlier))
    note("")
    table(HEAD, [[cell.mode, cell.machine, *figures(cell)] for cell in cells])
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    rows = []
    for kind in dict.fromkeys(recordings.values()):
        means = [
            geometric_mean([cell.of_kind(kind) for cell in cells if cell.mode == mode]) for mode in modes
        ]
        rows.append([kind, *(f"{mean:.3f}" for mean in means)])
    table(["with the prompt", *modes], rows)
    for line in summary(cells):
        print(line)


if __name__ == "__main__":
    main()
