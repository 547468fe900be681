"""Token recycling: after each token, what main has thought would follow it.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (arXiv
2408.08696), section 3. Main computes a row of logits for every token that it looks at, those of rejected guesses too, and of
each all but one number is thrown away. Here the best few of a row are kept, by the token that they are to follow; the
guess is a tree of successors of successors.

Two things differ from the paper. It keeps the last row of a token; here rows are averaged, the newer the more, from
nothing on: then the probability of a successor that was seen once, in another context, is low, and what is kept is the
chance that it follows, within a few percent (docs/benchmarks.md). And its tree has one shape for all texts; here the likeliest
nodes are taken, wherever they are. The tokens of a prompt, of which main gives no rows, count as if each had been certain.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from spec_local.core.language_model import Logits, common_prefix
from spec_local.core.proposal import Limit
from spec_local.lookups.base import Candidates
from spec_local.lookups.growth import likeliest

_SUCCESSORS = 8  # of a token; those beyond follow it in one case of a hundred
_NATS = 5.0  # below the largest logit; what is further down has a few percent of the probability together
_NEWS = 0.35  # weight of what main thinks now against all that it thought before
_LEAST = 0.01  # chance that a node stands: less is worth main's time on no machine

Successors = Sequence[tuple[int, float]]
"""Tokens and the chance of each, the likeliest first."""


class Recycling:
    """Guesses what main has expected after the same token before; it forgets nothing from answer to answer."""

    name = "recycling"
    listens = True

    def __init__(self) -> None:
        self._successors: dict[int, Successors] = {}
        self._history: Sequence[int] = ()

    def find(self, history: Sequence[int], limit: Limit) -> Candidates:
        """The likeliest nodes of the tree that successors span after the last token."""
        self._read(history)
        first = self._after(history[-1])
        return likeliest(first, lambda child, depth: self._after(child[0]), limit, _LEAST, self.name)

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        for token, row in zip(tokens, logits, strict=True):
            self._learn(token, _best(row))

    def _after(self, token: int) -> Successors:
        return self._successors.get(token, ())

    def _read(self, history: Sequence[int]) -> None:
        """Learn from a text that is new; of the loop's own list, which grows, main gives its logits."""
        if history is not self._history:
            known = common_prefix(self._history, history)
            for token, following in pairwise(history[max(0, known - 1) :]):
                self._learn(token, ((following, 1.0),))
            self._history = history

    def _learn(self, token: int, seen: Iterable[tuple[int, float]]) -> None:
        chances = {successor: (1.0 - _NEWS) * chance for successor, chance in self._after(token)}
        for successor, chance in seen:
            chances[successor] = chances.get(successor, 0.0) + _NEWS * chance
        self._successors[token] = heapq.nlargest(_SUCCESSORS, chances.items(), key=lambda item: item[1])


def _best(row: Logits) -> Successors:
    """The most probable tokens of logits (V,), at temperature 1; none where there are no numbers.

    Two passes at the speed of memory: sorting a whole vocabulary, or an exp of it, would take several times as long.
    """
    best = row.max()
    near = (row > best - np.float32(_NATS)).nonzero()[0]
    logits = row[near]
    probs = np.exp(logits - best)
    total = float(probs.sum())
    if len(near) > _SUCCESSORS:  # of a flat row it may be many
        kept = np.argpartition(probs, -_SUCCESSORS)[-_SUCCESSORS:]
        near, probs = near[kept], probs[kept]
    return list(zip(near.tolist(), (probs / total).tolist(), strict=True))
