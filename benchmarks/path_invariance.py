"""Measure how much a token's output distribution depends on what shares the cache with its path.

    python benchmarks/path_invariance.py MODEL.gguf … [--steps 500] [--rows 1,8]
        [--kernels auto|off] [--threads N]

Rows evaluate random trees in shared calls, commit random paths and drop tokens at random. Each path is also
evaluated alone, as a chain, in a context of its own. The result is the largest difference of a log
probability (temperature 1) among the five most probable tokens and among all of them, and the share of
nodes with identical bits. With one row, the trees are what differs.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import machine, note, numbers, parser, table
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.core.proposal import path_to
from spec_local.core.sequence import common_prefix
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence, open_sequences
from spec_local.llama.sequence import LlamaSequence
from spec_local.system.machine import default_threads

_TEXT = Path(__file__).parent.parent / "docs/training.md"
_CONTEXT = 120  # tokens of a row: longer ones are cut to half
_NODES = 6  # at most, of a row's tree in a call of one row
_TOP = 5


class Differences:
    """The differences found so far."""

    def __init__(self) -> None:
        self.n = self.n_identical = 0
        self.top = self.all = 0.0

    def add(self, found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Compare the logits of a node in company and alone, float32 (vocabulary,)."""
        self.n += 1
        if np.array_equal(found, expected):
            self.n_identical += 1
            return
        a, b = (logits - np.logaddexp.reduce(logits.astype(np.float64)) for logits in (found, expected))
        each = np.abs(a - b)
        self.top = max(self.top, float(each[np.argpartition(expected, -_TOP)[-_TOP:]].max()))
        self.all = max(self.all, float(each.max()))


def walk(
    rows: Sequence[LlamaSequence], alone: Sequence[LlamaSequence], text: list[int], steps: int
) -> Differences:
    """Take random steps, and compare every node with its path in another context.

    Args:
        alone: a context for each row, in which its committed tokens and one path at a time are evaluated.
    """
    rng, found = random.Random(0), Differences()
    n_nodes = _NODES if len(rows) == 1 else 3
    for step in range(steps):
        note(f"step {step}")
        calls = []
        for row in rng.sample(rows, rng.randint(1, len(rows))):
            if len(row.cached) > _CONTEXT:
                row.truncate(_CONTEXT // 2)
            elif rng.random() < 0.1:
                row.truncate(rng.randint(0, len(row.cached)))
            parents = [rng.randint(max(-1, i - 3), i - 1) for i in range(rng.randint(1, n_nodes))]
            tokens = [text[len(row.cached)] if rng.random() < 0.5 else rng.choice(text) for _ in parents]
            calls.append(row.call(tokens, parents, len(tokens)))
        for call, logits in zip(calls, rows[0].context.decode(calls), strict=True):
            row = rows[list(rows).index(call.sequence)]
            logits, other = logits.copy(), alone[list(rows).index(row)]
            leaves = set(range(len(call.tokens))) - set(call.parents)
            seen = set[int]()
            for leaf in sorted(leaves):
                path = path_to(call.parents, leaf)
                other.truncate(common_prefix(other.cached, row.cached))
                missing = [*row.cached[len(other.cached) :], *(call.tokens[node] for node in path)]
                expected = run(other.call(missing, n_logits=len(path)))
                for node, row_alone in zip(path, expected, strict=True):
                    if node not in seen:
                        found.add(logits[node], row_alone)
                seen.update(path)
            row.commit(path_to(call.parents, rng.randrange(len(call.tokens))))
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--rows", type=numbers(int), default=[1, 8])
    arguments.add_argument("--kernels", choices=kernels.MODES, default="auto")
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
    kernels.use(options.kernels)
    lines: list[list[object]] = []
    for path in options.models:
        model = Model(path)
        text = model.vocabulary.tokenize(_TEXT.read_text(), add_special=True)[:1000]
        for n_parallel in options.rows:
            size = {"n_ctx": 2 * _CONTEXT, "threads": options.threads, "max_tokens": 2 * _CONTEXT}
            rows = open_sequences(model, n_parallel, max_branches=_NODES, max_logits=64, **size)
            alone = [open_sequence(model, **size) for _ in rows]
            found = walk(rows, alone, text, options.steps)
            same = f"{found.n_identical / found.n:.4%}"
            lines.append([path.stem, n_parallel, found.n, f"{found.top:.2g}", f"{found.all:.2g}", same])
            for context in (rows[0], *alone):
                context.close()
        model.close()
    print(f"kernels: {kernels.status()}; {machine()}\n")
    table(["model", "rows", "nodes", f"largest difference, top {_TOP}", "all", "identical"], lines)


if __name__ == "__main__":
    main()
