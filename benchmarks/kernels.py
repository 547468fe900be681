"""Measure the time of calls of n tokens with and without this project's CPU kernels.

    python benchmarks/kernels.py MODEL.gguf … [--sizes 1,2,4,8,16] [--context 0] [--rounds 9]

Each model is loaded twice, and calls with and without the kernels alternate in one process. Times are
medians; the speed-up has a 95 % confidence interval. `context` tokens of a real text precede the timed
tokens.
"""

import time
from pathlib import Path

from common import interval, machine, note, numbers, parser, ratio, table

from spec_local import kernels
from spec_local.llama.context import Context, open_context
from spec_local.llama.model import Model
from spec_local.machine import default_threads

_TEXT = Path(__file__).parent.parent / "docs/training.md"
_LOGITS = 16  # maximum number of rows of logits; those of a prompt are not needed


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--sizes", type=numbers(int), default=[1, 2, 4, 8, 16, 32, 96, 256])
    arguments.add_argument("--context", type=int, default=0, help="tokens before those that are timed")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
    for path in options.models:
        contexts: dict[kernels.Mode, Context] = {}
        for mode in kernels.MODES:  # kernels that are off when llama.cpp is loaded stay off
            kernels.use(mode)
            started = time.perf_counter()
            model = Model(path)
            loading = time.perf_counter() - started
            n_ctx = options.context + max(options.sizes)
            contexts[mode] = open_context(
                model, n_ctx=n_ctx, max_tokens=512, max_logits=_LOGITS, threads=options.threads
            )
            print(f"{path.name}: kernels {kernels.status()}, loaded in {loading:.1f} s")
        text = model.vocabulary.tokenize(_TEXT.read_text(), add_special=True)
        while len(text) < n_ctx:
            text += text
        measure(contexts, text, options.sizes, options.context, options.rounds)
        for context in contexts.values():
            context.close()
            context.model.close()
    print(machine())


def measure(
    contexts: dict[kernels.Mode, Context], text: list[int], sizes: list[int], length: int, rounds: int
) -> None:
    for mode, context in contexts.items():
        kernels.use(mode)
        for i in range(0, length, 512):
            context.evaluate(text[i : min(i + 512, length)], 1)
    seconds: dict[tuple[kernels.Mode, int], list[float]] = {(mode, n): [] for mode in contexts for n in sizes}
    for round_ in range(-1, rounds):  # the first is the warm-up
        for n in sizes:
            for mode, context in contexts.items():
                note(f"round {round_ + 1}/{rounds}: {n} tokens, {mode}")
                kernels.use(mode)
                started = time.perf_counter()
                context.evaluate(text[length : length + n], min(n, _LOGITS))
                took = time.perf_counter() - started
                context.truncate(length)
                if round_ >= 0:
                    seconds[mode, n].append(took)
    note("")
    rows = []
    for n in sizes:
        without, with_ = (ratio(seconds[mode, n], seconds[mode, sizes[0]]).value for mode in ("off", "auto"))
        speedup = interval(ratio(seconds["off", n], seconds["auto", n]))
        rows.append([str(n), f"{without:.2f}", f"{with_:.2f}", speedup])
    table(["tokens", "T(n) / T(1), without", "with", "speed-up"], rows)


if __name__ == "__main__":
    main()
