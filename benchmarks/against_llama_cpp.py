"""Speculative decoding with a draft model: a session against llama.cpp's own llama-speculative-simple.

    python benchmarks/against_llama_cpp.py --llama-cpp-bin BUILD/bin --main MAIN.gguf --draft DRAFT.gguf

Both sides: the same two files, prompt tokens (counted), context, batch sizes, threads, f16 caches, flash
attention left to llama.cpp, drafts of a fixed length (llama.cpp's --spec-draft-p-min 0), the same temperature, and no
top-k, top-p or min-p. llama.cpp guesses the draft's most probable token and accepts a guess when main's
sampler happens to draw it; specdec draws guesses and uses the block rule. The rates are each program's own, for what
follows the prompt. Plain rates are specdec's, and llama-completion's where that program is there.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    PROMPTS,
    chat_text,
    geometric_mean,
    interval,
    machine,
    numbers,
    parser,
    ratio,
    table,
    take_turns,
    tokens_of,
)

from spec_local import Done, GenerationSettings, SamplingSettings, Session
from spec_local.machine import default_threads


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens_per_second after the prompt; guesses and how many of them stood; tokens said; until all models had read the prompt."""

    tokens_per_second: float
    drafted: int
    accepted: int
    predicted: int
    prompt_s: float = 0.0

    @property
    def whole(self) -> float:
        """Tokens a second, the prompt's time counted."""
        return self.predicted / (self.prompt_s + self.predicted / self.tokens_per_second)


def answer(session: Session, prompt: list[int], settings: GenerationSettings) -> Outcome:
    """Of a session with empty caches: the peer starts empty as well."""
    for context in (session.main, session.draft):
        if context:
            context.truncate(0)
    *_, last = session.generate(prompt, settings)
    assert isinstance(last, Done)
    s = last.statistics
    return Outcome(s.tokens_per_second, s.draft_n, s.draft_n_accepted, s.predicted_n, s.prompt_s)


class Ours:
    def __init__(self, session: Session, options: Any) -> None:
        self._session, self._options = session, options

    def run(self, prompt: list[int], temperature: float, draft_max: int, seed: int) -> Outcome:
        settings = GenerationSettings(
            sampling=SamplingSettings(temperature=temperature),
            seed=seed,
            max_tokens=self._options.n,
            proposer="draft" if draft_max else "none",
            policy="fixed",
            verifier="block",
            draft_max=draft_max,
        )
        return answer(self._session, prompt, settings)


class Theirs:
    def __init__(self, session: Session, options: Any) -> None:
        self._options = options
        main = session.main
        self._common = [
            "-m",
            options.main,
            "-c",
            main.n_ctx,
            "-t",
            options.threads,
            "-n",
            options.n,
            "-ngl",
            0,
        ]
        # -b is as long as the prompt may be; -ub is what one pass over the weights takes
        self._common += ["-b", main.n_ctx, "-ub", main.max_tokens, "-fit", "off", "--no-escape"]
        self._common += ["--top-k", 0, "--top-p", 1, "--min-p", 0]

    def draft(self, length: int, p_min: float = 0.0) -> list[Any]:
        """Options for drafts of a fixed length by the draft model; shorter where it is less sure than p_min."""
        return [
            *("-md", self._options.draft, "--spec-type", "draft-simple", "--spec-draft-n-max", length),
            *("--spec-draft-p-min", p_min, "--spec-draft-ngl", 0),
        ]

    def run(
        self, prompt: list[int], file: Path, temperature: float, speculation: list[Any], seed: int
    ) -> Outcome:
        command = ["llama-speculative-simple", *self._common, *speculation]
        said = self._call(command, file, temperature, seed)
        read = int(_find(r"encoded\s+(\d+) tokens", said))
        if read != len(prompt):
            raise SystemExit(
                f"llama.cpp made {read} tokens of the prompt and specdec {len(prompt)}: no comparison"
            )
        return Outcome(
            float(_find(r"decoded\s+\d+ tokens.*speed:\s+([\d.]+)", said)),
            int(_find(r"n_drafted\s+= (\d+)", said)),
            int(_find(r"n_accept\s+= (\d+)", said)),
            int(_find(r"n_predict = (\d+)", said)),
            float(_find(r"encoded\s+\d+ tokens in\s+([\d.]+)", said)),
        )

    def run_plain(self, file: Path, temperature: float, seed: int) -> Outcome:
        said = self._call(["llama-completion", *self._common, "-no-cnv"], file, temperature, seed)
        match = re.search(r" eval time =\s+([\d.]+) ms /\s+(\d+) runs", said)
        if not match:
            raise SystemExit(f"no figure in what llama-completion said:\n{said[-2000:]}")
        return Outcome(int(match[2]) / float(match[1]) * 1e3, 0, 0, int(match[2]))

    def has(self, program: str) -> bool:
        return (self._options.llama_cpp_bin / program).exists()

    def _call(self, command: list[Any], file: Path, temperature: float, seed: int) -> str:
        command = [self._options.llama_cpp_bin / command[0], *command[1:]]
        command += ["-bf", file, "--temp", temperature, "-s", seed]
        child = subprocess.run(
            list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        said = (child.stdout + child.stderr).decode("utf-8", "replace")
        if child.returncode:
            raise SystemExit(f"{command[0]} failed ({child.returncode}):\n{said[-2000:]}")
        return said


def _find(pattern: str, said: str) -> str:
    match = re.search(pattern, said)
    if not match:
        raise SystemExit(f"no {pattern!r} in what llama.cpp said:\n{said[-2000:]}")
    return match[1]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--llama-cpp-bin", type=Path, required=True)
    arguments.add_argument("--main", type=Path, required=True)
    arguments.add_argument("--draft", type=Path, required=True)
    arguments.add_argument("--draft-max", type=numbers(int), default=[3, 7])
    arguments.add_argument("--temperatures", type=numbers(float), default=[0.0, 1.0])
    arguments.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=PROMPTS)
    arguments.add_argument("--n", type=int, default=128, help="tokens a run")
    arguments.add_argument(
        "--runs", type=int, default=5, help="of each way; above temperature 0 each has its own seed"
    )
    arguments.add_argument("--ctx", type=int, default=1024)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()

    with (
        tempfile.TemporaryDirectory() as folder,
        Session.open(options.main, options.draft, n_ctx=options.ctx, threads=options.threads) as session,
    ):
        print(
            f"main {options.main.name}, draft {options.draft.name}, {options.n} tokens, context {options.ctx}, "
            f"{options.threads} threads, {options.runs} runs of each; {machine()}\n"
        )
        prompts = {}
        for name in options.prompts:
            text = chat_text(session.main.model, PROMPTS[name])
            file = Path(folder) / name
            file.write_text(text, encoding="utf-8", newline="")
            prompts[name] = tokens_of(session.main.model, text), file
        for temperature in options.temperatures:
            compare(Ours(session, options), Theirs(session, options), prompts, temperature, options)


