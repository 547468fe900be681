"""Test draft-length policies on a virtual clock, with the real decoding loop and models that replay answers.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --kind real --traces benchmarks/held_out_traces.json

The main model generates the answer of a trace, whatever was drafted. The draft model proposes the same tokens
with the same confidence as when the trace was recorded. The duration of a call comes from a table of measured
costs. A policy can therefore be tested in milliseconds on machines that are not at hand and under rare
conditions, and the results are reproducible.

`best fixed` is the fastest, in hindsight, of plain decoding, the draft model with 1 to 16 draft tokens per
step, and prompt lookup with 1 to 63, for this machine and this group of answers. A group is one session, so
the adaptive policy may use what it learned from earlier answers. `oracle` is the fastest division of the same
answers into steps: see `spec_local.bench.theory`. Prefill does not count; but the policy does not let the
draft model read a prompt if that would take longer than the draft could save. Where the clock is disturbed,
the policy sees the disturbed times, and its result is computed from the undisturbed ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from common import geometric_mean, note, parser, table
from traces import TRACES, Floats, Group, Trace, groups

from spec_local.bench.theory import best_seconds, run_lengths
from spec_local.calibration.estimates import CPU_ESTIMATES
from spec_local.core.calls import Call, Logits
from spec_local.core.proposal import MAX_DRAFT
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.core.sequence import Limits
from spec_local.engine.engine import Engine, Planner
from spec_local.engine.events import Failed, Prefilled
from spec_local.engine.request import Request, RequestOptions
from spec_local.llama.rollback import RollsBack
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import DraftReading, Policy, PolicyOptions
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Experience
from spec_local.policies.sharing import SharedCosts
from spec_local.proposers.base import Proposer
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel, Window
from spec_local.verifiers import VERIFIERS

Role = Literal["main", "draft"]
ROLES: tuple[Role, Role] = ("main", "draft")
GREEDY = Sampler(SamplingSettings(temperature=0))

# Machines -------------------------------------------------------------------------------------------------


def costs(milliseconds: float, ratios: dict[int, float]) -> Floats:
    """Seconds of a call of 0 … 4096 tokens: linear between the sizes and beyond the last one."""
    sizes = sorted(ratios)
    last, before = sizes[-1], sizes[-2]
    slope = (ratios[last] - ratios[before]) / (last - before)
    n = np.arange(4097.0)
    known = np.interp(n, sizes, [ratios[size] for size in sizes])
    found: Floats = milliseconds / 1000 * (known + slope * np.maximum(0.0, n - last))
    return found


@dataclass(frozen=True)
class Pair:
    """Seconds of the main and the draft model's calls on one machine; draft None: there is no draft model."""

    name: str
    main: Floats = field(repr=False)
    draft: Floats | None = field(repr=False)

    def seconds(self, role: Role) -> Floats:
        found = self.main if role == "main" else self.draft
        assert found is not None
        return found


# fmt: off
_F16 = {1: 1, 2: 1.58, 3: 1.75, 4: 1.86, 5: 2.09, 6: 2.19, 7: 2.4, 8: 2.66, 9: 2.66, 12: 3.15, 16: 3.67,
        17: 3.83, 24: 4.88, 32: 6.15, 33: 6.25, 48: 8.45, 64: 10.62}
_Q8_0 = {1: 1, 2: 2.91, 3: 3.47, 4: 3.95, 5: 5.46, 6: 5.87, 7: 6.3, 8: 4.16, 9: 5.69, 12: 5.26, 16: 6.38,
         17: 8.08, 24: 8.88, 32: 10.97, 33: 12.6, 48: 16.11, 64: 20.02}
_Q4_K_M = {1: 1, 2: 1.72, 3: 2.24, 4: 2.75, 5: 3.46, 6: 4.05, 7: 5.09, 8: 4.9, 9: 5.31, 12: 6.13, 16: 5.65,
           17: 7.08, 24: 9.05, 32: 10.2, 33: 11.38, 48: 14.57, 64: 18.32}
_SMALL = {1: 1, 2: 2.44, 3: 3.09, 4: 3.29, 5: 4.59, 8: 4.29, 9: 5.55, 16: 5.35, 17: 6.54, 24: 8.34,
          32: 10.45, 48: 14.83, 64: 18.33}
