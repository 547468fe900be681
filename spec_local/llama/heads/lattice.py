"""The lattice of a DFlash2 head: the candidates for each token of a block, and scores of pairs of them.

The candidates for a draft token are the k tokens with the highest logits at its position. The selector
scores each of them after each candidate for the position before, so that the distribution of a draft token
depends on the one before it, and on no other. All scores are known before any token is drafted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Logits

_ROWS = 16  # by which the logits grow: a level of a tree rarely has more nodes


class Lattice:
    """The lattice of a block of n draft tokens.

    Args:
        rows: float32 (n, at least k + k²), llama.cpp's output, which is copied: the ids of the candidates,
            then the scores of all of them after the first candidate for the position before, after the second
            one, and so on. For the first draft token, all of these are those after the anchor.
        k: number of candidates.
    """

    def __init__(self, rows: NDArray[np.float32], k: int) -> None:
        tokens = rows[:, :k].astype(np.intp)
        order = tokens.argsort(axis=1)
        before = np.concatenate((order[:1], order[:-1]))  # the rows for the first draft token are all alike
        n = np.arange(len(rows))[:, None, None]
        scores = rows[:, k : k + k * k].reshape(-1, k, k)[n, before[:, :, None], order[:, None, :]]
        self._tokens = np.take_along_axis(tokens, order, 1)
        self._scores = np.concatenate((scores, scores.mean(axis=1, keepdims=True)), axis=1)

    def __len__(self) -> int:
        return len(self._tokens)

    def candidates(self, places: Sequence[int]) -> NDArray[np.intp]:
        """The candidates after 0, 1, … draft tokens of the block, ascending: int (len(places), k)."""
        return self._tokens[places]

    def scores(self, places: Sequence[int], last: Sequence[int]) -> NDArray[np.float32]:
        """The scores of the candidates: float32 (len(places), k).

        A token that was not a candidate is never drafted with this head, but may be given. After it, they
        are the mean of those after the candidates.

        Args:
            last: the draft token before each place; for the first place any token.
        """
        rows = [self._row(place, token) for place, token in zip(places, last, strict=True)]
        found: NDArray[np.float32] = self._scores[places, rows]
        return found

    def _row(self, place: int, token: int) -> int:
        """The row of the scores after a token."""
        if not place:
            return 0
        before = self._tokens[place - 1]
        i = int(before.searchsorted(token))
        return i if i < len(before) and before[i] == token else len(before)


class SparseRows:
    """Logits of which few are not −∞, in an array that is used again for each call.

    Args:
        n_vocab: number of columns.
    """

    def __init__(self, n_vocab: int) -> None:
        self._rows: Logits = np.empty((0, n_vocab), np.float32)
        self._used: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None

    def fill(self, tokens: NDArray[np.intp], logits: NDArray[np.float32]) -> Logits:
        """Logits of all tokens, float32 (n, n_vocab): a view, which the next call overwrites.

        Args:
            tokens: of each row, those whose logits are given: int (n, k).
            logits: float32 (n, k).
        """
        n = len(tokens)
        if n > len(self._rows):
            self._rows = np.full((-(-n // _ROWS) * _ROWS, self._rows.shape[1]), -np.inf, np.float32)
        elif self._used:
            self._rows[self._used] = -np.inf
        self._used = np.arange(n)[:, None], tokens
        self._rows[self._used] = logits
        return self._rows[:n]
