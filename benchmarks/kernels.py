"""Measure the time of calls of n tokens with and without this project's CPU kernels.

    python benchmarks/kernels.py MODEL.gguf … [--sizes 1,2,4,8,16] [--context 0] [--rounds 9]
        [--instruction-set avx2]

Each model is loaded twice, and calls with and without the kernels alternate in one process. Times are
medians; the speed-up has a 95 % confidence interval. Short calls are timed three at a time, after one that is
not timed: the first call after one of the other kernels can take twice as long as in a program that uses only
one of them. `context` tokens of a real text precede the timed tokens.

`--instruction-set` uses kernels of a lesser set than the processor has, so that a server with AVX-512 can
stand for a laptop. llama.cpp uses what it was compiled for: compile it for the same set in another
environment, and run the benchmark there; otherwise the output warns. For AVX2:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \\
        -DGGML_BMI2=ON" pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python

For AVX-VNNI, add -DGGML_AVX_VNNI=ON; for AVX-512, also -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON.
"""

import os
import statistics
import time
from pathlib import Path

from common import COSTS, costs, machine, note, numbers, parser, table

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.sequence import LlamaSequence
from spec_local.system.machine import default_threads

_TEXT = Path(__file__).parent.parent / "docs/training.md"
# Names of the instruction sets, and the features beyond them, as in llama.cpp's system information.
_SETS = {
    "avx2": ("avx2", ("AVX_VNNI", "AVX512", "AMX_INT8")),
    "avxvnni": ("avx_vnni", ("AVX512", "AMX_INT8")),
    "avx512": ("avx512_vnni", ("AMX_INT8",)),
    "neon": ("neon_dotprod", ("MATMUL_INT8", "SVE", "SME")),
    "neon_i8mm": ("neon_i8mm", ("SVE", "SME")),
}
_LONG = 64  # tokens of a call that is timed once
_LOGITS = 16  # maximum number of rows of logits; those of a prompt are not needed


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--sizes", type=numbers(int), default=[1, 2, 4, 8, 16, 32, 96, 256])
    arguments.add_argument("--context", type=int, default=0, help="tokens before those that are timed")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("--instruction-set", choices=_SETS)
    options = arguments.parse_args()
    if options.instruction_set:
        force(options.instruction_set)
    for path in options.models:
        n_ctx = options.context + max(options.sizes)
        contexts = open_with_and_without(path, n_ctx, options.threads)
        text = text_of(contexts["auto"].model, n_ctx)
        measure(contexts, text, options.sizes, options.context, options.rounds)
        for context in contexts.values():
            context.close()
            context.model.close()
    print(machine())


def open_with_and_without(path: Path, n_ctx: int, threads: int) -> dict[kernels.Mode, LlamaSequence]:
    """The model with and without the kernels; prints which they are."""
    contexts: dict[kernels.Mode, LlamaSequence] = {}
    for mode in kernels.MODES:  # kernels that are off when llama.cpp is loaded stay off
        kernels.use(mode)
        started = time.perf_counter()
        model = Model(path)
        loading = time.perf_counter() - started
        contexts[mode] = open_sequence(
            model, n_ctx=n_ctx, max_tokens=512, max_logits=_LOGITS, threads=threads
        )
        print(f"{path.name}: kernels {kernels.status()}, loaded in {loading:.1f} s", flush=True)
    return contexts


def text_of(model: Model, n: int) -> list[int]:
    """At least n tokens of a real text."""
    text = model.vocabulary.tokenize(_TEXT.read_text(), add_special=True)
    return text * (n // len(text) + 1)


def seconds_of_call(context: LlamaSequence, tokens: list[int]) -> float:
    """Seconds of reading these tokens after those that the context holds, which it then holds again.

    It is one call, or as many as a prompt of so many tokens takes.
    """
    length, took, most = len(context.cached), [], context.limits.max_tokens
    for _ in range(1 if len(tokens) >= _LONG else 4):
        started = time.perf_counter()
        for i in range(0, len(tokens), most):
            part = tokens[i : i + most]
            run(context.call(part, n_logits=min(len(part), _LOGITS)))
        took.append(time.perf_counter() - started)
        context.truncate(length)
    return statistics.median(took[-3:])


def force(instruction_set: str) -> None:
    """Use the kernels of an instruction set; warn if llama.cpp uses more.

    Raises:
        SystemExit: the kernels of that set cannot be used.
    """
    name, beyond = _SETS[instruction_set]
    os.environ[kernels.INSTRUCTION_SET] = name
    if not kernels.status().instruction_set:
        raise SystemExit(f"kernels {kernels.status()}")
    if more := [feature for feature in runtime.features() if feature in beyond]:
        print(f"not the same instruction set: llama.cpp uses {', '.join(more)}, too (see kernels.py)")


def measure(
    contexts: dict[kernels.Mode, LlamaSequence], text: list[int], sizes: list[int], length: int, rounds: int
) -> None:
    for mode, context in contexts.items():
        kernels.use(mode)
        for i in range(0, length, 512):
            run(context.call(text[i : min(i + 512, length)], n_logits=1))
    seconds: dict[tuple[kernels.Mode, int], list[float]] = {(mode, n): [] for mode in contexts for n in sizes}
    for round_ in range(-1, rounds):  # the first is the warm-up
        for n in sizes:
            for mode, context in contexts.items():
                note(f"round {round_ + 1}/{rounds}: {n} tokens, {mode}")
                kernels.use(mode)
                took = seconds_of_call(context, text[length : length + n])
                if round_ >= 0:
                    seconds[mode, n].append(took)
    note("")
    table(COSTS, [costs(seconds, n, sizes[0]) for n in sizes])


if __name__ == "__main__":
    main()
