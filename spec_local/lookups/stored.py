"""What was said or read in earlier sessions, as guesses: copies from a store of texts.

As suffix decoding keeps it (Oliaro et al. 2024, arXiv 2411.04975): the places whose context agrees longest with the history's
end, and what followed there, merged into a tree and weighed by how often it did.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.language_model import Logits
from spec_local.lookups.base import Copies
from spec_local.proposal import ROOT, Limit

_FORGIVEN = 0.5  # weight of a place for each token that its match is shorter than the longest
_NEW = 14.0  # weight of what was never seen here, by the square of the match: measured on code, beside code
_LEAST = 0.05  # chance of a branch; a row of main's logits costs more
_AT_ONCE = 4  # tokens of a path; changing between paths takes time


class Texts(Protocol):
    """What copies come from: a `spec_local.text_store.TextStore`, or anything else that can find."""

    def find(self, history: Sequence[int], length: int) -> tuple[Sequence[int], NDArray[np.int32]]:
        """The places with the longest contexts in common with the history's end, the longest first.

        Returns:
            how many tokens of context agree at each, and what followed there, int32 (places, length), with −1 from where
            a text ended or cannot be guessed.
        """


class Stored:
    """Copies what followed in the texts of a store."""

    name = "cache"

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def find(self, history: Sequence[int], limit: Limit) -> Copies:
        matches, followed = self._texts.find(history, limit.depth)
        return _tree(matches, followed, limit, self.name) if matches else Copies(source=self.name)

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass


def _tree(matches: Sequence[int], followed: NDArray[np.int32], limit: Limit, source: str) -> Copies:
    """The likeliest nodes of the trie of what followed, the likeliest first.

    A node's confidence is that of prediction by partial matching (Cleary and Witten 1984): the weight of the places that go
    on so, in that of all places and of something new, which is the less likely the longer the context is.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    longest = matches[0]
    weights = [_FORGIVEN ** (longest - match) for match in matches]
    # How likely something new is at a depth, as a weight.
    new = _NEW / np.arange(longest, longest + limit.depth) ** 2
    # −chance of the whole path, number, confidence of the first token, places that go on so, their weight, depth, parent
    waiting: list[tuple[float, int, float, list[int], float, int, int]] = []
    numbers = itertools.count()
    inner, leaves = {ROOT}, 0

    def branch(places: list[int], depth: int, parent: int, chance: float) -> None:
        going: dict[int, list[int]] = {}
        for place, token in zip(places, followed[places, depth].tolist(), strict=True):
            going.setdefault(token, []).append(place)
        total = sum(weights[place] for place in places) + new[depth]
        for token, alike in going.items():
            weight = sum(weights[place] for place in alike)
            if token >= 0 and chance * weight / total >= _LEAST:
                entry = alike, weight, depth, parent
                heapq.heappush(waiting, (-chance * weight / total, next(numbers), weight / total, *entry))

    branch(list(range(len(matches))), 0, ROOT, 1.0)
    while waiting and len(tokens) < limit.nodes:
        chance, _, confidence, places, weight, depth, parent = heapq.heappop(waiting)
        leaves += parent in inner  # another child is another end of a path
        if leaves > limit.branches:
            break
        inner.add(parent)
        # As long as all of them go on alike, it is a slice.
        ahead = followed[places, depth:]
        alike = (ahead == ahead[0]).all(axis=0) & (ahead[0] >= 0)
        n = int(alike.argmin()) or len(alike)
        sure = weight / (weight + new[depth : depth + n])
        sure[0] = confidence
        if waiting:  # or until something else is likelier
            paths = np.cumprod(sure) * (chance / confidence)
            n = min(n, max(_AT_ONCE, int(np.searchsorted(paths, waiting[0][0], side="right"))))
        n = min(n, limit.nodes - len(tokens))
        first = len(tokens)
        tokens += ahead[0, :n].tolist()
        parents += [parent, *range(first, first + n - 1)]
        confidences += sure[:n].tolist()
        inner.update(range(first, first + n - 1))
        if depth + n < limit.depth:
            branch(places, depth + n, first + n - 1, -chance * float(sure[1:n].prod()))
    return Copies(tokens, parents, confidences, source)
