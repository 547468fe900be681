"""Compare specdec with llama.cpp's own speculative decoding, on the built-in prompts of `specdec bench`.

    python benchmarks/against_llama_cpp.py --llama-cpp-bin BUILD/bin --main MAIN.gguf --draft DRAFT.gguf
    --output FILE.jsonl

specdec's variants (a session) and llama.cpp's (`llama-speculative-simple`; `llama-completion` for plain
decoding) alternate. Both use the same files, prompt tokens (their number is checked), context, batch sizes,
threads, F16 caches and temperature, and no top-k, top-p or min-p. "draft K" drafts a fixed number of tokens
on both sides; specdec draws them and verifies with the block rule, llama.cpp takes the draft model's most
probable token. The draft model may be a head, which llama.cpp drafts with, too. Rates are those that each
program reports, once without and once with the time for the prompt. The last table shows how many draft
tokens were accepted. The best variant of llama.cpp is the one with the best geometric mean, chosen in
hindsight. Prompts whose results are already in FILE are not run again.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from common import chat_text, geometric_mean, interval, machine, model_options, note, table, tokens_of

from spec_local import Done, GenerationSettings, Session
from spec_local.bench import figures
from spec_local.bench.prompts import load, select
from spec_local.core.sampling import UNCHANGED

SPECDEC: Mapping[str, Mapping[str, Any]] = {
    "plain": {"proposer": "none"},
    "adaptive": {},
    "draft 3": {"proposer": "draft", "policy": "fixed", "verifier": "block", "draft_max": 3},
    "draft 7": {"proposer": "draft", "policy": "fixed", "verifier": "block", "draft_max": 7},
}
LLAMA_CPP: Mapping[str, Sequence[str]] = {
    "plain": (),
    "draft 3": ("--spec-draft-n-max", "3", "--spec-draft-p-min", "0"),
    "draft 7": ("--spec-draft-n-max", "7", "--spec-draft-p-min", "0"),
    "draft 15, p-min 0.75": ("--spec-draft-n-max", "15", "--spec-draft-p-min", "0.75"),
    "ngram-simple 12/48": ("--spec-type", "ngram-simple"),
    "ngram-simple 4/15": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "15"),
    ),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
}


_HEADS = {"eagle3", "dflash", "dspark"}  # architectures, and types of drafting of llama.cpp


@dataclass(frozen=True, slots=True)
class Outcome:
    """Number of generated tokens, seconds of prefill and after it, and numbers of draft tokens."""

    n: int
    prompt_s: float
    answer_s: float
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def rate(self) -> float:
        return self.n / self.answer_s

    @property
    def total_rate(self) -> float:
        return self.n / (self.prompt_s + self.answer_s)


def specdec(session: Session, variant: str, prompt: list[int], seed: int, options: Any) -> Outcome:
    """Generate an answer with empty KV caches, as llama.cpp's programs do."""
    for context in (session.main, session.draft):
        if context:
            context.truncate(0)
    sampling = replace(UNCHANGED, temperature=options.temperature)
    settings = GenerationSettings(sampling, seed=seed, max_tokens=options.n, **SPECDEC[variant])
    *_, last = session.generate(prompt, settings)
    assert isinstance(last, Done)
    found = last.statistics
    return Outcome(
        found.predicted_n, found.prompt_s, found.predicted_s, found.draft_n, found.draft_n_accepted
    )


