"""Measure what keeping hidden states of three layers, as an EAGLE-3 head needs them, adds to a call.

    python benchmarks/hidden_states.py MODEL.gguf [--rounds N] [--threads N]

Two contexts of one model evaluate the same tokens in turns; the one keeps the states, the other does not.
Copying them is counted. A ratio above 1 is a slower call.
"""

import time
from pathlib import Path

from common import interval, machine, numbers, parser, ratio, table

from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_row
from spec_local.llama.row import LlamaRow
from spec_local.system.machine import default_threads


def seconds(context: LlamaRow, n: int, *, keeps: bool) -> float:
    """Time of a call of n tokens after a short history, with the copy of its states."""
    started = time.perf_counter()
    context.decode_tree(range(5, 5 + n), range(-1, n - 1))
    if keeps:
        context.states(range(n))
    took = time.perf_counter() - started
    context.commit(())
    return took


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--sizes", type=numbers(int), default=[1, 4, 8], help="tokens of a call")
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--threads", type=int, default=default_threads())
    given = options.parse_args()
    print(f"{machine()}\n")
    model = Model(given.model, gpu_layers=0)
    layers = (2, model.n_layers // 2, model.n_layers - 3)
    contexts = {
        keeps: open_row(
            model, n_ctx=512, threads=given.threads, hidden=HiddenStates(layers) if keeps else None
        )
        for keeps in (True, False)
    }
    for context in contexts.values():
        context.evaluate(range(5, 69), 0)
    rows: list[list[object]] = []
    for n in given.sizes:
        pairs = [
            [seconds(context, n, keeps=keeps) for keeps, context in contexts.items()]
            for _ in range(given.rounds + 1)
        ]
        rows.append([str(n), interval(ratio(*zip(*pairs[1:], strict=True)))])  # the first is a warm-up
    table(["tokens", "time with states / without"], rows)


if __name__ == "__main__":
    main()
