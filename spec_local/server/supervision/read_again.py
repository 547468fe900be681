"""Prompt tokens that are read again although a recent prompt had them, and where the prompts part."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec_local.core.span import text_of
from spec_local.prompt_cache.entry import n_common
from spec_local.text import counted

_LEAST = 256
"""Tokens that are worth telling; fewer are read in less than a second on slow machines."""
_BLOCK = 8
"""Tokens that count together if the earlier prompt has them in this order. Fewer are in most texts."""
_KEPT = 32
"""Prompts that are known: some conversations, and the requests that agents send beside them."""
_POSITIONS, _LOG_S, _EVICTED_LOG_S = 64, 10.0, 60.0
_BEFORE, _AFTER = 16, 24  # characters around the position that a line shows


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The tokens of a prompt and its answer, and how often each occurs."""

    tokens: NDArray[np.int32]
    values: NDArray[np.int32]
    counts: NDArray[np.intp]

    @classmethod
    def of(cls, tokens: Sequence[int] | NDArray[np.int32]) -> "KnownPrompt":
        array = np.asarray(tokens, np.int32)
        return cls(array, *np.unique(array, return_counts=True))


class ReadAgain(NamedTuple):
    """n: tokens that are read again. position: where the prompt parts from an earlier one; None: only after
    tokens that were in the cache once."""

    n: int
    position: int | None


def read_again(prompt: NDArray[np.int32], n_cached: int, recent: Sequence[KnownPrompt]) -> ReadAgain | None:
    """What a prompt has in common with the recent one that it most likely continues, but not in the cache.

    That is the one with most tokens in common, wherever they are; those at the beginning count twice.

    Args:
        n_cached: tokens at its beginning that were in the cache.
        recent: the most recent prompts.

    Returns:
        None: it is not worth telling.
    """
    if not recent or len(prompt) - n_cached < _LEAST:
        return None
    counted_prompt = KnownPrompt.of(prompt)
    prefixes = [n_common(prompt, known.tokens) for known in recent]
    scores = [n + _n_common(counted_prompt, known) for n, known in zip(prefixes, recent, strict=True)]
    best = int(np.argmax(scores))
    n_prefix = prefixes[best]
    n_evicted = max(0, n_prefix - n_cached)
    n = n_evicted + _n_in_blocks(prompt[max(n_prefix, n_cached) :], recent[best].tokens[n_prefix:])
    if n < _LEAST:
        return None
    return ReadAgain(n, None if n_evicted >= _LEAST else n_prefix)


def _n_common(prompt: KnownPrompt, known: KnownPrompt) -> int:
    """Tokens that two prompts have in common, in any order."""
    _, ours, theirs = np.intersect1d(prompt.values, known.values, assume_unique=True, return_indices=True)
    return int(np.minimum(prompt.counts[ours], known.counts[theirs]).sum())


def _n_in_blocks(tokens: NDArray[np.int32], others: NDArray[np.int32]) -> int:
    """The tokens in those blocks that the others contain at any position."""
    if min(len(tokens), len(others)) < _BLOCK:
        return 0
    known = np.sort(_hashes(others))
    blocks = _hashes(tokens)[::_BLOCK]
    at = np.minimum(np.searchsorted(known, blocks), len(known) - 1)
    return _BLOCK * int(np.count_nonzero(known[at] == blocks))


def _hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """A hash of the block that begins at each token."""
    n = len(tokens) - _BLOCK + 1
    values = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(n, np.uint64)
    for i in range(_BLOCK):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + values[i : i + n]
    return hashes


class ReadAgainLog:
    """Knows the recent prompts, and tells which of their tokens are read again, without flooding a log.

    Args:
        text: returns the text of tokens.
        log: called with lines.
        now: seconds, of a clock that is never set.
    """

    def __init__(
        self,
        text: Callable[[Sequence[int]], str],
        log: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text, self._log, self._now = text, log, now
        self._recent: deque[KnownPrompt] = deque(maxlen=_KEPT)
        self._positions: deque[int] = deque(maxlen=_POSITIONS)
        self._logged = self._evicted_logged = float("-inf")

    def add(self, tokens: Sequence[int]) -> None:
        """Know a prompt and its answer."""
        if len(tokens):
            self._recent.append(KnownPrompt.of(tokens))

    def check(self, tokens: Sequence[int], n_cached: int) -> int:
        """The number of tokens of a prompt that are read again; 0: too few to tell."""
        found = read_again(np.asarray(tokens, np.int32), n_cached, self._recent)
        if not found:
            return 0
        if self._is_news(found.position):
            why = "they were no longer in the cache"
            if found.position is not None:
                around = self._around(tokens, found.position)
                why = f"parts from an earlier prompt at token {found.position:,}: {around!r}"
            self._log(f"reads {counted(found.n, 'token', separator=',')} again: {why}")
        return found.n

    def _is_news(self, position: int | None) -> bool:
        """Return whether a line is due now: once for a position, and not many at a time."""
        now = self._now()
        if now < self._logged + _LOG_S or position in self._positions:
            return False
        if position is None:
            if now < self._evicted_logged + _EVICTED_LOG_S:
                return False
            self._evicted_logged = now
        else:
            self._positions.append(position)
        self._logged = now
        return True

    def _around(self, tokens: Sequence[int], position: int) -> str:
        before = self._text(text_of(tokens[max(0, position - _BEFORE) : position]))[-_BEFORE:]
        return f"…{before}{self._text(text_of(tokens[position : position + _AFTER]))[:_AFTER]}…"
