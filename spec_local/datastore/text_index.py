"""An index of texts by context: where the end of a text stood before, found by one binary search.

A suffix array (Manber and Myers, SIAM J. Comput. 22, 1993), mirrored: places are sorted by what stands before them, read
backwards, so that the neighbours of a place are those with the most context in common, and what followed there can be
copied. It is built by doubling, with numpy, and never changes.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Ends a text; no context reaches over it, and no copy."""
_CONTEXT = 32  # tokens; a longer match foretells no more
_NEARLY = 4  # tokens; next to a longer match a shorter one says little
_WORD = np.dtype("<u4")
_BYTES = _WORD.itemsize

Words = NDArray[np.uint32]


class ContextIndex:
    """The places of some texts, sorted by the tokens before them.

    Args:
        tokens: int (n,), texts one after the other, each followed by `SEPARATOR`.
        mirrored, order: of an index that was built earlier.
    """

    def __init__(self, mirrored: bytes, order: bytes) -> None:
        # Backwards, so that the context of a place is a slice, and slices of bytes are compared at C speed. A token is one
        # higher than it is: a separator is 0. A place is the offset of its context, in words.
        self.mirrored, self.order = mirrored, order
        self._words: Words = np.frombuffer(mirrored, _WORD)
        self._places = memoryview(order).cast("I")

    @classmethod
    def of(cls, tokens: NDArray[np.integer]) -> "ContextIndex":
        """Build one: a million tokens take about half a second."""
        words = (np.asarray(tokens, np.int64)[::-1] + 1).astype(_WORD)
        return cls(words.tobytes(), _sorted_places(words).tobytes())

    @property
    def tokens(self) -> NDArray[np.int32]:
        """What it was built of, int32 (n,)."""
        return self._words[::-1].astype(np.int32) - 1

    def find(self, history: Sequence[int], most: int = 24, least: int = 3) -> list[tuple[int, int]]:
        """Places where the longest part of the history's end stood before.

        Args:
            history: tokens, none of them negative.
            most: places.
            least: tokens that must agree.

        Returns:
            for each place how many tokens before it, up to 32, are the end of the history, too; and the place. The longest
            first, none that is over 4 tokens shorter; among equal contexts of 32 tokens the latest first.
        """
        if len(history) < least or not self._places:
            return []
        end = np.array(history[: -_CONTEXT - 1 : -1], np.int64) + 1
        wanted = end.astype(_WORD).tobytes()
        number, n = int.from_bytes(wanted, "little"), len(end)

        def match(at: int) -> int:
            if not 0 <= at < len(self._places):
                return 0
            differs = number ^ int.from_bytes(self._context(self._places[at]), "little")
            return min(n, ((differs & -differs).bit_length() - 1) // (8 * _BYTES)) if differs else n

        right = bisect_left(self._places, wanted, key=self._context)
        left = right - 1
        found: list[tuple[int, int]] = []
        before, after = match(left), match(right)
        least = max(least, before - _NEARLY, after - _NEARLY)
        while len(found) < most and max(before, after) >= least:
            if after >= before:
                found.append((after, self._places[right]))
                right += 1
                after = match(right)
            else:
                found.append((before, self._places[left]))
                left -= 1
                before = match(left)
        return found

    def continuations(
        self, places: Sequence[int], length: int, n_vocab: int = 2**31 - 1
    ) -> NDArray[np.int32]:
        """What followed, int32 (places, length); from the end of its text, or a token from `n_vocab` on, `SEPARATOR`."""
        offsets = np.asarray(places, np.int64)[:, None] - np.arange(1, length + 1)
        found = self._words[np.maximum(offsets, 0)] - np.uint32(1)  # a separator is the highest of all
        found[np.logical_or.accumulate(found >= n_vocab, axis=1)] = 2**32 - 1
        copies: NDArray[np.int32] = found.view(np.int32)
        return copies

    def _context(self, place: int) -> bytes:
        return self.mirrored[place * _BYTES : (place + _CONTEXT) * _BYTES]


def _sorted_places(words: Words) -> Words:
    """Offsets of contexts, in the order of their bytes; only those that have a token before and one after."""
    n = len(words)
    if n < 2:
        return np.empty(0, _WORD)
    padded = words.tobytes() + bytes(_BYTES)
    # The order of bytes is that of numbers whose first byte is the highest: any order will do.
    key = np.ndarray(n, ">u8", padded, strides=(_BYTES,)).astype(np.uint64)
    order, width = np.argsort(key, kind="stable"), 2
    while True:
        ordered = key[order]
        rank = np.empty(n, np.uint64)
        rank[order] = np.cumsum(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        if width == _CONTEXT or rank[order[-1]] == n:
            break
        key = rank * np.uint64(n + 1)
        key[: n - width] += rank[width:]
        order = np.argsort(key, kind="stable")
        width *= 2
    ahead = np.concatenate([words[:1] * 0, words[:-1]])  # the token that follows
    places: Words = order[(words[order] != 0) & (ahead[order] != 0)].astype(_WORD)
    return places
