"""Measure the time to update and to query the lookups with long histories.

    python benchmarks/lookups.py

Histories of 100,000 tokens: one without repetition, one of two distinct tokens, one of a single token, and
one with repeated passages, as in edited code. Times are medians, which occasional disturbances do not affect.
"""

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
from common import machine, note, parser, table

from spec_local.core.proposal import Limit
from spec_local.lookups.base import Lookup
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.suffixes import SuffixLookup

CHAIN, TREE = Limit(63, 63, 1), Limit(16, 32, 16)


def histories(n: int) -> Iterator[tuple[str, list[int]]]:
    rng = random.Random(1)
    yield "no repetition", [rng.randrange(1 << 30) for _ in range(n)]
    yield "two distinct tokens", [rng.randrange(2) for _ in range(n)]
    yield "a single token", [0] * n
    passage = [rng.randrange(50_000) for _ in range(2_000)]
    edited: list[int] = []
    while len(edited) < n:
        start = rng.randrange(1_500)
        edited += [rng.randrange(50_000) for _ in range(5)] + passage[start : start + rng.randrange(20, 400)]
    yield "repeated passages", edited[:n]


def median(work: Callable[[], object], times: int) -> float:
    """Median microseconds."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return 1e6 * float(np.median(found))


def query(lookup: Lookup, text: list[int], limit: Limit) -> float:
    """Microseconds to add a token to the history and propose."""
    history, rng = list(text), random.Random(2)
    lookup.find(history, limit)

    def step() -> None:
        history.append(text[rng.randrange(len(text))])
        lookup.find(history, limit)

    return median(step, 300)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--n", type=int, default=100_000, help="number of tokens in a history")
    options = arguments.parse_args()

    rows = []
    for name, text in histories(options.n):
        note(name)
        lookup = SuffixLookup()
        started = time.perf_counter()
        lookup.find(text, CHAIN)
        feeding = 1e6 * (time.perf_counter() - started) / len(text)
        chain, tree = query(SuffixLookup(), text, CHAIN), query(SuffixLookup(), text, TREE)
        prompt_lookup = query(PromptLookup(), text, CHAIN)
        rows.append([name, f"{feeding:.1f}", f"{chain:.0f}", f"{tree:.0f}", f"{prompt_lookup:.0f}"])
    note("")
    print(f"{options.n} tokens, microseconds, {machine()}\n")
    table(["history", "update, per token", "query: chain of 63", "tree of 32", "prompt lookup"], rows)


if __name__ == "__main__":
    main()
