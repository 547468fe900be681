"""Measure how much a model's output distribution depends on the number of tokens per call.

    python benchmarks/batch_invariance.py MODEL.gguf … [--sizes 2,3,4,5,8] [--context 700]
        [--kernels auto|off] [--reproducible] [--threads N]

The same 40 tokens of a real text are evaluated in calls of each size. The result is the total variation
distance between the model's distributions (temperature 1) from calls of one token and from calls of n
tokens, as mean and maximum. 0 means identical bits. With --reproducible, calls are padded as by specdec's
option of that name.
"""

from pathlib import Path

import numpy as np
from common import machine, numbers, parser, table
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.reproducible import open_reproducible_sequences
from spec_local.llama.sequence import LlamaSequence

_TEXT = Path(__file__).parent.parent / "docs/training.md"
_TOKENS = 40  # a multiple of the usual sizes


def distributions(context: LlamaSequence, text: list[int], start: int, n: int) -> NDArray[np.float64]:
    """Probabilities after each token, float64 (tokens, vocabulary), from calls of n tokens."""
    rows = [
        run(context.call(part)).copy()
        for i in range(start, start + _TOKENS, n)
        if (part := text[i : min(i + n, start + _TOKENS)])
    ]
    context.truncate(start)
    logits = np.concatenate(rows).astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    normalised: NDArray[np.float64] = p / p.sum(axis=1, keepdims=True)
    return normalised


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--sizes", type=numbers(int), default=[2, 3, 4, 5, 8])
    arguments.add_argument("--context", type=int, default=700, help="tokens before those that are compared")
    arguments.add_argument("--kernels", choices=kernels.MODES, default="auto")
    arguments.add_argument("--reproducible", action="store_true")
    arguments.add_argument("--threads", type=int)
    options = arguments.parse_args()
    kernels.use(options.kernels)
    rows = []
    for path in options.models:
        model = Model(path)
        n_ctx = options.context + 2 * _TOKENS  # padding leaves less room
        if options.reproducible:
            (context,) = open_reproducible_sequences(model, 1, n_ctx=n_ctx, threads=options.threads)
        else:
            context = open_sequence(model, n_ctx=n_ctx, threads=options.threads)
        text = model.vocabulary.tokenize(_TEXT.read_text(), add_special=True)
        for i in range(0, options.context, context.limits.max_tokens):
            run(context.call(text[i : min(i + context.limits.max_tokens, options.context)], n_logits=0))
        single = distributions(context, text, options.context, 1)
        apart = [
            0.5 * np.abs(distributions(context, text, options.context, n) - single).sum(axis=1)
            for n in options.sizes
        ]
        rows.append([f"{path.stem}, mean", *(f"{each.mean():.2g}" for each in apart)])
        rows.append([f"{path.stem}, maximum", *(f"{each.max():.2g}" for each in apart)])
        context.close()
        model.close()
    print(f"kernels: {kernels.status()}; {machine()}\n")
    table(["by tokens per call", *(str(n) for n in options.sizes)], rows)


if __name__ == "__main__":
    main()
