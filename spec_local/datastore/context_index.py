"""A static index of texts by context: one binary search finds where the end of a history occurred before.

The index is a suffix array (Manber and Myers, SIAM J. Comput. 22, 1993) of the reversed texts: positions are
sorted by the tokens before them, read backwards, so that neighbours in the array share the longest contexts.
It is built by prefix doubling in NumPy.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Marks the end of a text; no context or continuation crosses it."""
_MAX_CONTEXT = 32  # tokens; longer matches are not better predictors
_MAX_SHORTER = 4  # tokens; compared with a longer match, a much shorter one is weak evidence
_WORD = np.dtype("<u4")
_BYTES = _WORD.itemsize

Words = NDArray[np.uint32]


class ContextIndex:
    """The positions in some texts, sorted by the tokens before them.

    Args:
        reversed_words, positions: content of an index that was built earlier.
    """

    def __init__(self, reversed_words: bytes = b"", positions: bytes = b"") -> None:
        # Texts are reversed so that the context of a position is a slice; bytes are compared at C speed.
        # A word is a token plus 1; a separator is 0. A position is the offset of its context, in words.
        self.reversed_words, self.positions = reversed_words, positions
        self._words: Words = np.frombuffer(reversed_words, _WORD)
        self._positions = memoryview(positions).cast("I")

    @classmethod
    def build(cls, tokens: NDArray[np.integer]) -> "ContextIndex":
        """Index texts, int (n,), each followed by `SEPARATOR`; a million tokens take about half a second."""
        words = (np.asarray(tokens, np.int64)[::-1] + 1).astype(_WORD)
        return cls(words.tobytes(), _sorted_positions(words).tobytes())

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The indexed texts, int32 (n,), each followed by `SEPARATOR`."""
        return self._words[::-1].astype(np.int32) - 1

    def find(self, history: Sequence[int], limit: int = 24, shortest: int = 3) -> list[tuple[int, int]]:
        """Find the positions whose contexts agree longest with the end of the history.

        Args:
            history: non-negative token ids.
            limit: maximum number of positions.
            shortest: minimum number of tokens that agree.

        Returns:
            for each position, the number of tokens that agree, up to 32, and the position. The longest match
            comes first, and matches more than 4 tokens shorter are left out; of equal contexts of 32 tokens,
            the latest comes first.
        """
        if len(history) < shortest or not self._positions:
            return []
        end = np.array(history[: -_MAX_CONTEXT - 1 : -1], np.int64) + 1
        wanted = end.astype(_WORD).tobytes()
        number, n = int.from_bytes(wanted, "little"), len(end)

        def match(at: int) -> int:
            if not 0 <= at < len(self._positions):
                return 0
            differs = number ^ int.from_bytes(self._context(self._positions[at]), "little")
            return min(n, ((differs & -differs).bit_length() - 1) // (8 * _BYTES)) if differs else n

        right = bisect_left(self._positions, wanted, key=self._context)
        left = right - 1
        found: list[tuple[int, int]] = []
        before, after = match(left), match(right)
        shortest = max(shortest, before - _MAX_SHORTER, after - _MAX_SHORTER)
        while len(found) < limit and max(before, after) >= shortest:
            if after >= before:
                found.append((after, self._positions[right]))
                right += 1
                after = match(right)
            else:
                found.append((before, self._positions[left]))
                left -= 1
                before = match(left)
        return found

    def continuations(
        self, positions: Sequence[int], length: int, n_vocab: int = 2**31 - 1
    ) -> NDArray[np.int32]:
        """The tokens that follow each position, int32 (positions, length).

        Filled with `SEPARATOR` from the end of the text, or from a token that is not below `n_vocab`.
        """
        offsets = np.asarray(positions, np.int64)[:, None] - np.arange(1, length + 1)
        found = self._words[np.maximum(offsets, 0)] - np.uint32(1)  # a separator becomes the maximum
        found[np.logical_or.accumulate(found >= n_vocab, axis=1)] = 2**32 - 1
        tokens: NDArray[np.int32] = found.view(np.int32)
        return tokens

    def _context(self, position: int) -> bytes:
        return self.reversed_words[position * _BYTES : (position + _MAX_CONTEXT) * _BYTES]


def _sorted_positions(words: Words) -> Words:
    """Offsets of contexts, sorted by their bytes, for positions with a token before and one after them."""
    n = len(words)
    if n < 2:
        return np.empty(0, _WORD)
    padded = words.tobytes() + bytes(_BYTES)
    # Bytes compare like big-endian numbers. Any order would work, if `find` used the same.
    key = np.ndarray(n, ">u8", padded, strides=(_BYTES,)).astype(np.uint64)
    order, width = np.argsort(key, kind="stable"), 2
    while True:
        ordered = key[order]
        rank = np.empty(n, np.uint64)
        rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        if width == _MAX_CONTEXT or rank[order[-1]] == n:
            break
        key = rank * np.uint64(n + 1)
        key[: n - width] += rank[width:]
        order = np.argsort(key, kind="stable")
        width *= 2
    following = np.concatenate([words[:1] * 0, words[:-1]])
    positions: Words = order[(words[order] != 0) & (following[order] != 0)].astype(_WORD)
    return positions
