"""What a larger model costs on this machine, and what drafts would gain with it, without downloading it.

    python benchmarks/shaped.py qwen2.5-7b [qwen3-8b …] [--type Q4_K_M] [--folder DIR]
    python benchmarks/shaped.py MAIN.gguf --draft DRAFT.gguf --n 64 --per-category 2
    python benchmarks/shaped.py --choices [--threads 1]

A shape is written into `--folder` as a file with random weights, which takes as long to read and to compute
as the real one; so is the shape of its usual draft model, in Q4_0. A file is measured as it is. The costs of
calls are measured as a session measures them, behind as many tokens as the answers below have before them on
average, which takes as long as reading a prompt. At these costs, the real decoding loop and the adaptive
policy then replay recorded answers of Qwen2.5-Coder 1.5B in Q4_K_M with the recorded drafts of its 0.5B
sibling, one after the other as in `specdec bench`, on a virtual clock (`simulate.py`). The draft model's
reading of prompts counts, and so does that of only their end. *Expected*, if the larger model accepts as many
drafts. Random routers spread tokens evenly over experts, which costs more than with a real text.

With `--choices`, heads and small draft models of models.toml are compared for each main model that has both:
by calls measured here, and by `spec_local.models.expected_gains`, which knows only sizes. The calls of a few
layers and of the output matrix are measured and added up; a head is measured as a model of its layers. Of one
thread, the processor's time counts, which other programs disturb less.
"""

import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from common import geometric_mean, machine, note, parser, table
from shaped_models import BLOCK_LAYERS, HEADS, SHAPES, TYPES, stored
from simulate import Machine, Pair, adaptive, one_by_one
from traces import Floats, Group, Trace, recorded

from spec_local.calibration.measure import measure, measure_prefill
from spec_local.calibration.sample_text import sample_tokens
from spec_local.core.calls import run
from spec_local.llama.limit_drafts import limit_drafts
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.models import catalog
from spec_local.models.catalog import PairEntry
from spec_local.models.expected_gains import expected_gains, planned
from spec_local.models.file_names import QUANT
from spec_local.policies.cost_model import CostModel
from spec_local.proposers.draft_model import DraftModel
from spec_local.system.machine import OtherPrograms, default_threads, is_busy, used_by_others

