"""How fast main writes what a draft learns from, against llama.cpp's own measure of parallel decoding.

    python benchmarks/production.py --main main.gguf --llama-cpp-bin llama.cpp/build/bin

Both have as many texts side by side, with prompts and answers as long as ours were in the mean; they take turns. llama-batched-bench
draws random tokens and keeps nothing; ours answers real questions, of all lengths, samples, and keeps the best candidates.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from spec_local.llama.model import Model
from spec_local.machine import default_threads
from spec_local.training import shards
from spec_local.training.production import Production
from spec_local.training.questions import question


def ours(main: Path, n_texts: int, seconds: float) -> tuple[float, float, float]:
    """Tokens a second, prompts' and answers', and the mean lengths of both."""
    model = Model(main)
    with tempfile.TemporaryDirectory() as folder:
        running = Production(
            model, Path(folder), lambda i, written: question(0, i, written), n_texts=n_texts
        ).run()
        begun = time.perf_counter()
        for _ in running:
            if time.perf_counter() - begun > seconds:
                break
        spent = time.perf_counter() - begun
        running.close()
        documents = [d for shard in shards.read(Path(folder)) for d in shard.documents]
    model.close()
    prompts = np.array([d.n_prompt for d in documents])
    answers = np.array([len(d.top_ids) for d in documents])
    return float(prompts.sum() + answers.sum()) / spent, prompts.mean(), answers.mean()


def theirs(folder: Path, main: Path, n_texts: int, n_prompt: int, n_answer: int) -> float:
    """Tokens a second of llama-batched-bench, prompts' and answers'."""
    n_ctx = n_texts * -(-(n_prompt + n_answer) // 256) * 256
    command = [folder / "llama-batched-bench", "-m", main, "-c", n_ctx, "-b", 2048, "-ub", 512]
    command += [
        "-npp",
        n_prompt,
        "-ntg",
        n_answer,
        "-npl",
        n_texts,
        "-t",
        default_threads(),
        "--output-format",
        "jsonl",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    last = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return float(last["speed"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--main", type=Path, required=True)
    parser.add_argument("--llama-cpp-bin", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="of ours, a turn")
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    ratios = []
    for run in range(args.runs):
        own, n_prompt, n_answer = ours(args.main, args.texts, args.seconds)
        other = theirs(args.llama_cpp_bin, args.main, args.texts, round(n_prompt), round(n_answer))
        ratios.append(own / other)
        print(
            f"run {run + 1}: {args.texts} texts, prompts of {n_prompt:.0f} and answers of {n_answer:.0f} tokens: "
            f"ours {own:.0f} tokens/s, llama-batched-bench {other:.0f}: {ratios[-1]:.2f}"
        )
    print(f"geometric mean {np.exp(np.log(ratios).mean()):.2f}")


if __name__ == "__main__":
    main()
