"""What was said or read in earlier sessions, as guesses: copies from a store of texts.

As suffix decoding keeps it (Oliaro et al. 2024, arXiv 2411.04975): the places whose context agrees longest with the history's
end, and what followed there, merged into a tree and weighed by how often it did. Beside them stands the text that is just
being said again with changes (`spec_local.datastore.followed`).
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.language_model import Logits
from spec_local.core.proposal import ROOT, Limit
from spec_local.datastore.followed import Followed
from spec_local.lookups.base import Candidates

_FORGIVEN = 0.5  # weight of a place for each token that its match is shorter than the longest
_NEW = 14.0  # weight of what was never seen here, by the square of the match: measured on code, beside code
_CHANGED = (
    4 / 3
)  # weight of a change, by the match: texts are said again with changes, see `base.match_confidence`
_LEAST = 0.05  # chance of a branch; a row of main's logits costs more
_AT_ONCE = 4  # tokens of a path; changing between paths takes time
_BEYOND = 64  # tokens of a text, beyond what is guessed: after a change no search finds it
_OF_PROMPT = 512  # tokens at its end, of which what they repeat is followed into the answer
_APART = 4  # tokens from one search to the next in a prompt


class Texts(Protocol):
    """What copies come from: a `spec_local.datastore.text_store.Datastore`, or anything else that can find."""

    def find(self, history: Sequence[int], length: int) -> tuple[Sequence[int], NDArray[np.int32]]:
        """The places with the longest contexts in common with the history's end, the longest first.

        Returns:
            how many tokens of context agree at each, and what followed there, int32 (places, length), with −1 from where
            a text ended or cannot be guessed.
        """


class DatastoreLookup:
    """Candidates what followed in the texts of a store."""

    name = "cache"
    needs_logits = False

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._followed = Followed()
        self._history: Sequence[int] = ()
        self._n_read = 0

    def find(self, history: Sequence[int], limit: Limit) -> Candidates:
        self._read(history)
        matches, rows = self._search(history, limit.depth + _BEYOND)
        rows = rows[:, : limit.depth]
        match = self._followed.match
        if match and self._followed.is_changed:
            ahead = self._followed.ahead(limit.depth)
            row = np.full(limit.depth, -1, np.int32)
            row[: len(ahead)] = ahead
            place = sum(each >= match for each in matches)
            matches = [*matches[:place], match, *matches[place:]]
            rows = np.insert(rows, place, row, axis=0)
        return _tree(matches, rows, limit, self.name) if matches else Candidates(source=self.name)

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def _read(self, history: Sequence[int]) -> None:
        """Bring what is followed to the history; to see what a prompt repeats takes some searches."""
        # The loop's own list only grows; any other is another text.
        if history is not self._history or len(history) < self._n_read:
            self._history, self._followed = history, Followed()
            self._n_read = max(0, len(history) - _OF_PROMPT)
            for end in range(self._n_read, len(history)):
                if end % _APART == 0 and not self._followed.is_followed:
                    self._search(history[:end], _BEYOND)
                self._followed.said(history[end])
        else:
            for token in history[self._n_read :]:
                self._followed.said(token)
        self._n_read = len(history)

    def _search(self, history: Sequence[int], length: int) -> tuple[Sequence[int], NDArray[np.int32]]:
        """The best places, after the followed text has heard of the first of them."""
        matches, rows = self._texts.find(history, length)
        if matches:
            text = rows[0].tolist()
            self._followed.found(matches[0], text[: text.index(-1)] if -1 in text else text)
        return matches, rows


def _tree(matches: Sequence[int], followed: NDArray[np.int32], limit: Limit, source: str) -> Candidates:
    """The likeliest nodes of the trie of what followed, the likeliest first.

    A node's confidence is that of prediction by partial matching (Cleary and Witten 1984): the weight of the places that go
    on so, in that of all places and of something new, which is the less likely the longer the context is.

    Args:
        matches: tokens of context, the longest first.
        followed: see `Texts.find`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    longest = matches[0]
    weights = [_FORGIVEN ** (longest - match) for match in matches]
    # How likely something new is at a depth, as a weight.
    context = np.arange(longest, longest + limit.depth)
    new = np.maximum(_NEW / context**2, _CHANGED / context)
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
    return Candidates(tokens, parents, confidences, source)
