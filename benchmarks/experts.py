"""Measure calls of mixtures of experts with and without this project's CPU kernels.

    python benchmarks/experts.py [olmoe qwen3-30b-a3b gpt-oss-20b] [--type Q4_K_M] [--sizes 1,2,4,8,16,256]

The models have the shape of known ones, a few layers, and random weights; their files are written into
`--folder` if they are missing. Calls with and without the kernels alternate in one process. Times are
medians; the speed-up has a 95 % confidence interval. Each call has other random tokens. A random router
spreads tokens evenly over the experts: neighbouring tokens of a text share more of them.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from common import COSTS, costs, machine, note, numbers, parser, table
from kernels import open_with_and_without
from shaped_models import SHAPES, TYPES, stored

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.llama.sequence import LlamaSequence
from spec_local.system.machine import default_threads

_LOGITS = 16  # maximum number of rows of logits; those of a prompt are not needed
LAYERS = {"olmoe": 4, "qwen3-30b-a3b": 3, "gpt-oss-20b": 2}
"""As many as have about a gigabyte in 4 bits."""
_CONTEXT = 64  # tokens before those that are timed


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("shapes", nargs="*", default=list(LAYERS), help=", ".join(LAYERS))
    arguments.add_argument("--type", choices=TYPES, default="Q4_K_M", help="of the experts")
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the models")
    arguments.add_argument("--sizes", type=numbers(int), default=[1, 2, 4, 8, 16, 256])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
    for name in options.shapes:
        # gpt-oss is published in MXFP4, and its width is no multiple of a K-quant's block.
        kind = "MXFP4" if options.type == "Q4_K_M" and SHAPES[name].width % 256 else options.type
        path = stored(options.folder, name, kind, LAYERS[name])
        contexts = open_with_and_without(path, _CONTEXT + max(options.sizes), options.threads)
        kernels.use("auto")
        measure(contexts, LAYERS[name], options.sizes, options.rounds)
        for context in contexts.values():
            context.close()
            context.model.close()
    print(machine())


def measure(
    contexts: dict[kernels.Mode, LlamaSequence], n_layers: int, sizes: list[int], rounds: int
) -> None:
    rng = np.random.default_rng(0)
    before = _tokens(rng, contexts["auto"], _CONTEXT)
    for mode, context in contexts.items():
        kernels.use(mode)
        run(context.call(before, n_logits=1))
    seconds: dict[tuple[kernels.Mode, int], list[float]] = {(mode, n): [] for mode in contexts for n in sizes}
    n_read: dict[int, list[float]] = {n: [] for n in sizes}  # experts, of all rounds
    for round_ in range(-1, rounds):  # the first is the warm-up
        for n in sizes:
            tokens = _tokens(rng, contexts["auto"], n)
            for mode in kernels.MODES if round_ % 2 else kernels.MODES[::-1]:
                context = contexts[mode]
                note(f"round {round_ + 1}/{rounds}: {n} tokens, {mode}")
                kernels.use(mode)
                native = kernels.installed()
                before_call = native.experts_read if native else 0
                started = time.perf_counter()
                run(context.call(tokens, n_logits=min(n, _LOGITS)))
                took = time.perf_counter() - started
                if native:  # each expert has three matrices
                    n_read[n].append((native.experts_read - before_call) / 3 / n_layers)
                context.truncate(_CONTEXT)
                if round_ >= 0:
                    seconds[mode, n].append(took)
    note("")
    rows = []
    for n in sizes:
        experts = f"{np.mean(n_read[n]):.1f}" if n_read[n] else "unknown"
        rows.append([*costs(seconds, n, sizes[0]), experts])
    table([*COSTS, "experts read per layer"], rows)


def _tokens(rng: np.random.Generator, context: LlamaSequence, n: int) -> list[int]:
    """Random tokens, without those that end an answer."""
    tokens: list[int] = rng.integers(5, context.limits.n_vocab, n).tolist()
    return tokens


if __name__ == "__main__":
    main()
