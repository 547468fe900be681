"""Measure whether rejected draft tokens change the logits after them.

    python benchmarks/rollback.py MODEL.gguf [--context 700] [--tokens 100] [--rounds 60]
        [--cache f32|f16] [--kernels auto|off]

A context reads a text in rounds: it evaluates a chain or a tree of the text's next tokens and wrong ones, and
commits some of the text's. Now and then, it commits wrong tokens, and truncates these and some before them.
Its logits are compared with those of a context that reads only the text, one token per call:

- difference: after chains or trees with rejected tokens
- noise: without rejected tokens, in calls of several tokens
- control: after a text in which one token, this far back, is wrong

The figures are the largest difference of any logit, as median and maximum over positions (control: minimum).
Rollback is exact if the difference is as small as the noise, and the control is much larger. With quantized
weights, the noise is large: use a model in F32.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, note, parser, table
from numpy.typing import NDArray

from spec_local import kernels
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.open import open_row
from spec_local.llama.row import LlamaRow

_TEXTS = Path(__file__).parent.parent / "docs"
_NODES = 12
"""Maximum number of tokens per draft."""
_DISTANCES = (1, 8, 64, 512)
"""Distances of the wrong token in the control."""

Rows = NDArray[np.float32]


def read(context: LlamaRow, text: list[int]) -> None:
    """Commit the tokens of the text that follow those in the context."""
    while rest := text[len(context.cached) :][: context.max_tokens]:
        context.evaluate(rest, 0)


def read_in_calls(context: LlamaRow, text: list[int], largest: int) -> Rows:
    """Read the rest of the text in calls of up to `largest` tokens; return the logits after each token."""
    rng, rows = random.Random(0), []
    while rest := text[len(context.cached) :][: rng.randint(1, largest)]:
        note(f"token {len(context.cached)} of {len(text)}")
        rows.append(context.evaluate(rest, len(rest)).copy())
    return np.concatenate(rows)


def draft(
    rng: random.Random, shape: str, right: list[int], wrong: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a chain or tree of all these tokens, and the nodes of the path `right`."""
    order = [True] * len(right) + [False] * len(wrong)
    if shape == "tree":
        rng.shuffle(order)
    path, tokens, parents = [-1], [], []
    for node, is_right in enumerate(order):
        parents.append(path[-1] if is_right else node - 1 if shape == "chain" else rng.randint(-1, node - 1))
        tokens.append(right[len(path) - 1] if is_right else wrong[node + 1 - len(path)])
        if is_right:
            path.append(node)
    return tokens, parents, path[1:]


def read_with_drafts(
    context: LlamaRow, text: list[int], first: int, shape: str, rounds: int
) -> Iterator[tuple[int, Rows]]:
    """Read the text in rounds, again and again from `first` on; yield positions and the logits after them."""
    rng = random.Random(0)

    def wrong() -> list[int]:
        return [rng.randrange(context.n_vocab) for _ in range(rng.randint(1, _NODES // 2))]

    for i in range(rounds):
        note(f"{shape} {i} of {rounds}")
        start = len(context.cached)
        if start == len(text) or i % 10 == 9:
            context.evaluate(wrong(), 0)
            start = rng.randint(first // 2, start)
            context.truncate(start)
            read(context, text[: max(start, first)])
            start = len(context.cached)
        right = text[start:][: rng.randint(0, _NODES // 2)]
        tokens, parents, path = draft(rng, shape, right, wrong())
        n = rng.randint(1, len(tokens))
        rows = [*context.decode_tree(tokens[:n], parents[:n]).copy()]
        if n < len(tokens):
            rows += [*context.decode_tree(tokens[n:], parents[n:]).copy()]
        yield from ((start + j, rows[node]) for j, node in enumerate(path))
        context.commit(path[: rng.randint(0, len(path))])


def measure(
    model: Model, text: list[int], first: int, rounds: int, **settings: Any
) -> dict[str, list[float]]:
    """Largest difference of a logit for positions from `first` on, by its cause (see above).

    Args:
        settings: of all contexts.
    """

    def new() -> LlamaRow:
        context = open_row(model, n_ctx=len(text) + 2 * _NODES, max_branches=_NODES, **settings)
        read(context, text[:first])
        return context

    plain = new()
    expected = read_in_calls(plain, text, 1)

    def apart(position: int, row: Rows) -> float:
        return float(np.abs(row - expected[position - first]).max())

    found = {}
    for shape in ("chain", "tree"):
        context = new()
        rows = read_with_drafts(context, text, first, shape, rounds)
        found[f"difference, {shape}s"] = [apart(*row) for row in rows]
        context.close()
    plain.truncate(first)
    found["noise"] = [apart(*row) for row in enumerate(read_in_calls(plain, text, _NODES), first)]
    for distance in (d for d in _DISTANCES if d <= first):
        changed = text[: first + _NODES]
        changed[first - distance] = (changed[first - distance] + 1) % model.vocabulary.n_tokens
        plain.truncate(first - distance)
        read(plain, changed[:first])
        rows = enumerate(read_in_calls(plain, changed, 1), first)
        found[f"control, {distance} before"] = [apart(*row) for row in rows]
    plain.close()
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--context", type=int, default=700, help="tokens before those that are compared")
    arguments.add_argument("--tokens", type=int, default=100, help="tokens after which logits are compared")
    arguments.add_argument("--rounds", type=int, default=60, help="rounds with chains, and with trees")
    arguments.add_argument("--cache", choices=["f32", "f16"], default="f32", help="f32: no flash attention")
    arguments.add_argument("--kernels", choices=kernels.MODES, default="auto")
    options = arguments.parse_args()
    kernels.use(options.kernels)
    if options.cache == "f32":
        lib = runtime.library()
        lib.GGML_TYPE_F16 = lib.GGML_TYPE_F32  # the library has no such option: it improves no answer
    model = Model(options.model)
    texts = "\n".join(path.read_text() for path in sorted(_TEXTS.glob("*.md")))
    text = model.vocabulary.tokenize(texts, add_special=True)[: options.context + options.tokens]
    flash_attention = None if options.cache == "f16" else False
    found = measure(model, text, options.context, options.rounds, flash_attention=flash_attention)
    print(f"{options.model.name}, cache {options.cache}, kernels: {kernels.status()}; {machine()}\n")
    table(
        ["", "positions", "median", "maximum or minimum"],
        [
            [name, len(v), float(np.median(v)), min(v) if "control" in name else max(v)]
            for name, v in found.items()
        ],
    )


if __name__ == "__main__":
    main()
