"""Lookup candidates from texts of earlier sessions.

As in suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), the tokens that followed at the positions with
the longest matching contexts are merged into a tree and weighted by frequency. In addition, a text that is
being repeated with changes is tracked (`spec_local.datastore.alignment`).
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Logits
from spec_local.core.proposal import EMPTY, ROOT, Limit, Proposal
from spec_local.datastore.alignment import Alignment

_DISCOUNT = 0.5  # factor on a position's weight for each token by which its match is shorter than the longest
_NOVELTY = (
    14.0  # weight of an unseen token, by the square of the match: fitted to code, from a datastore of code
)
_CHANGE = (
    4 / 3
)  # weight of a changed token, by the match: texts are repeated with changes, see `match_confidence`
_MIN_PROBABILITY = 0.05  # minimum for a branch; the logits of a less probable one cost more than it gains
_MIN_SEGMENT = 4  # minimum number of tokens added to a path at once; switching between paths takes time
_LOOKAHEAD = 64  # tokens beyond the proposal, for the alignment: after a change, no search finds them
_PROMPT_TAIL = 512  # number of tokens at the end of a prompt from which the alignment starts
_SEARCH_INTERVAL = 4  # tokens between two searches in a prompt


class Searchable(Protocol):
    """Texts that can be searched: a `spec_local.datastore.datastore.Datastore`, or a fake."""

    def find(self, history: Sequence[int], length: int) -> tuple[Sequence[int], NDArray[np.int32]]:
        """Find the positions whose contexts agree longest with the end of the history, the longest first.

        Returns:
            the number of tokens that agree at each position, and the tokens that followed there, int32
            (positions, length), with −1 from the end of the text or from a token that cannot be proposed.
        """


class DatastoreLookup:
    """Candidates from searchable texts."""

    name = "datastore"
    needs_logits = False

    def __init__(self, texts: Searchable) -> None:
        self._texts = texts
        self._alignment = Alignment()
        self._history: Sequence[int] = ()
        self._n_read = 0

    def find(self, history: Sequence[int], limit: Limit) -> Proposal:
        self._align(history)
        matches, rows = self._search(history, limit.depth + _LOOKAHEAD)
        rows = rows[:, : limit.depth]
        match = self._alignment.match
        if match and self._alignment.has_diverged:
            continuation = self._alignment.continuation(limit.depth)
            row = np.full(limit.depth, -1, np.int32)
            row[: len(continuation)] = continuation
            rank = sum(each >= match for each in matches)
            matches = [*matches[:rank], match, *matches[rank:]]
            rows = np.insert(rows, rank, row, axis=0)
        return _tree(matches, rows, limit, self.name) if matches else EMPTY

    def observe(self, tokens: Sequence[int], logits: Logits) -> None:
        pass

    def _align(self, history: Sequence[int]) -> None:
        """Update the alignment to the history; a new prompt takes several searches."""
        # The decoding loop's own list only grows; any other list is a new history.
        if history is not self._history or len(history) < self._n_read:
            self._history, self._alignment = history, Alignment()
            self._n_read = max(0, len(history) - _PROMPT_TAIL)
            for end in range(self._n_read, len(history)):
                if end % _SEARCH_INTERVAL == 0 and not self._alignment.in_sync:
                    self._search(history[:end], _LOOKAHEAD)
                self._alignment.advance(history[end])
        else:
            for token in history[self._n_read :]:
                self._alignment.advance(token)
        self._n_read = len(history)

    def _search(self, history: Sequence[int], length: int) -> tuple[Sequence[int], NDArray[np.int32]]:
        """Find the best positions, and offer the first of them to the alignment."""
        matches, rows = self._texts.find(history, length)
        if matches:
            text = rows[0].tolist()
            self._alignment.offer(matches[0], text[: text.index(-1)] if -1 in text else text)
        return matches, rows


def _tree(matches: Sequence[int], rows: NDArray[np.int32], limit: Limit, source: str) -> Proposal:
    """Merge continuations into a trie, and return its most probable nodes, the most probable first.

    Confidences are those of prediction by partial matching (Cleary and Witten 1984): the weight of the
    positions that continue with a token, divided by the weight of all positions plus that of an unseen token,
    which falls with the length of the context.

    Args:
        matches, rows: see `Searchable.find`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    longest = matches[0]
    weights = [_DISCOUNT ** (longest - match) for match in matches]
    context = np.arange(longest, longest + limit.depth)
    unseen = np.maximum(_NOVELTY / context**2, _CHANGE / context)  # weight of an unseen token, by depth
    # −probability of the path, tie-breaker, confidence of its last token, positions, weight, depth, parent
    queue: list[tuple[float, int, float, list[int], float, int, int]] = []
    counter = itertools.count()
    inner, leaves = {ROOT}, 0

    def branch(positions: list[int], depth: int, parent: int, probability: float) -> None:
        """Queue the different tokens that follow at these positions."""
        by_token: dict[int, list[int]] = {}
        for position, token in zip(positions, rows[positions, depth].tolist(), strict=True):
            by_token.setdefault(token, []).append(position)
        total = sum(weights[position] for position in positions) + unseen[depth]
        for token, group in by_token.items():
            weight = sum(weights[position] for position in group)
            if token >= 0 and probability * weight / total >= _MIN_PROBABILITY:
                entry = group, weight, depth, parent
                heapq.heappush(queue, (-probability * weight / total, next(counter), weight / total, *entry))

    branch(list(range(len(matches))), 0, ROOT, 1.0)
    while queue and len(tokens) < limit.nodes:
        negated, _, confidence, positions, weight, depth, parent = heapq.heappop(queue)
        leaves += parent in inner  # a second child adds a leaf
        if leaves > limit.branches:
            break
        inner.add(parent)
        # Add a whole segment: as long as all positions continue with the same tokens …
        ahead = rows[positions, depth:]
        same = (ahead == ahead[0]).all(axis=0) & (ahead[0] >= 0)
        n = int(same.argmin()) or len(same)
        segment = weight / (weight + unseen[depth : depth + n])
        segment[0] = confidence
        if queue:  # … and until another path is more probable
            paths = np.cumprod(segment) * (negated / confidence)
            n = min(n, max(_MIN_SEGMENT, int(np.searchsorted(paths, queue[0][0], side="right"))))
        n = min(n, limit.nodes - len(tokens))
        first = len(tokens)
        tokens += ahead[0, :n].tolist()
        parents += [parent, *range(first, first + n - 1)]
        confidences += segment[:n].tolist()
        inner.update(range(first, first + n - 1))
        if depth + n < limit.depth:
            branch(positions, depth + n, first + n - 1, -negated * float(segment[1:n].prod()))
    return Proposal(tokens, parents, source=source, confidence=confidences)
