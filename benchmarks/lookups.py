"""What it costs to feed and to ask the lookups, in long texts.

    python benchmarks/lookups.py

Texts of 100,000 tokens: one that never repeats, one of two tokens, one that repeats itself all the time, and one with
passages that come again, as in edited code. Times are medians, so that what disturbs a call now and then does not count.
"""

import random
import time
from collections.abc import Callable, Iterator

import numpy as np
from common import machine, note, parser, table

from spec_local.core.proposal import Limit
from spec_local.lookups import Lookup, PromptLookup, SuffixLookup

CHAIN, TREE = Limit(63, 63, 1), Limit(16, 32, 16)


def texts(n: int) -> Iterator[tuple[str, list[int]]]:
    rng = random.Random(1)
    yield "never repeats", [rng.randrange(1 << 30) for _ in range(n)]
    yield "two tokens", [rng.randrange(2) for _ in range(n)]
    yield "one token", [0] * n
    passage = [rng.randrange(50_000) for _ in range(2_000)]
    edited: list[int] = []
    while len(edited) < n:
        start = rng.randrange(1_500)
        edited += [rng.randrange(50_000) for _ in range(5)] + passage[start : start + rng.randrange(20, 400)]
    yield "passages that come again", edited[:n]


def median(work: Callable[[], object], times: int) -> float:
    """Microseconds."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return 1e6 * float(np.median(found))


def asked(lookup: Lookup, text: list[int], limit: Limit) -> float:
    """Microseconds to hear of a token more and to guess."""
    said, rng = list(text), random.Random(2)
    lookup.find(said, limit)

    def step() -> None:
        said.append(text[rng.randrange(len(text))])
        lookup.find(said, limit)

    return median(step, 300)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--n", type=int, default=100_000, help="tokens of a text")
    options = arguments.parse_args()

    rows = []
    for name, text in texts(options.n):
        note(name)
        lookup = SuffixLookup()
        started = time.perf_counter()
        lookup.find(text, CHAIN)
        fed = 1e6 * (time.perf_counter() - started) / len(text)
        chain, tree = asked(SuffixLookup(), text, CHAIN), asked(SuffixLookup(), text, TREE)
        rows.append(
            [name, f"{fed:.1f}", f"{chain:.0f}", f"{tree:.0f}", f"{asked(PromptLookup(), text, CHAIN):.0f}"]
        )
    note("")
    print(f"{options.n} tokens, microseconds, {machine()}\n")
    table(["text", "feed, a token", "ask: chain of 63", "tree of 32", "prompt lookup"], rows)


if __name__ == "__main__":
    main()
