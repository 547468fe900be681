"""What a larger model costs on this machine, and what drafts would gain with it, without downloading it.

    python benchmarks/shaped.py qwen2.5-7b [qwen3-8b …] [--type Q4_K_M] [--folder DIR]
    python benchmarks/shaped.py MAIN.gguf --draft DRAFT.gguf --n 64 --per-category 2

A shape is written into `--folder` as a file with random weights, which takes as long to read and to compute
as the real one; so is the shape of its usual draft model, in Q4_0. A file is measured as it is. The costs of
calls are measured as a session measures them, behind as many tokens as the answers below have before them on
average, which takes as long as reading a prompt. At these costs, the real decoding loop and the adaptive
policy then replay recorded answers of Qwen2.5-Coder 1.5B in Q4_K_M with the recorded drafts of its 0.5B
sibling, one after the other as in `specdec bench`, on a virtual clock (`simulate.py`). The draft model's
reading of prompts counts, and so does that of only their end. *Expected*, if the larger model accepts as many
drafts. Random routers spread tokens evenly over experts, which costs more than with a real text.
"""

import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from common import geometric_mean, machine, note, parser, table
from shaped_models import SHAPES, TYPES, stored
from simulate import Machine, Pair, adaptive, one_by_one
from traces import Floats, Group, Trace, recorded

from spec_local.calibration.measure import measure, measure_prefill
from spec_local.calibration.sample_text import sample_tokens
from spec_local.core.calls import run
from spec_local.llama.limit_drafts import limit_drafts
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.policies.cost_model import CostModel
from spec_local.proposers.draft_model import DraftModel
from spec_local.system.machine import OtherPrograms, default_threads, is_busy, used_by_others

DRAFTS = {"qwen2.5": "qwen2.5-0.5b", "qwen3": "qwen3-0.6b", "llama3.1": "llama3.2-1b"}
"""The usual draft model, by the beginning of the main model's name; no other shape has one."""
Answers = Mapping[str, Sequence[Trace]]
SIZES = (1, 2, 4, 8, 3, 5, 6, 7, 12, 16)
_SHOWN = (2, 4, 8, 16)
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
    arguments.add_argument("models", nargs="+", help=f"files, or {', '.join(SHAPES)}")
    arguments.add_argument("--type", choices=TYPES, default="Q4_K_M", help="of shapes")
    arguments.add_argument("--draft", help="file or shape; none: no draft model (default: the usual one)")
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the models")
    arguments.add_argument("--n", type=int, default=128, help="tokens of each recorded answer")
    arguments.add_argument("--per-category", type=int, help="answers of each kind (default: all)")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
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
    print(machine())


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
        calls = measure(row, SIZES, rounds, rows, text, precision=0.1)
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


if __name__ == "__main__":
    main()