_135M = {1: 1, 2: 2.09, 4: 3.02, 8: 4.52, 16: 7.27, 32: 13.5, 64: 26.7}
_F16_B = {1: 1, 2: 1.17, 4: 1.35, 8: 1.86, 16: 2.7}
_Q8_0_B = {1: 1, 2: 1.08, 4: 1.41, 8: 2.07, 16: 3.0}  # 16: not measured
_Q4_K_M_B = {1: 1, 2: 1.6, 4: 1.8, 8: 3.2, 16: 3.8, 32: 6.3}
_SMALL_B = {1: 1, 2: 1.1, 4: 1.4, 8: 2.2, 16: 3.4}
_METAL = {1: 1, 2: 1.03, 4: 1.08, 8: 1.15, 16: 1.35, 32: 2.2, 64: 3.6}
_LAPTOP = {1: 1, 2: 1.15, 4: 1.3, 8: 1.7, 16: 2.6, 32: 4.6}
# fmt: on
_HALF_B = costs(16.2, _SMALL)
PAIRS = (
    Pair("x86 F16 + 0.5B", costs(60.5, _F16), _HALF_B),
    Pair("x86 Q8_0 + 0.5B", costs(42.0, _Q8_0), _HALF_B),
    Pair("x86 Q4_K_M + 0.5B", costs(27.4, _Q4_K_M), _HALF_B),
    Pair("x86 135M alone", costs(6.9, _135M), None),
    Pair("x86-b F16, draft 0.22", costs(60.0, _F16_B), costs(0.22 * 60.0, _SMALL_B)),
    Pair("x86-b Q8_0, draft 0.39", costs(42.0, _Q8_0_B), costs(0.39 * 42.0, _SMALL_B)),
    Pair("x86-b Q4_K_M, draft 0.6", costs(27.0, _Q4_K_M_B), costs(0.6 * 27.0, _SMALL_B)),
    Pair("Metal 13B, draft 0.08", costs(40.0, _METAL), costs(0.08 * 40.0, _METAL)),
    Pair("laptop 7B, draft 0.15", costs(120.0, _LAPTOP), costs(0.15 * 120.0, _SMALL_B)),
)

# The virtual machine --------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Seconds of all calls so far without noise; rest: without the main model's reading of prompts."""

    seconds: float = 0.0
    rest: float = 0.0


_START = Moment()
_PHASES = 20.0, 15.0, 1.5  # seconds from one slow phase to the next, and of normal speed before it; factor


class Machine:
    """A clock that the models' calls advance, and a record of these calls."""

    def __init__(self, pair: Pair, group: Group, seed: int = 7) -> None:
        self._clock = 0.0
        self.pair, self._group = pair, group
        self.now = _START
        self._rng = np.random.default_rng(seed)
        self._disturbed = 0  # number of the next calls that another process slows down
        self.calls: list[tuple[Role, int, int]] = []
        """Model, number of tokens, and position: tokens that the session generated before the call."""
        self.reading: list[tuple[Role, int, int]] = []
        """The same for the calls that evaluate prompts."""

    def clock(self) -> float:
        return self._clock

    def call(self, role: Role, n: int, position: int, n_read: int = 0) -> None:
        """Advance the clock by a call of n tokens, of which `n_read` belong to prompts."""
        (self.reading if n == n_read else self.calls).append((role, n, position))
        group, table = self._group, self.pair.seconds(role)
        factor = group.slower[role == "draft"] if 2 * position >= group.n_tokens else 1.0
        seconds, rest = factor * float(table[n]), factor * float(table[n - n_read]) if n > n_read else 0.0
        self.now = Moment(self.now.seconds + seconds, self.now.rest + (rest if role == "main" else seconds))
        if group.slow_phases and self._clock % _PHASES[0] > _PHASES[1]:
            seconds *= _PHASES[2]
        self._clock += seconds * (self._noise() if group.noisy else 1.0)

    def _noise(self) -> float:
        if not self._disturbed and self._rng.random() < 0.01:
            self._disturbed = int(self._rng.integers(1, 6))
        spike = 1.0
        if self._disturbed:
            self._disturbed -= 1
            spike = float(self._rng.uniform(10, 30))
        return spike * float(self._rng.lognormal(0.0, 0.04))

    def measured(self, role: Role) -> CostModel:
        """The costs that a session measures before it begins."""
        found = CostModel()
        for n in (1, 2, 3, 4, 5, 8, 16, 32, 64):
            for _ in range(3):
                noise = float(self._rng.lognormal(0.0, 0.04)) if self._group.noisy else 1.0
                found.observe(n, noise * float(self.pair.seconds(role)[n]))
        return found

    def estimated(self, role: Role, error: float) -> CostModel:
        """The costs that a session begins with where nothing has been measured.

        error: ratio of the time of a one-token call to the real one; the estimates of others are wrong, too.
        """
        return CostModel({1: error * float(self.pair.seconds(role)[1])}, CPU_ESTIMATES)


