"""Sampling: from logits to the distribution that a token is drawn from.

The order is that of llama.cpp: logit bias, then `SAMPLERS`. A constraint comes after penalties and DRY, so
that a token that it allows is always left; the other settings apply to the logits of the allowed tokens.
This differs from llama.cpp, which first samples without the grammar and, if the grammar forbids that token,
samples again with the grammar applied first. Without settings that remove tokens, both give the same
distribution.

The same settings apply to the main model and the draft model; they give p and q.

Distributions are sparse: after top-k or top-p, a few dozen of 150,000 tokens are left, and one at
temperature 0. `align` converts several distributions to a matrix.
"""

import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from spec_local.core.constraint import Constraint
from spec_local.core.dry import Breakers, dry_penalties
from spec_local.core.rng import Rng
from spec_local.core.sampling_settings import SETTINGS, SamplingSettings
from spec_local.errors import BackendError, DeadEnd

_NOT_NUMBERS = "the model's logits are not numbers: download the model again"
_ALL_FORBIDDEN = "the logit bias forbids every token: allow at least one"
_DEAD_END = "no token may follow here: correct the grammar, or remove a logit bias that forbids what it needs"
_TESTED_FIRST = 64
"""Number of most probable tokens tested against a constraint before the whole vocabulary is tested."""
_CERTAINTY = np.ones(1)
_CERTAINTY.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse distribution over tokens.

    ids: int (n,), ascending; None: all tokens 0 … n−1.
    probs: float64 (n,), summing to 1.
    """

    ids: NDArray[np.intp] | None
    probs: NDArray[np.float64]

    @classmethod
    def certain(cls, token: int) -> "Distribution":
        """All probability on one token, as at temperature 0."""
        return cls(np.array([token]), _CERTAINTY)

    def most_probable(self) -> "Distribution":
        """All probability on the most probable token (the lowest id among equals)."""
        best = int(self.probs.argmax())
        return Distribution.certain(best if self.ids is None else int(self.ids[best]))

    def draw(self, rng: Rng, position: int | None = None) -> int:
        """Draw a token; with `Rng.choose_at` if a position is given."""
        if len(self.probs) == 1:
            return 0 if self.ids is None else int(self.ids[0])
        index = rng.choose(self.probs) if position is None else rng.choose_at(position, self.probs, self.ids)
        return index if self.ids is None else int(self.ids[index])

    def ranked(self, rng: Rng, position: int, k: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The k tokens that a similar distribution most probably draws at a position: see `Rng.rank_at`."""
        indices, probs = rng.rank_at(position, self.probs, self.ids, k)
        return (indices if self.ids is None else self.ids[indices]), probs

    def top(self, k: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """The k most probable tokens, or all if there are fewer, and their probabilities.

        In descending order; equally probable tokens in ascending order of their ids.
        """
        best = _top(self.probs, k)
        best = best[: np.count_nonzero(self.probs[best])]
        return (best if self.ids is None else self.ids[best]), self.probs[best]

    def logprob(self, token: int, n_top: int = 0) -> "TokenLogprob":
        """Log probability of a possible token, and those of the `n_top` most probable ones."""
        index = token if self.ids is None else int(self.ids.searchsorted(token))
        ids, probs = self.top(n_top)
        top = [(int(t), math.log(p)) for t, p in zip(ids, probs, strict=True)]
        return TokenLogprob(token, math.log(self.probs[index]), top)

    def without(self, tokens: Sequence[int]) -> "Distribution":
        """The distribution renormalized without these tokens; at least one other token must be possible."""
        if not tokens:
            return self
        probs = self.probs.copy()
        probs[np.asarray(tokens) if self.ids is None else self.ids.searchsorted(tokens)] = 0.0
        return Distribution(self.ids, probs / probs.sum())

    def dense(self, n_vocab: int) -> NDArray[np.float64]:
        """Probabilities of all tokens, float64 (n_vocab,)."""
        dense = np.zeros(n_vocab)
        self.fill(dense)
        return dense

    def fill(self, dense: NDArray[np.float64]) -> None:
        """Write the probabilities into an array of zeros, one for each token."""
        dense[slice(len(self.probs)) if self.ids is None else self.ids] = self.probs


class Sampler:
    """Computes the distribution of the next token, a pure function of settings, logits and history.

    Args:
        constraint: restricts the tokens that may follow.
        n_prompt: length of the prompt, which only matters if it is not to be penalized.
        breakers: the settings' sequence breakers as tokens.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        constraint: Constraint | None = None,
        *,
        n_prompt: int = 0,
        breakers: Breakers | None = None,
    ) -> None:
        self.settings, self.constraint, self._for_draft = settings, constraint, False
        self._breakers = breakers or {}
        self._first_penalized = 0 if settings.penalize_prompt else n_prompt
        self._has_penalties, self._has_dry = settings.has_penalties, settings.has_dry
        self._has_xtc = settings.has_xtc
        needs_all = any(s.needs_all and getattr(settings, s.field) != s.off for s in SETTINGS)
        is_certain = settings.is_greedy or settings.top_k == 1
        self._n_needed = 1 if is_certain else 0 if needs_all else settings.top_k
        """Number of the most probable allowed tokens on which the distribution depends; 0: all."""
        self.window = max(
            settings.penalty_window if self._has_penalties else 0,
            settings.dry_penalty_last_n if self._has_dry else 0,
        )
        """Number of last tokens on which the distribution depends."""
        if constraint or (self.window and self._first_penalized):  # both count from the start
            self.window = sys.maxsize
        self._bias_ids = np.fromiter(settings.logit_bias.keys(), np.intp)
        with np.errstate(over="ignore"):  # below the range of float32 equals -inf
            self._bias = np.array(list(settings.logit_bias.values()), np.float32)

    def for_draft(self) -> Self:
        """A sampler for draft tokens, which are verified anyway.

        It ignores the constraint where it leaves no token with a finite logit.
        """
        sampler = copy(self)
        sampler._for_draft = True
        return sampler

    def distribution(
        self,
        logits: NDArray[np.float32],
        history: Sequence[int] = (),
        tokens: NDArray[np.intp] | None = None,
    ) -> Distribution:
        """The distribution of the next token.

        Args:
            logits: float32 (V,); not changed.
            history: the preceding tokens; only the last `window` matter.
            tokens: ids of the tokens to choose from, ascending; None: all. The logits of others are not read,
                and sampling takes a fraction of the time.

        Raises:
            BackendError: the logits are not numbers, or no token is allowed.
        """
        settings = self.settings
        logits = self._adjusted(logits, history, tokens)
        ids, logits = self._possible(logits, history, self._n_needed or len(logits), tokens)
        best = int(logits.argmax())  # the index of a NaN, if there is any
        top = float(logits[best])
        _check_highest(top)
        if self._n_needed == 1:
            return Distribution.certain(best if ids is None else int(ids[best]))
        if settings.top_n_sigma > 0:
            keep = _within(logits, top, settings.top_n_sigma)
            logits, ids = logits[keep], keep if ids is None else ids[keep]
        if 0 < settings.top_k < len(logits):
            keep = np.sort(_top(logits, settings.top_k))
            logits, ids = logits[keep], keep if ids is None else ids[keep]
        if settings.top_p < 1:
            keep = _nucleus(np.exp(logits - np.float32(top)), settings.top_p)
            logits, ids = logits[keep], keep if ids is None else ids[keep]
        if (min_p := np.float32(settings.min_p)) > 0:
            keep = (logits >= np.float32(top) + np.float32(math.log(min_p))).nonzero()[0]
            logits, ids = logits[keep], keep if ids is None else ids[keep]
        probs = _softmax(logits, top, settings.temperature)
        if self._has_xtc and len(removed := _top_choices(logits, top, settings.xtc_threshold)):
            logits = logits.copy()
            logits[removed] = -np.inf
            others = _softmax(logits, float(logits.max()), settings.temperature)
            probs += settings.xtc_probability * (others - probs)
        return Distribution(ids, probs)

    def most_probable(
        self,
        logits: NDArray[np.float32],
        k: int,
        history: Sequence[int] = (),
        tokens: NDArray[np.intp] | None = None,
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """`Distribution.top` of the distribution; if it is greedy, of the one at temperature 1.

        Used for draft tokens that are ranked instead of drawn.
        """
        if not self.settings.is_greedy:
            return self.distribution(logits, history, tokens).top(k)
        logits = self._adjusted(logits, history, tokens)
        # Less probable tokens do not change the ranking of the first k.
        ids, logits = self._possible(logits, history, max(k, _TESTED_FIRST), tokens)
        top = float(logits.max())
        _check_highest(top)
        weights = np.exp(logits - np.float32(top))
        best = _top(weights, k)
        return best if ids is None else ids[best], weights[best] / weights.sum(dtype=np.float64)

    def _possible(
        self, logits: NDArray[np.float32], history: Sequence[int], n: int, tokens: NDArray[np.intp] | None
    ) -> tuple[NDArray[np.intp] | None, NDArray[np.float32]]:
        """Ids, ascending, and logits of allowed tokens: at least the n most probable, or all if there are
        fewer.

        Ids are None for all tokens. Testing the most probable tokens usually suffices, and takes a
        fraction of the time for the whole vocabulary.

        Args:
            logits: of `tokens`, which are None for all.
        """
        state = self.constraint.after(history) if self.constraint else None
        if state is None:
            return tokens, logits
        _check_highest(float(logits.max()))
        for size in (1, _TESTED_FIRST) if n == 1 else (max(2 * n, _TESTED_FIRST),):
            if size < len(logits) // 4:
                first = np.sort(_top(logits, size))
                ids = first if tokens is None else tokens[first]
                keep = state.allows(ids) & (logits[first] > -np.inf)
                if np.count_nonzero(keep) >= n:
                    return ids[keep], logits[first[keep]]
        allowed = state.allowed()
        allowed = allowed[: len(logits)] if tokens is None else allowed[tokens]
        columns = (allowed & (logits > -np.inf)).nonzero()[0]
        if len(columns):
            return columns if tokens is None else tokens[columns], logits[columns]
        if self._for_draft:
            return tokens, logits
        raise DeadEnd(_DEAD_END)

    def _adjusted(
        self, logits: NDArray[np.float32], history: Sequence[int], tokens: NDArray[np.intp] | None
    ) -> NDArray[np.float32]:
        """The logits of `tokens` (None: all) with bias, penalties and DRY."""
        settings = self.settings
        if tokens is not None:
            logits = chosen(logits, tokens)
        has_penalties, has_dry = self._has_penalties and history, self._has_dry and history
        if not (has_penalties or has_dry or len(self._bias_ids)):
            return logits
        if tokens is None:
            logits = logits.copy()
        columns, known = _columns(self._bias_ids, len(logits), tokens)
        logits[columns] += self._bias[known]
        if has_penalties:
            counts = Counter(self._recent(history, settings.penalty_window))
            ids, known = _columns(np.fromiter(counts.keys(), np.intp), len(logits), tokens)
            count = np.fromiter(counts.values(), np.float32)[known]
            values = logits[ids]
            with np.errstate(over="ignore"):  # a large negative bias becomes -inf
                values = np.where(
                    values > 0, values / settings.repeat_penalty, values * settings.repeat_penalty
                )
            logits[ids] = values - (count * settings.frequency_penalty + settings.presence_penalty)
        if has_dry:
            recent = self._recent(history, settings.dry_penalty_last_n)
            ids, penalties = dry_penalties(recent, settings, self._breakers)
            ids, known = _columns(ids, len(logits), tokens)
            with np.errstate(over="ignore"):
                logits[ids] -= penalties[known]
        return logits

    def _recent(self, history: Sequence[int], window: int) -> Sequence[int]:
        return history[max(self._first_penalized, len(history) - window) :]


def _check_highest(logit: float) -> None:
    """Raise an error if the highest logit is not a number; it is -inf only if all tokens are forbidden."""
    if not math.isfinite(logit):
        raise DeadEnd(_ALL_FORBIDDEN) if logit == -math.inf else BackendError(_NOT_NUMBERS)


def chosen(logits: NDArray[np.float32], tokens: NDArray[np.intp]) -> NDArray[np.float32]:
    """``logits[tokens]``, for ascending tokens that begin with the first ones of the vocabulary.

    Those are copied as a whole, which takes a tenth of the time.
    """
    n_first = bisect_left(range(len(tokens)), True, key=lambda i: tokens.item(i) != i)
    return np.concatenate((logits[:n_first], logits.take(tokens[n_first:])))


def _columns(
    ids: NDArray[np.intp], n: int, tokens: NDArray[np.intp] | None
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the columns of ids in n logits of `tokens` (None: all), and which of the ids have one.

    A draft model with a slightly smaller vocabulary has no logit for some tokens.
    """
    if tokens is None:
        known = ids < n
        return ids[known], known
    columns = np.minimum(tokens.searchsorted(ids), n - 1)
    known = tokens[columns] == ids
    return columns[known], known


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token: under the model alone, or after sampling settings and constraint.

    token: its id. logprob: natural logarithm of its probability. top: the most probable tokens and their
    logprobs, in descending order.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


def logprob(logits: NDArray[np.float32], token: int, n_top: int = 0) -> TokenLogprob:
    """Log probability of a token under softmax(logits), and those of the `n_top` most probable tokens."""
    top = _top(logits, n_top) if n_top else ()
    highest = float(logits.max())
    total = math.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)) + highest
    return TokenLogprob(
        token, float(logits[token]) - total, [(int(t), float(logits[t]) - total) for t in top]
    )