def llama_cpp(session: Session, variant: str, n_prompt: int, file: Path, seed: int, options: Any) -> Outcome:
    plain = variant == "plain"
    command: list[object] = ["llama-completion", "-no-cnv"]
    if not plain:
        command = ["llama-speculative-simple", *LLAMA_CPP[variant]]
    if variant.startswith("draft"):
        assert session.draft
        kind = session.draft.model.architecture
        kind = kind if kind in _HEADS else "simple"
        command += ["-md", options.draft, "--spec-type", f"draft-{kind}", "--spec-draft-ngl", 0]
    # -b: as long as the prompt may be; -ub: tokens of one pass over the weights
    command += ["-m", options.main, "-c", session.main.n_ctx, "-b", session.main.n_ctx]
    command += [
        "-ub",
        session.main.max_tokens,
        "-t",
        options.threads,
        "-n",
        options.n,
        "-ngl",
        0,
        "-fit",
        "off",
    ]
    command += ["--top-k", 0, "--top-p", 1, "--min-p", 0, "--temp", options.temperature, "-s", seed]
    command += ["--no-escape", "-bf", file]
    child = subprocess.run(
        [options.llama_cpp_bin / str(command[0]), *map(str, command[1:])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    output = (child.stdout + child.stderr).decode("utf-8", "replace")
    if child.returncode:
        raise SystemExit(f"{command[0]} failed ({child.returncode}):\n{output[-2000:]}")

    def find(pattern: str) -> tuple[float, ...]:
        if not (match := re.search(pattern, output)):
            raise SystemExit(f"{command[0]} did not print {pattern!r}:\n{output[-2000:]}")
        return tuple(map(float, match.groups()))

    if plain:
        (prompt_ms,) = find(r"prompt eval time =\s+([\d.]+) ms")
        answer_ms, n = find(r" eval time =\s+([\d.]+) ms /\s+(\d+) runs")
        return Outcome(int(n), prompt_ms / 1e3, answer_ms / 1e3)
    n_read, prompt_s = find(r"encoded\s+(\d+) tokens in\s+([\d.]+)")
    if n_read != n_prompt:
        raise SystemExit(f"llama.cpp read {n_read:.0f} prompt tokens and specdec {n_prompt}: not comparable")
    (n,), (rate,) = find(r"n_predict = (\d+)"), find(r"decoded\s+\d+ tokens.*speed:\s+([\d.]+)")
    (n_drafted,), (n_accepted,) = find(r"n_drafted\s+= (\d+)"), find(r"n_accept\s+= (\d+)")
    return Outcome(int(n), prompt_s, n / rate, int(n_drafted), int(n_accepted))


def main() -> None:
    arguments = model_options(__doc__, draft="optional", n=128)
    arguments.add_argument("--llama-cpp-bin", type=Path, required=True, help="folder of llama.cpp's programs")
    arguments.add_argument(
        "--output", type=Path, required=True, help="JSON lines; an interrupted run resumes there"
    )
    arguments.add_argument("--per-category", type=int, default=6)
    arguments.add_argument("--category", nargs="*", default=[])
    arguments.add_argument("--specdec", nargs="*", choices=SPECDEC, default=["plain", "adaptive"])
    arguments.add_argument("--llama-cpp", nargs="*", choices=LLAMA_CPP, help="default: all")
    arguments.add_argument("--temperature", type=float, default=0.0)
    arguments.add_argument("--runs", type=int, default=1, help="runs of each variant; run N has seed N")
    options = arguments.parse_args()

    rows = (
        [json.loads(line) for line in options.output.read_text().splitlines()]
        if options.output.exists()
        else []
    )
    theirs = options.llama_cpp or [v for v in LLAMA_CPP if options.draft or not v.startswith("draft")]
    variants = [*(f"specdec {v}" for v in options.specdec), *(f"llama.cpp {v}" for v in theirs)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Session.open(options.main, options.draft, n_ctx=options.ctx, threads=options.threads) as session,
        options.output.open("a") as out,
    ):
        model = session.main.model
        file = Path(folder) / "prompt.txt"
        specdec(session, "adaptive", tokens_of(model, "Hello"), 0, options)  # the first use of all memory
        for entry in select(load(), options.category, options.per_category):
            if any(row["prompt"] == str(entry) for row in rows):
                continue
            text = chat_text(model, entry.text)
            file.write_text(text, encoding="utf-8", newline="")
            prompt = tokens_of(model, text)
            found: dict[str, list[Outcome]] = {variant: [] for variant in variants}
            for seed in range(options.runs):
                for variant in variants:
                    note(f"{entry}, run {seed + 1}/{options.runs}: {variant}")
                    program, _, name = variant.partition(" ")
                    found[variant].append(
                        specdec(session, name, prompt, seed, options)
                        if program == "specdec"
                        else llama_cpp(session, name, len(prompt), file, seed, options)
                    )
            rows.append(
                {
                    "category": entry.category,
                    "prompt": str(entry),
                    "rate": {v: median(o.rate for o in outcomes) for v, outcomes in found.items()},
                    "total_rate": {
                        v: median(o.total_rate for o in outcomes) for v, outcomes in found.items()
                    },
                    "drafted": {v: sum(o.n_drafted for o in outcomes) for v, outcomes in found.items()},
                    "accepted": {v: sum(o.n_accepted for o in outcomes) for v, outcomes in found.items()},
                }
            )
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    note("")
    print(
        f"main {options.main.name}, {len(rows)} prompts, {options.runs} runs of {options.n} tokens, "
        f"temperature {options.temperature:g}; {machine()}\n"
    )
    report(rows, "rate", "after the prompt")
    report(rows, "total_rate", "with the prompt's time")
    report_acceptance([row for row in rows if "drafted" in row])


def report_acceptance(rows: list[dict[str, Any]]) -> None:
    """Print the share of draft tokens that were accepted, of each variant that drafts."""
    cells = []
    for variant in rows[0]["drafted"] if rows else ():
        drafted, accepted = (sum(row[k].get(variant, 0) for row in rows) for k in ("drafted", "accepted"))
        if drafted:
            cells.append([variant, drafted, f"{accepted / drafted:.3f}"])
    table(["variant", "draft tokens", "accepted"], cells)


def report(rows: list[dict[str, Any]], rates: str, title: str) -> None:
    """Print the speed-ups of the variants that all rows have, over specdec's plain decoding."""
    variants = [v for v in rows[0][rates] if all(v in row[rates] for row in rows)]
    speedups = {v: [row[rates][v] / row[rates]["specdec plain"] for row in rows] for v in variants}
    cells = []
    for category in dict.fromkeys(row["category"] for row in rows):
        chosen = [i for i, row in enumerate(rows) if row["category"] == category]
        means = [geometric_mean([speedups[v][i] for i in chosen]) for v in variants]
        cells.append([category, *(f"{mean:.2f}" for mean in means)])
    cells.append(["geometric mean", *(f"{geometric_mean(speedups[v]):.2f}" for v in variants)])
    table([title, *variants], cells)
    peers = [v for v in variants if v.startswith("llama.cpp ")]
    best = max(peers, key=lambda v: geometric_mean(speedups[v]))
    pairs = {(f"specdec {v}", f"llama.cpp {v}") for v in SPECDEC} | {("specdec adaptive", best)}
    for ours, theirs in sorted(pairs):
        if ours in variants and theirs in variants:
            ratios = [a / b for a, b in zip(speedups[ours], speedups[theirs], strict=True)]
            print(f"{ours} / {theirs}: {interval(figures.geometric_mean(ratios))}")
    print()


if __name__ == "__main__":
    main()