@dataclass
class Own:
    """What an answer costs all clients, in seconds without noise, not counting the main model's prompt.

    seconds: its share of plain calls, what its draft tokens add to calls, and the draft model's calls for it.
    plain: its share of plain calls in plain decoding. share: of the last call, without draft tokens.
    """

    seconds: float = 0.0
    plain: float = 0.0
    share: float = 0.0


_N_CTX, _MAX_LOGITS = 4096, MAX_DRAFT + 1


class ReplayContext:
    """One of the models on a virtual machine, whose rows share calls of the size that a session has."""

    max_tokens = 96

    def __init__(self, role: Role, machine: Machine, n_parallel: int = 1) -> None:
        self.role, self._machine = role, machine
        self.max_logits = _MAX_LOGITS if n_parallel == 1 else self.max_tokens

    def decode(self, calls: Sequence[Call["Replay"]]) -> Sequence[Logits]:
        rows, positions = zip(*(call.sequence.evaluated(call) for call in calls), strict=True)
        n, n_read = (sum(len(c.tokens) for c in calls if c.n_logits <= most) for most in (self.max_logits, 0))
        self._machine.call(self.role, n, max(positions), n_read)
        self._charge([call for call in calls if call.n_logits or self.role == "draft"], n)
        return rows

    def _charge(self, calls: Sequence[Call["Replay"]], n: int) -> None:
        """Divide the seconds of a call of n tokens among the answers that these are for."""
        table = self._machine.pair.seconds(self.role)
        is_main = self.role == "main"
        share = float(table[len(calls)]) / len(calls) if is_main and calls else 0.0
        n_fixed = len(calls) if is_main else 0
        n_more = sum(len(call.tokens) for call in calls) - n_fixed
        more = float(table[n] - (table[n - n_more] if n > n_more else 0.0)) / max(1, n_more)
        for call in calls:
            own = call.sequence.own
            own.seconds += share + more * (len(call.tokens) - is_main)
            own.share = share