def align(
    distributions: Sequence[Distribution], n_vocab: int
) -> tuple[NDArray[np.float64], NDArray[np.intp] | None]:
    """Convert distributions to a matrix with a column for each token that is possible in any of them.

    Returns:
        float64 (len(distributions), n), and the token id of each column (ascending; None: column = id).
    """
    sparse = [d.ids for d in distributions if d.ids is not None]
    if len(sparse) < len(distributions):
        matrix = np.zeros((len(distributions), n_vocab))
        for probs, d in zip(matrix, distributions, strict=True):
            d.fill(probs)
        return matrix, None
    possible = np.zeros(n_vocab, bool)  # faster than sorting the ids
    for ids in sparse:
        possible[ids] = True
    columns = possible.nonzero()[0]
    matrix = np.zeros((len(distributions), len(columns)))
    for probs, ids, d in zip(matrix, sparse, distributions, strict=True):
        probs[columns.searchsorted(ids)] = d.probs
    return matrix, columns


def _softmax(logits: NDArray[np.float32], top: float, temperature: float = 1.0) -> NDArray[np.float64]:
    """softmax(logits / temperature); top: the highest logit. At temperature 0, its first token is certain."""
    if temperature == 0:
        probs = np.zeros(len(logits))
        probs[logits.argmax()] = 1.0
        return probs
    probs = np.subtract(logits, top, dtype=np.float64)
    if temperature != 1:
        with np.errstate(over="ignore"):  # overflow to −inf: a tiny temperature acts like 0
            probs /= temperature
    np.exp(probs, out=probs)
    probs /= probs.sum()
    return probs


