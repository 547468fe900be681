"""Replay measured processors through the choice of kernels and the adaptive policy.

    python benchmarks/processors.py             # all entries of processors.toml
    python benchmarks/processors.py my-laptop.toml
    python benchmarks/processors.py --session   # tokens per call of the recorded answers, for choice.py

An entry has the time of products by number of tokens, with both kernels (`specdec doctor --report` prints
one). From these, `spec_local.kernels.choice` decides for each type of weights. The recorded answers are then
generated on a virtual clock with the costs of a main model of these types and of a draft model. `gain` is the
speed relative to plain decoding with llama.cpp's kernels, with the prompt where its time is known; `best` is
that of the best choice for each type in hindsight. The last column shows which kernels are used.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import parser, table
from simulate import Pair, adaptive_calls, costs, fixed_calls, seconds
from traces import Group, recorded

from spec_local.kernels.choice import FLOAT_SIZES, FLOATS, SIZES, Times, most_tokens

_FILE = Path(__file__).with_name("processors.toml")
# A 0.5B in Q4_0 beside a 1.5B in Q4_K_M on two cores: of the main model's call of one token.
DRAFT = {1: 0.25, 2: 0.28, 4: 0.33, 8: 0.5, 16: 0.9}
_PLAIN_MS = 40.0  # the unit: any is as good
N_DRAFT = (1, 2, 3, 5, 7, 15)  # draft tokens of the calls in choice.py


@dataclass(frozen=True)
class Processor:
    """shares: of a model's bytes, by type of weights. times: by type."""

    name: str
    shares: Mapping[str, float]
    times: Mapping[str, Times]


def processors(path: Path = _FILE) -> list[Processor]:
    """All entries of a file, one for each model: of several types, or of one each."""
    found = []
    for entry in tomllib.loads(path.read_text())["processor"]:
        times = {kind: _completed(kind, known) for kind, known in entry["times"].items()}
        # No model's weights are F32: only its norms and routers.
        models = [entry["shares"]] if "shares" in entry else [{kind: 1.0} for kind in times if kind != "F32"]
        for shares in models:
            name = f"{entry['name']}: {' + '.join(shares)}"
            found.append(Processor(name, shares, {kind: times[kind] for kind in shares}))
    return found


def _completed(kind: str, known: Mapping[str, Sequence[float]]) -> Times:
    """The times of a type: linear between the measured sizes, without larger ones than were measured."""
    measured = sorted(map(int, known))
    sizes = [n for n in (FLOAT_SIZES if kind in FLOATS else SIZES) if n <= 16 or n in measured]
    # Most are in microseconds. The unit does not matter, but `Times` refuses seconds that no product takes.
    seconds = {n: [1e-6 * each for each in known[str(n)]] for n in measured}
    both = [np.interp(sizes, measured, [seconds[n][i] for n in measured]) for i in (0, 1)]
    return Times(sizes=tuple(sizes), kernels=tuple(both[0]), llama_cpp=tuple(both[1]))


def call_times(processor: Processor, most: Mapping[str, int | None]) -> dict[int, float]:
    """The time of a call by number of tokens, in calls of one token by llama.cpp.

    Args:
        most: for each type, the largest call that the kernels compute; None: no limit.
    """
    total: dict[int, float] = {}
    for kind, share in processor.shares.items():
        times = processor.times[kind]
        for n, time in times.with_kernels_up_to(most[kind]).items():
            total[n] = total.get(n, 0.0) + share * time / times.llama_cpp[0]
    return total


def session_time(times: Mapping[int, float], answers: Sequence[Group]) -> float:
    """Time of all answers under the adaptive policy, and of reading their prompts if that is known."""
    unit = _PLAIN_MS / 1000
    ratios = {n: time / times[1] for n, time in times.items() if n <= 64}
    pair = Pair("", costs(_PLAIN_MS * times[1], ratios), costs(_PLAIN_MS, DRAFT))
    n_prompt = sum(len(trace.prompt) for group in answers for trace in group.traces)
    prompts = n_prompt * times[512] / 512 if 512 in times else 0.0
    return prompts + sum(seconds(adaptive_calls(pair, each), pair, each) / unit for each in answers)


@dataclass(frozen=True)
class Replayed:
    """chosen: by type. gain: over plain decoding by llama.cpp. best: the highest gain of any choice."""

    chosen: Mapping[str, int | None]
    gain: float
    best: float


def replay(processor: Processor, answers: Sequence[Group]) -> Replayed:
    kinds = list(processor.shares)
    options = [(0, 4, 8, None) if kind in FLOATS else (0, None) for kind in kinds]
    chosen = {kind: most_tokens(kind, processor.times[kind]) for kind in kinds}
    theirs = call_times(processor, dict.fromkeys(kinds, 0))
    n_tokens = sum(len(trace.answer) for group in answers for trace in group.traces)
    n_prompt = sum(len(trace.prompt) for group in answers for trace in group.traces)
    plain = n_tokens * theirs[1] + (n_prompt * theirs[512] / 512 if 512 in theirs else 0.0)
    own_times = call_times(processor, chosen)
    own = session_time(own_times, answers)
    others = [
        call_times(processor, dict(zip(kinds, each, strict=True))) for each in itertools.product(*options)
    ]
    # A choice whose calls are slower, whatever their size, cannot be better.
    taken = [session_time(each, answers) for each in others if any(each[n] < own_times[n] for n in own_times)]
    return Replayed(chosen, plain / own, plain / min([own, *taken]))


def answers_of_each_kind(n: int) -> list[Group]:
    """The first recorded answers of each kind of prompt."""
    return [Group(kind, traces[:n]) for kind, traces in recorded().items()]


def print_tokens_per_call() -> None:
    for kind, traces in recorded().items():
        group = Group(kind, traces)
        calls = fixed_calls(group)
        rates = []
        for n_draft in N_DRAFT:
            steps = sum(role == "main" for role, _, _ in calls[f"draft {n_draft}"])
            rates.append(f"{group.n_tokens / steps:.2f}")
        print(f'"{kind}": (1, {", ".join(rates)}),')


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("files", type=Path, nargs="*", default=[_FILE])
    arguments.add_argument("--session", action="store_true", help="print the table of choice.py instead")
    arguments.add_argument("--answers", type=int, default=6, help="of each kind")
    options = arguments.parse_args()
    if options.session:
        return print_tokens_per_call()
    rows = []
    answers = answers_of_each_kind(options.answers)
    for processor in (each for path in options.files for each in processors(path)):
        found = replay(processor, answers)
        used = ", ".join(
            "specdec's" if most is None else f"up to {most}" if most else "llama.cpp's"
            for most in found.chosen.values()
        )
        figures = [f"{figure:.2f}" for figure in (found.gain, found.best)]
        rows.append([processor.name, *figures, f"{found.gain / found.best:.3f}", used])
    return table(["processor and model", "gain", "best", "of best", "kernels"], rows)


if __name__ == "__main__":
    main()