class Replay(RollsBack):
    """A `MainSequence` for chains that replays a trace.

    Args:
        before: tokens that the session generated before this answer.
        own: costs of the answer; grows.

    Attributes:
        window: the part of the history that a draft model has read.
    """

    def __init__(self, context: ReplayContext, trace: Trace, before: int = 0, own: Own | None = None) -> None:
        self.limits = Limits(trace.n_vocab, _N_CTX, context.max_tokens, _MAX_LOGITS, max_rollback=_N_CTX)
        self.cached: list[int] = []
        self.window = Window()
        self.context, self.trace, self.own = context, trace, own or Own()
        self._text, self._start = [*trace.prompt, *trace.answer], len(trace.prompt)
        self._tree: list[int] = []
        self._before = before - self._start

    def call(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        n_logits: int | None = None,
        *,
        positions: Sequence[int] | None = None,
        n_draft: int | None = None,
    ) -> Call["Replay"]:
        appends, known = parents is None, len(self._tree)
        if parents is None:
            self._tree, known, parents = [], 0, range(-1, len(tokens) - 1)
        n_logits = len(tokens) if n_logits is None else n_logits
        assert list(parents) == list(range(known - 1, known - 1 + len(tokens)))
        return Call(self, tokens, parents, n_logits, positions, appends)

    def evaluated(self, call: Call["Replay"]) -> tuple[Logits, int]:
        """The logits of this row's part of a call, and its position: see `Machine.calls`."""
        self._tree += call.tokens
        left_out = max(0, self.window.start - 1)  # tokens between the first one and the window
        begin = len(self.cached) + left_out
        end = begin + len(self._tree)
        is_main = self.context.role == "main"
        n_known = begin + 1 if is_main else end
        first = end + 1 - call.n_logits
        rows = self.trace.main_logits
        if not is_main:
            i = 0 if self.cached else 1  # the first token is followed by the window
            is_mistaken = self._tree[i:] != self._text[begin + i : end]
            rows = self._read().mistaken_logits if is_mistaken else self._read().draft_logits
        return rows[first - self._start : end + 1 - self._start], max(0, self._before + n_known)

    def _read(self) -> Trace:
        """The trace of a draft model that has read the same part of the prompt."""
        n_read = self._start - self.window.start
        known = {self._start: self.trace, **self.trace.windows}
        return known[min(known, key=lambda each: abs(each - n_read))]

    def commit(self, path: Sequence[int]) -> None:
        if self.context.role == "main":
            self.own.plain += len(path) * self.own.share  # nothing while the prompt is read
        self.cached += [self._tree[node] for node in path]
        self._tree = []

    def truncate(self, length: int) -> None:
        del self.cached[length:]
        self._tree = []


# What is compared -----------------------------------------------------------------------------------------

Variant = Callable[[Replay], Proposer | None]
"""Creates the proposer that is compared, given the draft model."""


@dataclass
class Served:
    """An answer, and when it began, when its prompt had been read, and when it ended."""

    trace: Trace
    began: Moment
    read: Moment = _START
    ended: Moment = _START
    own: Own = field(default_factory=Own)


def serve(
    machine: Machine,
    traces: Sequence[Trace],
    variants: Sequence[Variant],
    draft_max: int = MAX_DRAFT,
    planner: Planner | None = None,
) -> Iterator[Served]:
    """Generate all answers of a session, as many at the same time as there are variants.

    A slot begins the next answer as soon as its last one has ended. All rows of a model share calls.
    """
    contexts = [ReplayContext(role, machine, len(variants)) for role in ROLES]
    engine = Engine(planner, clock=machine.clock)
    left, n_begun = iter(traces), 0
    running: dict[Request, tuple[Served, Variant]] = {}

    def begin(variant: Variant) -> None:
        nonlocal n_begun
        if trace := next(left, None):
            served = Served(trace, machine.now)
            main, draft = (Replay(context, trace, n_begun, served.own) for context in contexts)
            request = Request(
                main,
                trace.prompt,
                RequestOptions(
                    sampler=GREEDY,
                    rng=SeededRng(0),
                    proposer=variant(draft),
                    verifier=VERIFIERS["exact-match"],
                    draft_max=draft_max,
                    max_tokens=len(trace.answer),
                    clock=machine.clock,
                ),
            )
            engine.add(request)
            running[request] = served, variant
            n_begun += len(trace.answer)

    for variant in variants:
        begin(variant)
    while running:
        for request, event in engine.step():
            assert not isinstance(event, Failed), event
            served, variant = running[request]
            if isinstance(event, Prefilled):
                served.read = machine.now
            elif request.statistics.predicted_n == len(served.trace.answer):
                assert request.history == [*served.trace.prompt, *served.trace.answer]
                served.ended = machine.now
                engine.remove(request)
                del running[request]
                yield served
                begin(variant)


def run(group: Group, machine: Machine, variant: Variant, draft_max: int) -> None:
    """Generate all answers of a session, one after the other; the calls are recorded in `machine`."""
    for _ in serve(machine, group.traces, [variant], draft_max):
        pass


def seconds(calls: Sequence[tuple[Role, int, int]], pair: Pair, group: Group) -> float:
    """Total duration of the calls, without noise."""
    total = 0.0
    for role, slower in zip(ROLES, group.slower, strict=True):
        n = np.array(
            [(n, 2 * position >= group.n_tokens) for of, n, position in calls if of == role], np.intp
        )
        if len(n):
            total += float((pair.seconds(role)[n[:, 0]] * np.where(n[:, 1], slower, 1.0)).sum())
    return total


