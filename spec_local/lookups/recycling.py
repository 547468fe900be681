"""Token recycling: propose what the main model predicted after the same token before.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (arXiv 2408.08696), section 3. The main model computes a row of logits for every token that it
evaluates, including rejected draft tokens, and decoding uses only one token of each row. Here, the most
probable tokens of each row are stored as successors of the token before them; the proposal is a tree of
successors of successors.

There are two differences from the paper. The paper keeps the last row of a token; here, rows are averaged
with exponential decay, starting from 0, so that a successor seen once, in another context, has a low
probability. The averages match measured frequencies within a few percent. And the paper's tree has a fixed
shape, whereas here the tree consists of the most probable nodes. Prompt tokens, which have no rows, count as
predictions with probability 1.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from spec_local.core.calls import Logits
from spec_local.core.proposal import Limit, Proposal
from spec_local.core.sequence import common_prefix
from spec_local.lookups.best_first import best_first

_SUCCESSORS = 8  # kept per token; other tokens follow in 1 % of the cases
_NATS = 5.0  # below the largest logit; lower logits have a few percent of the probability in total
_NEW_WEIGHT = 0.35  # weight of the newest row in the average
_MIN_PROBABILITY = 0.01  # minimum probability that a node is accepted: a lower one pays on no machine

Successors = Sequence[tuple[int, float]]
"""Tokens and their probabilities, the most probable first."""


class Recycling:
    """Proposes what the main model predicted after the same token before, in this answer and earlier ones.

    Args:
        others: shares what it learns with this one, for answers at the same time.
    """

    name = "recycling"
    needs_logits = True

    def __init__(self, others: "Recycling | None" = None) -> None:
        self._successors: dict[int, Successors] = others._successors if others else {}
        self._history: Sequence[int] = ()

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        """The most probable nodes of the tree of successors after the last token."""
        self._read(history)
        first = self._after(history[-1])
        return best_first(
            first, lambda child, depth: self._after(child[0]), limit, _MIN_PROBABILITY, self.name
        )

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        for token, row in zip(tokens, logits, strict=True):
            self._learn(token, _best(row))

    def _after(self, token: int) -> Successors:
        return self._successors.get(token, ())

    def _read(self, history: Sequence[int]) -> None:
        """Learn from a new text. For tokens that the decoding loop appends, `observe` receives logits."""
        if history is not self._history:
            known = common_prefix(self._history, history)
            for token, following in pairwise(history[max(0, known - 1) :]):
                self._learn(token, ((following, 1.0),))
            self._history = history

    def _learn(self, token: int, seen: Iterable[tuple[int, float]]) -> None:
        average = {successor: (1.0 - _NEW_WEIGHT) * p for successor, p in self._after(token)}
        for successor, p in seen:
            average[successor] = average.get(successor, 0.0) + _NEW_WEIGHT * p
        self._successors[token] = heapq.nlargest(_SUCCESSORS, average.items(), key=lambda item: item[1])


def _best(row: Logits) -> Successors:
    """The most probable tokens for logits (V,), at temperature 1; none if the logits are NaN.

    Takes two passes over memory: sorting the whole vocabulary, or computing its exp, would take several times
    as long.
    """
    best = row.max()
    near = (row > best - np.float32(_NATS)).nonzero()[0]
    logits = row[near]
    probs = np.exp(logits - best)
    total = float(probs.sum())
    if len(near) > _SUCCESSORS:  # a flat row has many
        kept = np.argpartition(probs, -_SUCCESSORS)[-_SUCCESSORS:]
        near, probs = near[kept], probs[kept]
    return list(zip(near.tolist(), (probs / total).tolist(), strict=True))
