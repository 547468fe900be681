"""Measure how long a call with one token of each of several rows takes, by the length of the rows' contexts.

    python benchmarks/row_contexts.py MODEL.gguf … [--rows 1,4,8] [--contexts 0,120,500,1000] [--rounds 15]

Each row reads its own part of a real text before, so that the rows share no key. Times are the shortest of
all rounds, in milliseconds.
"""

import time
from pathlib import Path

from common import machine, note, numbers, parser, table, tokens_of

from spec_local.llama.model import Model
from spec_local.llama.open import open_rows
from spec_local.llama.row import LlamaRow
from spec_local.system.machine import default_threads

_TEXT = Path(__file__).parent.parent / "docs/training.md"
_CALL = 96  # tokens a call, when the rows read their contexts


def shortest(rows: list[LlamaRow], tokens: list[int], context: int, rounds: int) -> float:
    """Seconds of a call with one token of each row, after `context` tokens in each."""
    for i, row in enumerate(rows):
        row.truncate(0)
        start = i * context % len(tokens)
        own = (tokens[start:] + tokens * (1 + context // len(tokens)))[:context]
        for at in range(0, context, _CALL):
            row.evaluate(own[at : at + _CALL], 1)
    seconds = []
    for _ in range(rounds):
        calls = [row.call(tokens[:1], (-1,), 1) for row in rows]
        started = time.perf_counter()
        rows[0].context.decode(calls)
        seconds.append(time.perf_counter() - started)
        for row in rows:
            row.commit(())
    return min(seconds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--rows", type=numbers(int), default=[1, 4, 8])
    arguments.add_argument("--contexts", type=numbers(int), default=[0, 120, 500, 1000], help="tokens")
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--threads", type=int, default=default_threads())
    options = arguments.parse_args()
    note(machine())
    for path in options.models:
        model = Model(path)
        tokens = tokens_of(model, _TEXT.read_text())
        lines: list[list[object]] = []
        for n_rows in options.rows:
            rows = open_rows(
                model,
                n_rows,
                n_ctx=max(options.contexts) + 8,
                max_logits=n_rows,
                max_tokens=_CALL,
                max_branches=1,
                threads=options.threads,
            )
            found = [shortest(list(rows), tokens, n, options.rounds) for n in options.contexts]
            lines.append([n_rows, *(1e3 * seconds for seconds in found)])
            for row in rows:
                row.close()
        table([f"rows, {path.name}", *(f"{n} tokens each (ms)" for n in options.contexts)], lines)
        model.close()


if __name__ == "__main__":
    main()
