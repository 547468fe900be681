"""Compare several answers at the same time with llama.cpp's `llama-batched-bench`.

    python benchmarks/against_batched_bench.py --llama-batched-bench BUILD/bin/llama-batched-bench --main MAIN

Both generate the same number of tokens in each row, plain, after prompts of the same length, in turns. Both
use the same threads and batch sizes, and one cache for all rows. llama.cpp's program takes random tokens for
prompts and answers; specdec answers real prompts, samples at temperature 0, and makes text of the tokens.
Rates are those of the time in which all rows generate. Each table row has the ratio of the medians.
"""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

from common import interval, machine, model_options, numbers, ratio, table, tokens_of

from spec_local import Done, Failed, GenerationSettings, SamplingSettings, Session, Text, kernels
from spec_local.bench.prompts import load

_BATCH = 512  # tokens per call, of llama.cpp's program only: it reads prompts with it


def specdec(session: Session, n_parallel: int, options: Any) -> float:
    """Tokens per second of all rows while all of them generate."""
    text = "\n\n".join(prompt.text for prompt in load())
    tokens = tokens_of(session.main.model, text)
    prompts = [tokens[i * options.n_prompt : (i + 1) * options.n_prompt] for i in range(n_parallel)]
    vocabulary = session.main.model.vocabulary
    ends = {token: -1e9 for token in range(vocabulary.n_tokens) if vocabulary.is_end(token)}
    sampling = SamplingSettings(temperature=0, logit_bias=ends)
    settings = GenerationSettings(sampling, max_tokens=options.n, proposer="none")
    started, n_tokens, rate = 0.0, 0, 0.0
    for number, event in session.generate_many(prompts, settings, n_parallel=n_parallel):
        assert not isinstance(event, Failed)
        if isinstance(event, Done):
            assert event.statistics.predicted_n == options.n
            break  # fewer rows from now on
        if isinstance(event, Text):
            n_tokens += len(event.tokens)
            if number == n_parallel - 1:  # the last one to begin, and the last one of a step
                now = time.perf_counter()
                if started:
                    rate = n_tokens / (now - started)
                else:
                    started, n_tokens = now, 0
    return rate


def llama_cpp(n_parallel: int, options: Any) -> float:
    """The same, as the program reports it in the column S_TG."""
    n_ctx = max(options.rows) * (options.n_prompt + options.n)
    command = [options.llama_batched_bench, "-m", options.main, "-c", n_ctx, "-b", _BATCH, "-ub", _BATCH]
    command += [
        "-npp",
        options.n_prompt,
        "-ntg",
        options.n,
        "-npl",
        n_parallel,
        "-t",
        options.threads,
        "-kvu",
    ]
    child = subprocess.run([*map(str, command), "-ngl", "0"], capture_output=True, text=True, check=True)
    rows = re.findall(r"^\|\s+\d+ \|.*$", child.stdout, re.MULTILINE)
    if len(rows) != 1:
        raise SystemExit(f"llama-batched-bench printed no result:\n{child.stdout[-2000:]}")
    return float(rows[0].split("|")[8])


def main() -> None:
    parser = model_options(__doc__, draft="none", n=48)
    parser.add_argument("--llama-batched-bench", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--n-prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--rows", type=numbers(int), default=[1, 2, 4, 8], help="numbers of rows")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each number of rows")
    parser.add_argument("--kernels", choices=kernels.MODES, default="auto", help="of specdec")
    options = parser.parse_args()
    kernels.use(options.kernels)
    print(f"kernels of specdec: {kernels.status()}; {machine()}\n")
    parallel = max(options.rows)
    n_ctx = options.n_prompt + options.n
    with Session.open(
        options.main,
        n_ctx=max(256, n_ctx),
        threads=options.threads,
        gpu_layers=0,
        parallel=parallel,
        prompt_cache="off",
    ) as session:
        specdec(session, parallel, options)  # warm-up
        found: list[list[object]] = []
        for n_parallel in options.rows:
            pairs = [
                (specdec(session, n_parallel, options), llama_cpp(n_parallel, options))
                for _ in range(options.rounds)
            ]
            ours, theirs = zip(*pairs, strict=True)
            medians = [f"{sorted(rates)[len(rates) // 2]:.1f}" for rates in (ours, theirs)]
            found.append([str(n_parallel), *medians, interval(ratio(ours, theirs))])
    table(["rows", "specdec, tokens/s", "llama.cpp, tokens/s", "ratio"], found)


if __name__ == "__main__":
    main()