DRAFTS = {"qwen2.5": "qwen2.5-0.5b", "qwen3": "qwen3-0.6b", "llama3.1": "llama3.2-1b"}
"""The usual draft model, by the beginning of the main model's name; no other shape has one."""
Answers = Mapping[str, Sequence[Trace]]
SIZES = (1, 2, 4, 8, 3, 5, 6, 7, 12, 16)
_SHOWN = (2, 4, 8, 16)
_LAYERS = 4  # that are measured of a larger model
_PROMPT = 256  # tokens of the call that shows how fast prompts are read
_TRACES = Path(__file__).with_name("traces_q4_k_m.json")


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured of a file.

    memory: bytes that the process took for it, with the parts of the file that it had read.
    """

    calls: CostModel
    prompt: float  # tokens per second
    loading: float  # seconds
    memory: int


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="*", help=f"files, or {', '.join(SHAPES)}")
    arguments.add_argument("--choices", action="store_true", help="compare heads with small draft models")
    arguments.add_argument("--type", choices=TYPES, default="Q4_K_M", help="of shapes")
    arguments.add_argument("--draft", help="file or shape; none: no draft model (default: the usual one)")
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the models")
    arguments.add_argument("--n", type=int, default=128, help="tokens of each recorded answer")
    arguments.add_argument("--per-category", type=int, help="answers of each kind (default: all)")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
    if options.choices:
        return print_choices(Parts(options.folder, options.rounds, options.threads))
    replayed = answers(options.n, options.per_category)
    how = usual_context(replayed), options.rounds, options.threads
    for name in options.models:
        drafter = options.draft or DRAFTS.get(name.partition("-")[0], "none")
        programs = OtherPrograms()
        main_costs = measured(file(name, options.type, options.folder), *how, drafts=False)
        draft_costs = None
        if drafter != "none":
            draft_costs = measured(file(drafter, "Q4_0", options.folder), *how, drafts=True)
        report(name, main_costs, draft_costs, replayed)
        if is_busy(others := programs.cores()):
            print(f"Do not quote these figures: {used_by_others(others)}.\n")
    return print(machine())


def file(name: str, kind: str, folder: Path) -> Path:
    """The file of this name, or that of a shape."""
    return stored(folder, name, kind) if name in SHAPES else Path(name)


def measured(path: Path, context: int, rounds: int, threads: int, *, drafts: bool) -> Costs:
    """Measure calls behind `context` tokens; of a model that drafts, with one row of logits."""
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    model = Model(path)
    loading = time.perf_counter() - started
    rows = 1 if drafts else None
    row = open_sequence(model, n_ctx=2048, max_tokens=_PROMPT, max_logits=rows or 64, threads=threads)
    try:
        if drafts:
            limit_drafts(row, model.vocabulary)
        text = sample_tokens(row)
        note(f"measuring {path.name}")
        read = list(itertools.islice(itertools.cycle(text), context))
        for start in range(0, len(read), _PROMPT):
            run(row.call(read[start : start + _PROMPT], n_logits=0))
        # Of one thread, other programs slow down the clock on the wall, but not that of the process.
        clock = time.process_time if threads == 1 else time.perf_counter
        calls = measure(row, SIZES, rounds, rows, text, precision=0.1, clock=clock)
        prompt = measure_prefill(row, text)
        note("")
        return Costs(calls, prompt, loading, psutil.Process().memory_info().rss - before)
    finally:
        row.close()
        model.close()


def answers(n: int, of_each: int | None) -> Answers:
    """The first n tokens of recorded answers, and so many of each kind."""
    return {
        kind: [trace.first(n) for trace in traces[:of_each]] for kind, traces in recorded(_TRACES).items()
    }


def usual_context(replayed: Answers) -> int:
    """The average number of tokens before a token of these answers."""
    traces = [trace for several in replayed.values() for trace in several]
    lengths = [len(trace.answer) for trace in traces]
    before = [len(trace.prompt) + len(trace.answer) / 2 for trace in traces]
    return round(float(np.average(before, weights=lengths)))


def report(name: str, main_costs: Costs, draft_costs: Costs | None, replayed: Answers) -> None:
    """Print the costs, and what drafts are expected to gain."""
    print(f"\n{name}\n")
    rows = []
    for role, costs in (("main", main_costs), ("draft", draft_costs)):
        if costs:
            one = costs.calls.seconds(1)
            ratios = [f"{costs.calls.seconds(n) / one:.2f}" for n in _SHOWN]
            sizes = f"{costs.memory / 1e9:.1f}"
            rows.append(
                [role, f"{1000 * one:.0f}", *ratios, f"{costs.prompt:.0f}", f"{costs.loading:.1f}", sizes]
            )
    calls = [f"T({n}) / T(1)" for n in _SHOWN]
    table(["", "one token (ms)", *calls, "prompt (tokens/s)", "loading (s)", "memory (GB)"], rows)
    head = ["expected speed-up", "after the prompt", "with the prompt", "tokens/s"]
    table(head, expected(name, main_costs, draft_costs, replayed))


def expected(name: str, main_costs: Costs, draft_costs: Costs | None, replayed: Answers) -> list[list[str]]:
    """The speed relative to plain decoding, by kind of answer, and the geometric mean."""
    pair = Pair(name, of_calls(main_costs), of_calls(draft_costs) if draft_costs else None)
    every = [trace for traces in replayed.values() for trace in traces]
    machine = Machine(pair, Group("session", every))
    variant = adaptive(machine, kind=DraftModel, max_tokens=max(len(trace.answer) for trace in every))
    gains: dict[str, list[tuple[float, float]]] = {}
    for kind, traces in replayed.items():
        note(f"replaying {kind}")
        for each in one_by_one(machine, traces, variant):
            drafted = each.drafted + each.draft_reading
            whole = (each.main_reading + each.plain) / (each.main_reading + drafted)
            gains.setdefault(kind, []).append((each.plain / each.drafted, whole))
    note("")
    gains["geometric mean"] = [gain for several in gains.values() for gain in several]
    rows = []
    for kind, several in gains.items():
        after, whole = (geometric_mean(each) for each in zip(*several, strict=True))
        rows.append([kind, f"{after:.2f}", f"{whole:.2f}", f"{after / pair.main[1]:.1f}"])
    return rows


def of_calls(costs: Costs) -> Floats:
    """Seconds of a call of 0 … 4096 tokens: as measured, and at the speed of prompts for long ones."""
    most = max(SIZES)
    n = np.arange(4097.0)
    known = [*costs.calls.first(most), *np.array([_PROMPT, 4096]) / costs.prompt]
    found: Floats = np.interp(n, [*range(most + 1), _PROMPT, 4096], known)
    return found


@dataclass
class Parts:
    """Calls of 0 … 16 tokens, float64 (17,) seconds, from those of a few layers and of an output matrix."""

    folder: Path
    rounds: int
    threads: int
    known: dict[tuple[Path, bool], Floats] = field(default_factory=dict)

    def model(self, name: str, kind: str, *, drafts: bool) -> Floats:
        """Of a model, or of an EAGLE-3 head."""
        if name in HEADS:
            return self._measured(stored(self.folder, name, kind), drafts)
        layers: Floats = SHAPES[name].layers * self._layer(name, kind)
        return layers + self._output(name, kind, drafts)

    def block(self, kind: str, main: str, main_kind: str, corrects: bool) -> Floats:
        """Of a head that drafts as many tokens in one call, with the main model's output matrix.

        corrects: DSpark's corrections, each of which reads 256 numbers for each token of the vocabulary.
        """
        output = self._output(main, main_kind, drafts=False)
        correction = output[1] * 256 / SHAPES[main].width
        layers = BLOCK_LAYERS * self._layer(main, kind)
        found: Floats = layers + output + corrects * correction * np.arange(17.0)
        return found

    def _layer(self, name: str, kind: str) -> Floats:
        return self._measured(stored(self.folder, name, kind, _LAYERS), False) / _LAYERS

    def _output(self, name: str, kind: str, drafts: bool) -> Floats:
        with_layer = self._measured(stored(self.folder, name, kind, 1, vocabulary=True), drafts)
        return with_layer - self._layer(name, kind)

    def _measured(self, path: Path, drafts: bool) -> Floats:
        if (path, drafts) not in self.known:
            costs = measured(path, _PROMPT, self.rounds, self.threads, drafts=drafts)
            self.known[path, drafts] = costs.calls.first(16).copy()
        return self.known[path, drafts]


def print_choices(parts: Parts) -> None:
    """Compare each head of the catalog with the small draft model for the same main model."""
    programs, expected, rows, n_right = OtherPrograms(), expected_gains(), [], 0
    for head, small in itertools.product(catalog.pairs().items(), repeat=2):
        both = [each for each in (head, small) if expected.get(each[0])]
        kinds = [catalog.models()[pair.draft].head for _, pair in both]
        if len(both) < 2 or head[1].main != small[1].main or not kinds[0] or kinds[1]:
            continue
        costs = [gain_by_calls(pair, parts) for _, pair in both]
        estimates = [expected[name].speedup for name, _ in both]
        is_right = (costs[0] > costs[1]) == (estimates[0] > estimates[1])
        n_right += is_right
        figures = [f"{gain:.2f}" for gain in (*costs, *estimates)]
        rows.append([head[1].main, *(pair.draft for _, pair in both), *figures, "yes" if is_right else "no"])
    columns = ["main", "head", "draft model", "head", "draft model", "head", "draft model", "right"]
    table(columns, rows)
    print(f"Speed-ups by measured calls, and by sizes: {n_right} of {len(rows)} choices are right.")
    if is_busy(others := programs.cores()) and parts.threads > 1:
        print(f"Do not quote these figures: {used_by_others(others)}.")


def gain_by_calls(pair: PairEntry, parts: Parts) -> float:
    """The speed-up of a pair by measured calls."""
    main, draft = (catalog.models()[name] for name in (pair.main, pair.draft))
    names = [name.removesuffix("-q8").removesuffix("-q4") for name in (pair.main, pair.draft)]
    kinds = [QUANT.findall(model.file or "")[-1] for model in (main, draft)]
    of_main = parts.model(names[0], kinds[0], drafts=False)
    if is_block := draft.head in ("dflash", "dspark"):
        of_draft = parts.block(kinds[1], names[0], kinds[0], draft.head == "dspark")
    else:
        of_draft = parts.model(names[1], kinds[1], drafts=True)
    costs = [CostModel(dict(enumerate(seconds[1:].tolist(), 1))) for seconds in (of_main, of_draft)]
    costs[1].drafts_blocks = is_block
    return planned(pair, *costs).speedup


if __name__ == "__main__":
    main()
