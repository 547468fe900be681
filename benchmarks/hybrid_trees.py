"""Measure trees of draft tokens on a hybrid model, which specdec verifies with chains only.

    python benchmarks/hybrid_trees.py MODEL.gguf [--threads N] [--rounds 12] [--kernels auto|off]

Two ways are tried:

- tree: nodes are shared by the branches below them. llama.cpp evaluates each piece between two branchings
  for itself, since the branches need the state at its end, and reads the weights each time.
- parallel chains: each branch evaluates everything for itself, in one pass.

The logits of a tree are compared with those of each path alone; quantized weights enlarge differences of
rounding. Then the measured costs tell how many tokens per second parallel chains or one chain would bring if
drafting took no time. Of a partly accepted branch, the accepted tokens are evaluated again in the next step,
since no state inside it is kept. Of a single chain they are only with the rollback ``fork``.
"""

import statistics
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
from common import machine, note, parser, table

from spec_local import kernels
from spec_local.errors import BackendError
from spec_local.llama import runtime
from spec_local.llama.batch import Batch
from spec_local.llama.model import Model
from spec_local.policies.adaptive import _BY_RANK
from spec_local.policies.cost_model import CostModel
from spec_local.system import machine as processor

_HISTORY, _BRANCHES, _MAX_TOKENS = 64, 4, 32
Entry = tuple[int, int, Sequence[int]]
"""A token of a call: its id, its position, and its sequences."""
CHAINS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
TREES = {
    "2 children": (1, 1),
    "2 branches of 2": (2, 2),
    "branches of 3 and 1": (3, 1),
    "branches of 4, 2 and 1": (4, 2, 1),
}
PARALLEL = ((2, 2), (2, 4), (4, 4))
RATES = (0.3, 0.5, 0.7, 0.9)


class Cache:
    """A context in which each branch is a sequence that begins with the same state of the history."""

    def __init__(self, model: Model, threads: int) -> None:
        self._lib = lib = runtime.library()
        params = lib.llama_context_default_params()
        params.n_ctx = 1024
        params.n_batch = params.n_ubatch = params.n_outputs_max = _HISTORY
        params.n_seq_max = _BRANCHES + 1
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.handle = lib.llama_init_from_model(model.handle, params)
        self._memory, self._n_vocab = lib.llama_get_memory(self.handle), model.vocabulary.n_tokens
        self._batch = Batch(lib, _HISTORY, _BRANCHES)
        self.decode([(5 + i, i, [_BRANCHES]) for i in range(_HISTORY)])

    def decode(self, entries: Sequence[Entry]) -> float:
        """Evaluate tokens in one call; returns the seconds."""
        for i, (token, position, sequences) in enumerate(entries):
            self._batch.put(i, token, position, sequences[0], True)
            for sequence in sequences[1:]:
                self._batch.add_sequence(i, sequence)
        self._batch.native.n_tokens = len(entries)
        started = time.perf_counter()
        if code := self._lib.llama_decode(self.handle, self._batch.native):
            raise BackendError(f"llama.cpp could not evaluate {len(entries)} tokens (code {code})")
        self._lib.llama_synchronize(self.handle)
        return time.perf_counter() - started

    def row(self, i: int) -> np.ndarray:
        """The logits of token i of the last call."""
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self.handle, i), (self._n_vocab,)).copy()

    def reset(self) -> None:
        """Let all branches begin with the state of the history."""
        for sequence in range(_BRANCHES):
            self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._lib.llama_memory_seq_cp(self._memory, _BRANCHES, sequence, -1, -1)


def tree(branches: Sequence[int]) -> list[Entry]:
    """A token of the history, and below it branches of these lengths."""
    below = [(9 + 7 * s + d, s, d) for s, n in enumerate(branches) for d in range(n)]
    shared = (7, _HISTORY, list(range(len(branches))))
    return [shared, *((token, _HISTORY + 1 + d, [s]) for token, s, d in below)]


