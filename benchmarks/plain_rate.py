"""Plain decoding: tokens a second of a session without guesses, against llama-bench's.

    python benchmarks/plain_rate.py --llama-cpp-bin BUILD/bin --model MODEL.gguf

Both evaluate --n tokens one by one after a prompt of a few tokens, temperature 0, with the same threads, flash
attention left to llama.cpp, an f16 cache of the same length, and weights repacked. llama-bench draws random tokens
and looks at no logits; everything that we do beyond that is in our time. It gets our physical batch size, which
single tokens do not use.
"""

import json
import subprocess
import sys
from pathlib import Path

from common import interval, machine, parser, ratio, table, take_turns

from spec_local import Done, GenerationSettings, SamplingSettings, Session, Text
from spec_local.machine import default_threads

PROMPT = "Once upon a time, in a village by the sea, there lived"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--llama-cpp-bin", type=Path, required=True, help="folder with llama-bench")
    arguments.add_argument("--model", type=Path, required=True)
    arguments.add_argument("--n", type=int, default=128, help="tokens a run")
    arguments.add_argument("--runs", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()

    with Session.open(options.model, n_ctx=options.n + 32, threads=options.threads) as session:
        depth = len(session.main.model.vocabulary.tokenize(PROMPT, add_special=True)) - 1
        settings = GenerationSettings(
            sampling=SamplingSettings(temperature=0), proposer="none", max_tokens=options.n
        )

        def ours() -> float:
            session.main.truncate(0)
            n = 0
            for event in session.generate(PROMPT, settings):
                if isinstance(event, Text):
                    n += len(event.tokens)
                elif isinstance(event, Done):
                    if event.statistics.predicted_n < options.n:
                        sys.exit(f"the model ended its answer after {n} tokens: give a smaller --n")
                    return event.statistics.tokens_per_second
            raise AssertionError("no last event")

        def theirs() -> float:
            command = [options.llama_cpp_bin / "llama-bench", "-m", options.model, "-n", options.n, "-p", 0]
            command += [
                "-d",
                depth,
                "-t",
                options.threads,
                "-r",
                1,
                "-o",
                "json",
                "-ub",
                session.main.max_tokens,
            ]
            answer = subprocess.run(list(map(str, command)), capture_output=True, check=True).stdout
            return float(json.loads(answer)[0]["samples_ts"][0])

        rates = take_turns({"specdec": ours, "llama-bench": theirs}, options.runs)
    print(f"{options.model.name}, {options.n} tokens, {options.threads} threads; {machine()}\n")
    table(
        ["tokens/s", "median", "lowest", "highest"],
        [
            [way, f"{sorted(r)[len(r) // 2]:.1f}", f"{min(r):.1f}", f"{max(r):.1f}"]
            for way, r in rates.items()
        ],
    )
    print(f"fastest / fastest: {max(rates['specdec']) / max(rates['llama-bench']):.3f}")
    print(f"specdec / llama-bench: {interval(ratio(rates['specdec'], rates['llama-bench']))}, wanted: ≥ 0.97")


if __name__ == "__main__":
    main()