def _within(logits: NDArray[np.float32], top: float, n: float) -> NDArray[np.intp]:
    """Indices of the logits that are at most n standard deviations below the highest one.

    Top-nσ, Tang et al. 2024, https://arxiv.org/abs/2411.07641.
    """
    deviation = logits[logits > -np.inf].std(dtype=np.float64)
    return (logits >= np.float32(top - n * deviation)).nonzero()[0]


def _top_choices(logits: NDArray[np.float32], top: float, threshold: float) -> NDArray[np.intp]:
    """Indices of the tokens that XTC ("exclude top choices") removes with its probability.

    They are those that reach the threshold, without the least probable of them.
    """
    probs = _softmax(logits, top)
    reach = ((probs.astype(np.float32) >= np.float32(threshold)) & (logits > -np.inf)).nonzero()[0]
    return reach[(-logits[reach]).argsort(kind="stable")][:-1]


def _top(weights: NDArray[np.floating], k: int) -> NDArray[np.intp]:
    """Indices of the k largest weights, largest first; the lower index first among equals.

    Sorting 150,000 entries would take longer than all other steps together. At least k entries are as large
    as the k-th largest block maximum, but few more than k: only those are sorted.
    """
    n_blocks = len(weights) // _BLOCK
    if k >= n_blocks:
        candidates = np.arange(len(weights))
    else:
        # A block is every n_blocks-th entry: NumPy finds the maxima of columns ten times as fast as of rows.
        maxima = weights[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0)
        candidates = (weights >= np.partition(maxima, n_blocks - k)[n_blocks - k]).nonzero()[0]
    return candidates[(-weights[candidates]).argsort(kind="stable")[:k]]


_BLOCK = 64


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the largest weights up to the share top_p of their sum; at least one.

    Only entries above a threshold are sorted, as in `_top`; the threshold is lowered until they suffice. The
    largest weight is 1.
    """
    wanted = top_p * float(weights.sum(dtype=np.float64))
    threshold = 0.125
    candidates = (weights >= np.float32(threshold)).nonzero()[0]
    while threshold > 0 and weights[candidates].sum(dtype=np.float64) < wanted:
        threshold = threshold / 8 if threshold > 1e-12 else 0.0
        candidates = (weights >= np.float32(threshold)).nonzero()[0]
    order = candidates[(-weights[candidates]).argsort()]
    n = int(weights[order].cumsum(dtype=np.float64).searchsorted(wanted)) + 1
    return np.sort(order[:n])