def parallel(n_branches: int, n: int) -> list[Entry]:
    """Branches of n tokens, which share none."""
    return [(7 + 7 * s + d, _HISTORY + d, [s]) for s in range(n_branches) for d in range(n)]


def difference(cache: Cache, entries: Sequence[Entry]) -> float:
    """The largest difference of a tree's logits from those of each path alone."""
    cache.reset()
    cache.decode(entries)
    rows, largest = [cache.row(i) for i in range(len(entries))], 0.0
    for i, (_, position, sequences) in enumerate(entries):
        cache.reset()
        path = [e for e in entries if sequences[0] in e[2] and e[1] <= position]
        cache.decode([(token, at, [0]) for token, at, _ in path])
        largest = max(largest, float(np.abs(cache.row(len(path) - 1) - rows[i]).max()))
    return largest


def rate(costs: CostModel, first: float, n_branches: int, n: int, fork: bool) -> float:
    """Expected tokens per second with branches of n draft tokens.

    Args:
        first: acceptance rate of the most probable token, and of all tokens after the first.
        fork: whether a chain's accepted tokens are evaluated again if others were rejected.
    """
    total = first + (1 - first) * sum(_BY_RANK[: n_branches - 1])
    # The probability that 0, 1, … draft tokens are accepted.
    shares = [
        1 - total,
        *(total * first ** (k - 1) * (1 - first) for k in range(1, n)),
        total * first ** (n - 1),
    ]
    again = [1 + k if k < n and (fork or n_branches > 1) else 0 for k in range(n + 1)]
    seconds = [costs.seconds(n_branches * (1 + n + more)) for more in again]
    return sum(p * (1 + k) for k, p in enumerate(shares)) / float(np.dot(shares, seconds))


def main() -> None:
    """Run the measurement."""
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--threads", type=int, default=processor.default_threads())
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--kernels", choices=("auto", "off"), default="auto")
    given = options.parse_args()
    kernels.use(given.kernels)
    model = Model(given.model)
    cache = Cache(model, given.threads)
    calls = {f"chain of {n}": (parallel(1, n), n) for n in CHAINS}
    calls |= {f"1 and {name}": (tree(lengths), 1 + sum(lengths)) for name, lengths in TREES.items()}
    calls |= {f"{b} parallel chains of {n}": (parallel(b, n), b * n) for b, n in PARALLEL}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i, name in product(range(given.rounds + 1), calls):
        note(f"round {i} of {given.rounds}")
        cache.reset()
        seconds[name].append(cache.decode(calls[name][0]))
    medians = {name: statistics.median(several[1:]) for name, several in seconds.items()}
    one = medians["chain of 1"]
    print(machine() + "\n")
    relative = {
        name: (n, f"{1e3 * medians[name]:.1f}", f"{medians[name] / one:.2f}")
        for name, (_, n) in calls.items()
    }
    table(
        ("tokens of a call", "number", "ms", "of one token's time"),
        [(name, *row) for name, row in relative.items()],
    )
    worst = max(difference(cache, tree(lengths)) for lengths in TREES.values())
    print(f"largest difference of a logit of a tree from that of the path alone: {worst:.1e}\n")
    costs = CostModel({n: medians[f"chain of {n}"] for n in CHAINS})
    rows = []
    for first, fork in product(RATES, (False, True)):
        chain = max((rate(costs, first, 1, n, fork), n) for n in range(1, 13))
        best = max((rate(costs, first, b, n, fork), b, n) for b in (2, 3, 4) for n in range(1, 8))
        ways = (f"chain of {chain[1]}", f"{best[1]} of {best[2]}", f"{best[0] / chain[0]:.2f}")
        rows.append((first, "fork" if fork else "kept states", *ways))
    table(("acceptance rate", "rollback of chains", "best chain", "best parallel chains", "speed"), rows)


if __name__ == "__main__":
    main()
