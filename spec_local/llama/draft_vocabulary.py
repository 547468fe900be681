"""The part of the vocabulary that a draft model drafts.

Every token that is drafted one at a time reads the whole output matrix: 28 % of what a 0.5B model with
151,936 tokens reads, 72 % of what a 270M with 262,144 does. Most of its rows are of tokens that hardly occur.
A draft may leave them out: q is zero there, and verification is lossless for every q.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

TILE = 16
"""Tokens whose rows of the output matrix are computed together (ROWS in spec_local/kernels/layout.h)."""
USUAL_FIRST = 49_152, 16_384
"""The usual numbers of first tokens that can always be drafted: see `usual_first`."""
_LEAST = 2 * USUAL_FIRST[0], 3 * USUAL_FIRST[1]  # tokens of the smallest vocabularies that they are for
_MEMORY = 64.0  # tokens after which the share of missing ones has forgotten 1 − 1/e
_MOST_MISSING = 0.08  # share of the last tokens: above, all can be drafted, until half as many are missing


def usual_first(n_vocab: int) -> int | None:
    """The usual number of first tokens that can always be drafted; None: all, of a small vocabulary.

    Of those tried, the fastest for 49,152 and 151,936 tokens, nearly for 262,144 (docs/notes/experiments.md).
    """
    return next((n for n, least in zip(USUAL_FIRST, _LEAST, strict=True) if n_vocab >= least), None)


class DraftVocabulary:
    """The tokens that one draft may draw from: the first ids, some others, and those of its text.

    The ids of a tokenizer follow the order of its merges, so that low ones are frequent. Text in another
    language than most of its training data uses others: where many of the last tokens were missing, all can
    be drafted.

    Args:
        n_vocab: number of tokens that can be drafted at all.
        n_first: of them, the ones that always can.
        others: further ones that always can, such as those that end an answer.

    Attributes:
        n_first: the same.

    Raises:
        ValueError: no token could be drafted.
    """

    def __init__(self, n_vocab: int, n_first: int, others: Iterable[int] = ()) -> None:
        if not 1 <= n_first <= n_vocab:
            raise ValueError(f"the first {n_first} of {n_vocab} tokens: give 1 to {n_vocab}")
        self._n_vocab, self.n_first = n_vocab, n_first
        self._always = np.zeros(-(-n_vocab // TILE), bool)  # by tile
        self._always[: -(-n_first // TILE)] = True
        self._always[[token // TILE for token in others]] = True
        self.restart()

    def restart(self) -> None:
        """Forget what was read."""
        self._chosen = self._always.copy()
        self._missing = 0.0  # share of the last tokens
        self._is_whole = False
        self._refresh()

    @property
    def tokens(self) -> NDArray[np.intp] | None:
        """The tokens that can be drafted, ascending; None: all."""
        return None if self._is_whole else self._tokens

    @property
    def tiles(self) -> NDArray[np.int32] | None:
        """Their tiles, ascending; None: all. Token t is in tile t // `TILE`."""
        return None if self._is_whole else self._tiles

    def read(self, tokens: Iterable[int]) -> None:
        """Add tokens that the draft model reads: those of the text, and its own."""
        chosen, is_new = self._chosen, False
        for token in tokens:
            missing = not chosen[token // TILE]
            if missing:
                chosen[token // TILE] = is_new = True
            self._missing += (missing - self._missing) / _MEMORY
        if is_new:
            self._refresh()
        self._is_whole = self._missing > (_MOST_MISSING / 2 if self._is_whole else _MOST_MISSING)

    def _refresh(self) -> None:
        self._tiles = self._chosen.nonzero()[0].astype(np.int32)
        tokens = (self._tiles[:, None] * TILE + np.arange(TILE, dtype=np.intp)).ravel()
        self._tokens: NDArray[np.intp] = tokens[: tokens.searchsorted(self._n_vocab)]