@dataclass(frozen=True)
class Spent:
    """Seconds of an answer, without noise.

    plain, drafted: after the prompt. main_reading, draft_reading: of the prompt, by each model.
    """

    plain: float
    drafted: float
    main_reading: float
    draft_reading: float


def one_by_one(machine: Machine, traces: Sequence[Trace], variant: Variant) -> Iterator[Spent]:
    """Generate the answers of a session one after the other."""
    for each in serve(machine, traces, [variant]):
        plain = len(each.trace.answer) * float(machine.pair.main[1])
        by_draft = each.read.rest - each.began.rest
        by_main = each.read.seconds - each.began.seconds - by_draft
        yield Spent(plain, each.ended.seconds - each.read.seconds, by_main, by_draft)


class WholeHistory(DraftModel):
    """A draft model that reads all of a history, which costs nothing here."""

    def readings(self, history: Sequence[int]) -> list[DraftReading]:
        return super().readings(history)[-1:]


def draft_model(model: Replay, kind: type[DraftModel] = WholeHistory) -> DraftModel:
    return kind(model, GREEDY, Chain("coupled"), n_vocab=model.limits.n_vocab, window=model.window)


def _plain(model: Replay) -> None:
    return None


def _fixed_draft(model: Replay) -> Proposer:
    return CombinedProposer(Policy(), draft_model(model))


def _fixed_lookup(model: Replay) -> Proposer:
    return CombinedProposer(Policy(), lookups=[PromptLookup()])


FIXED: dict[str, tuple[Variant, int]] = {
    "plain": (_plain, 0),
    **{f"draft {k}": (_fixed_draft, k) for k in range(1, 17)},
    **{f"lookup {k}": (_fixed_lookup, k) for k in (1, 2, 3, 4, 7, 10, 15, 31, 63)},
}


@cache
def fixed_calls(group: Group) -> dict[str, list[tuple[Role, int, int]]]:
    """The calls of all fixed variants. They do not depend on costs, so one run serves all machines."""
    found = {}
    for name, (variant, k) in FIXED.items():
        machine = Machine(PAIRS[0], group)
        run(group, machine, variant, k)
        found[name] = machine.calls
    return found


def adaptive_calls(pair: Pair, group: Group, error: float | None = None) -> list[tuple[Role, int, int]]:
    """The calls of a session under the adaptive policy, which measured the costs before it began.

    error: it estimated them instead, that of a draft call with this error; see `Machine.estimated`.
    """
    machine = Machine(pair, group)
    run(group, machine, adaptive(machine, error), MAX_DRAFT)
    return machine.calls


def adaptive(
    machine: Machine,
    error: float | None = None,
    kind: type[DraftModel] = WholeHistory,
    max_tokens: int | None = None,
) -> Variant:
    """The adaptive policy with all proposers, and the same experience for all answers.

    error: see `adaptive_calls`. kind: of the draft model. max_tokens: of an answer, if the policy knows it.
    """
    experience = Experience()
    main = machine.measured("main") if error is None else machine.estimated("main", 1.0)
    draft = None
    if machine.pair.draft is not None:
        draft = machine.measured("draft") if error is None else machine.estimated("draft", error)

    def variant(model: Replay) -> Proposer:
        policy = Adaptive(
            PolicyOptions(
                costs=lambda: (SharedCosts(main), draft),
                experience=experience,
                max_tokens=max_tokens,
                clock=machine.clock,
            )
        )
        return CombinedProposer(policy, draft_model(model, kind) if draft else None, [SuffixLookup()])

    return variant


@dataclass(frozen=True)
class Cell:
    """Tokens per second for one group of answers on one machine."""

    pair: str
    group: str
    plain: float
    best: float
    which: str
    adaptive: float
    oracle: float | None

    @property
    def of_best(self) -> float:
        return self.adaptive / self.best

    @property
    def of_plain(self) -> float:
        return self.adaptive / self.plain