def compare(
    ours: Ours,
    theirs: Theirs,
    prompts: Mapping[str, tuple[list[int], Path]],
    temperature: float,
    options: Any,
) -> None:
    rows, ratios = [], {k: [] for k in options.draft_max}
    plain_ratios: list[float] = []
    for name, (prompt, file) in prompts.items():
        results = take_turns(
            _ways(ours, theirs, prompt, file, temperature, options.draft_max),
            options.runs,
            label=f"temperature {temperature:g}, {name}, ",
        )
        rates = {way: [o.tokens_per_second for o in outcomes] for way, outcomes in results.items()}
        plain = _median(rates["plain"])
        beside = "–"
        if "peer plain" in rates:
            figures = ratio(rates["plain"], rates["peer plain"])
            plain_ratios.append(figures[0])
            beside = interval(figures)
        theirs_plain = f"{_median(rates['peer plain']):.2f}" if "peer plain" in rates else "–"
        rows.append([name, "plain", f"{plain:.2f}", theirs_plain, beside, *[""] * 5])
        for k in options.draft_max:
            mine, peer = f"k={k}", f"peer k={k}"
            figures = ratio(rates[mine], rates[peer])
            ratios[k].append(figures[0])
            rows.append(
                [
                    name,
                    mine,
                    f"{_median(rates[mine]):.2f}",
                    f"{_median(rates[peer]):.2f}",
                    interval(figures),
                    f"{max(rates[mine]) / max(rates[peer]):.3f}",
                    _rate(results[mine]),
                    _rate(results[peer]),
                    f"{_median(rates[mine]) / plain:.2f}",
                    f"{_median(rates[peer]) / plain:.2f}",
                ]
            )
    print(f"## Temperature {temperature:g}\n")
    table(
        [
            "prompt",
            "drafts",
            "specdec, t/s",
            "llama.cpp, t/s",
            "specdec / llama.cpp [95 %]",
            "fastest / fastest",
            "accepted",
            "its accepted",
            "against plain",
            "its",
        ],
        rows,
    )
    for k, values in ratios.items():
        wanted = "≥ 0.98" if temperature == 0 else "> 1"
        print(
            f"k={k}: specdec / llama.cpp {geometric_mean(values):.3f} (geometric mean over prompts), wanted: {wanted}"
        )
    if plain_ratios:
        print(f"plain: specdec / llama-completion {geometric_mean(plain_ratios):.3f}")
    print(flush=True)


def _ways(
    ours: Ours, theirs: Theirs, prompt: list[int], file: Path, temperature: float, lengths: list[int]
) -> dict[str, Callable[[], Outcome]]:
    """What takes turns. The n-th call of each draws with seed n; the two programs' rng differ anyway."""

    def counted(run: Callable[[int], Outcome]) -> Callable[[], Outcome]:
        calls = iter(range(1, 1 << 30))
        return lambda: run(next(calls))

    ways = {"plain": counted(lambda seed: ours.run(prompt, temperature, 0, seed))}
    if theirs.has("llama-completion"):
        ways["peer plain"] = counted(lambda seed: theirs.run_plain(file, temperature, seed))
    for k in lengths:
        ways[f"k={k}"] = counted(lambda seed, k=k: ours.run(prompt, temperature, k, seed))
        ways[f"peer k={k}"] = counted(
            lambda seed, k=k: theirs.run(prompt, file, temperature, theirs.draft(k), seed)
        )
    return ways


def _median(values: list[float]) -> float:
    return (
        sorted(values)[len(values) // 2]
        if len(values) % 2
        else sum(sorted(values)[len(values) // 2 - 1 :][:2]) / 2
    )


def _rate(outcomes: list[Outcome]) -> str:
    return f"{sum(o.accepted for o in outcomes) / max(1, sum(o.drafted for o in outcomes)):.1%}"


if __name__ == "__main__":
    main()
