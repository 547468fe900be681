"""Count the prompts whose first token has the same logits, however and beside whatever they are read.

    python benchmarks/prompt_invariance.py MODEL.gguf … [--prompts 20] [--kernels auto|off] [--threads N]

The built-in prompts are read in calls of one token, in larger ones, eight at a time in shared calls, and from
the prompt cache. A prompt counts if its logits have the bits of those from calls of one token; the figure in
brackets is the largest difference of a log probability.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import machine, note, parser, table
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.bench import prompts
from spec_local.core.calls import run
from spec_local.core.proposal import ROOT
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence, open_sequences
from spec_local.prompt_cache.cache import PromptCache
from spec_local.system.machine import default_threads

_SIZES = (8, 64, 65, 96, 512)
_ROWS = 8
_PART = 12  # tokens of each prompt in a shared call

Logits = list[NDArray[np.float32]]


def alone(model: Model, texts: Sequence[list[int]], size: int, options: dict[str, int]) -> Logits:
    """The logits after each prompt, read in calls of `size` tokens."""
    row, found = open_sequence(model, max_tokens=512, **options), []
    for text in texts:
        row.truncate(0)
        for start in range(0, len(text), size):
            logits = run(row.call(text[start : start + size], n_logits=1))
        found.append(logits[-1].copy())
    row.close()
    return found


def together(model: Model, texts: Sequence[list[int]], options: dict[str, int]) -> Logits:
    """The logits after each prompt, several of which are read in the same calls."""
    found = {}
    for first in range(0, len(texts), _ROWS):  # itertools.batched needs Python 3.12
        group = list(enumerate(texts))[first : first + _ROWS]
        rows = open_sequences(model, len(group), max_tokens=512, max_logits=_ROWS, **options)
        while left := [
            (i, text, row) for (i, text), row in zip(group, rows, strict=True) if len(row.cached) < len(text)
        ]:
            calls = []
            for _, text, row in left:
                part = text[len(row.cached) : len(row.cached) + _PART]
                calls.append(row.call(part, range(ROOT, len(part) - 1), 1))
            for (i, _, row), call, logits in zip(left, calls, rows[0].context.decode(calls), strict=True):
                found[i] = logits[-1].copy()
                row.commit(range(len(call.tokens)))
        for row in rows:
            row.close()
    return [found[i] for i in range(len(texts))]


def restored(model: Model, texts: Sequence[list[int]], options: dict[str, int]) -> Logits:
    """The logits after each prompt, whose beginning is in the context from a prompt cache."""
    found = []
    for text in texts:
        cache = PromptCache(1 << 30)
        row, other = (open_sequence(model, max_tokens=512, **options) for _ in range(2))
        for each in (row, other):
            each.context.saved.prompts = cache.prompts("", each.context.saved.block, "")
        run(row.call(text[:-1], n_logits=1))
        row.save()
        other.reuse(text[:-1])
        found.append(run(other.call(text[len(other.cached) :], n_logits=1))[-1].copy())
        row.close()
        other.close()
    return found


def compared(found: Logits, expected: Logits) -> str:
    """How many prompts have the same bits."""
    same = sum(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    apart = max(
        float(np.abs(a - b).max()) for a, b in zip(map(_log, found), map(_log, expected), strict=True)
    )
    return f"{same} of {len(found)}" + f" ({apart:.2g})" * (apart > 0)


def _log(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - np.logaddexp.reduce(wide)


def figures(model: Model, texts: Sequence[list[int]], options: dict[str, int]) -> list[str]:
    """The cells of a model's row of the table."""
    found = [alone(model, texts, size, options) for size in _SIZES]
    found += [together(model, texts, options), restored(model, texts, options)]
    expected = alone(model, texts, 1, options)
    return [compared(each, expected) for each in found]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--prompts", type=int, default=20)
    arguments.add_argument("--kernels", choices=kernels.MODES, default="auto")
    arguments.add_argument("--threads", type=int, default=default_threads())
    arguments.add_argument("--ctx", type=int, default=1024)
    given = arguments.parse_args()
    kernels.use(given.kernels)
    lines: list[list[object]] = []
    for path in given.models:
        model = Model(path)
        options = {"n_ctx": given.ctx, "threads": given.threads}
        texts = [model.vocabulary.tokenize(p.text, add_special=True) for p in prompts.load()[: given.prompts]]
        texts = [text[: given.ctx - 2] for text in texts]
        note(f"{path.stem}: {sum(map(len, texts))} tokens")
        lines.append([path.stem, *figures(model, texts, options)])
        model.close()
    print(f"kernels: {kernels.status()}; {machine()}\n")
    table(["model", *(f"calls of {n}" for n in _SIZES), f"{_ROWS} at a time", "restored"], lines)


if __name__ == "__main__":
    main()