def simulate(pair: Pair, group: Group) -> Cell:
    if group.draft is not None and pair.draft is not None:
        pair = replace(pair, draft=pair.draft * group.draft * pair.main[1] / pair.draft[1])
    took = {
        name: seconds(calls, pair, group)
        for name, calls in fixed_calls(group).items()
        if pair.draft is not None or not name.startswith("draft")
    }
    which = min(took, key=took.__getitem__)
    n, adaptive = group.n_tokens, seconds(adaptive_calls(pair, group), pair, group)
    oracle = None if group.slower != (1.0, 1.0) else n / sum(least(pair, trace) for trace in group.traces)
    return Cell(pair.name, group.name, n / took["plain"], n / took[which], which, n / adaptive, oracle)


def least(pair: Pair, trace: Trace) -> float:
    """Seconds of the fastest division of an answer into steps."""
    runs = {"lookup": trace.lookup_runs}
    step = {"lookup": 0.0}
    if pair.draft is not None:
        runs["draft"], step["draft"] = run_lengths(trace.right), float(pair.draft[1])
    return best_seconds(runs, lambda n: float(pair.main[n]), step, len(trace.answer), MAX_DRAFT - 1)


QUICK_PAIRS = {"x86 F16 + 0.5B", "x86 Q4_K_M + 0.5B", "Metal 13B, draft 0.08"}
QUICK_GROUPS = {"code editing", "chat", "summarising", "acceptance 0.8", "acceptance 0.97", "long quotes"}
QUICK_GROUPS |= {"always wrong", "collapse", "main 3 × slower", "lookup trap"}


HEAD = ("machine", "answers", "plain", "best fixed", "which", "adaptive", "of best", "of plain", "oracle")


def row(cell: Cell) -> list[str]:
    rates = [cell.plain, cell.best, cell.adaptive, cell.oracle]
    plain, best, adaptive, oracle = ("" if rate is None else f"{rate:.1f}" for rate in rates)
    shares = f"{cell.of_best:.3f}", f"{cell.of_plain:.3f}"
    return [cell.pair, cell.group, plain, best, cell.which, adaptive, *shares, oracle]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="a few machines and groups only")
    arguments.add_argument("--pair", default="", help="only machines whose name contains this")
    arguments.add_argument("--group", default="", help="only groups whose name contains this")
    arguments.add_argument(
        "--kind", default="", choices=("", "real", "made", "adversarial"), help="only such groups"
    )
    arguments.add_argument("--traces", type=Path, default=TRACES, help="recorded answers")
    options = arguments.parse_args()

    pairs = [p for p in PAIRS if options.pair in p.name and (not options.quick or p.name in QUICK_PAIRS)]
    selected = [
        group
        for group in groups(options.traces)
        if options.group in group.name
        and options.kind in ("", group.kind)
        and (not options.quick or group.name in QUICK_GROUPS)
    ]
    cells: list[tuple[str, Cell]] = []
    for group in selected:
        for pair in pairs:
            if group.draft is not None and pair.draft is None:
                continue
            note(f"{group.name}: {pair.name}")
            cells.append((group.kind, simulate(pair, group)))
    note("")
    for pair in pairs:
        table(HEAD, [row(cell) for _, cell in cells if cell.pair == pair.name])
    for kind in ("real", "made", "adversarial"):
        some = [cell for k, cell in cells if k == kind]
        if not some:
            continue
        best, plain = min(some, key=lambda c: c.of_best), min(some, key=lambda c: c.of_plain)
        of_plain, of_best = ([getattr(c, name) for c in some] for name in ("of_plain", "of_best"))
        print(
            f"{kind}: {len(some)} cells\n"
            f"  of plain {geometric_mean(of_plain):.3f}, "
            f"least {plain.of_plain:.3f} ({plain.pair}, {plain.group})\n"
            f"  of best {geometric_mean(of_best):.3f}, least {best.of_best:.3f} ({best.pair}, {best.group})"
        )
        for cell in some:
            if cell.of_best < 0.95 or cell.of_plain < 0.98:
                shares = f"{cell.of_best:.3f} of {cell.which}, {cell.of_plain:.3f} of plain"
                print(f"  {cell.pair}, {cell.group}: {shares}")


if __name__ == "__main__":
    main()
