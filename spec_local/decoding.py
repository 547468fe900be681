"""The decoding loop: propose, evaluate, verify, commit.

It knows token ids only. Every step starts and ends in the same state: `history` is what has been said,
main's cache holds all of it but the last token, and the proposer's holds a prefix of it.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from spec_local.dice import Dice
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.language_model import LanguageModel, prefill
from spec_local.proposers.base import Proposal, Proposer
from spec_local.sampling import Distribution, Sampler, align
from spec_local.verifiers import Verifier, verify_block

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(slots=True)
class Statistics:
    """What a generation took. Seconds are the loop's own: a slow reader of its events does not count."""

    prompt_n: int = 0
    """Tokens of the prompt that main had to evaluate before the first step."""
    cached_n: int = 0
    """Tokens of the prompt that main's cache held already."""
    prompt_s: float = 0.0
    """Until main and draft had read the prompt."""
    first_token_s: float = 0.0
    """Until the first token."""
    predicted_n: int = 0
    """Tokens said, the one that ends the answer included."""
    predicted_s: float = 0.0
    """From the end of the prompt to the last token."""
    n_steps: int = 0
    """Calls of main after the prompt."""
    draft_n: int = 0
    """Tokens guessed and tested."""
    draft_n_accepted: int = 0
    tested_at: list[int] = field(default_factory=list)
    """How often a guess stood at position 1, 2, … of its draft."""
    accepted_at: list[int] = field(default_factory=list)
    """How often it was accepted there."""
    profile: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by part of the work, over all steps."""

    @property
    def tokens_per_second(self) -> float:
        return self.predicted_n / self.predicted_s if self.predicted_s else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.predicted_n / self.n_steps if self.n_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    def _count_step(self, n_said: int, n_drafted: int, n_accepted: int) -> None:
        self.n_steps += 1
        self.predicted_n += n_said
        self.draft_n += n_drafted
        self.draft_n_accepted += n_accepted
        for counts, n in ((self.tested_at, n_drafted), (self.accepted_at, n_accepted)):
            counts.extend([0] * (n_drafted - len(counts)))
            for position in range(n):
                counts[position] += 1


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been read."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Step:
    """One call of main: the accepted guesses, then one token of main's own.

    tokens: what was said. drafted: what had been guessed. n_accepted: the first so many of `tokens`
    were guesses.
    """

    tokens: Sequence[int]
    drafted: Sequence[int]
    n_accepted: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event: ``stop`` (an end token), ``length``, ``context`` (full) or ``cancelled``."""

    reason: FinishReason
    statistics: Statistics


Event = Prefilled | Step | Finished


def decode(
    main: LanguageModel,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    dice: Dice,
    proposer: Proposer | None = None,
    verifier: Verifier = verify_block,
    draft_max: int = 4,
    max_tokens: int | None = None,
    is_end: Callable[[int], bool] = lambda token: False,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Event]:
    """Continue a prompt with exactly main's distribution.

    Args:
        main: its cache may hold anything; a prefix that it shares with the prompt is reused.
        prompt: token ids, at least one.
        sampler: shapes main's logits (and, in the proposer, the draft's).
        dice: decides everything that is left to chance.
        proposer: None for plain decoding.
        draft_max: most tokens to guess a step.
        max_tokens: most tokens to say; None: until an end token or the end of the context.
        is_end: whether a token ends the answer; it is said, and nothing after it.
        cancelled: asked between calls of main; True ends the answer there.

    Yields:
        one `Prefilled`, a `Step` per call of main, one `Finished`. Closing the iterator early is fine:
        both caches then hold only what was said.

    Raises:
        InvalidRequest: the prompt is empty, or a number is out of range.
        ContextOverflow: the prompt does not fit (before anything is evaluated).
        BackendError: a model failed; the caches hold a prefix of what was said.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty: give some text")
    if len(prompt) > main.n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and the context {main.n_ctx}: shorten it or give a larger --ctx"
        )
    if draft_max < 0 or (max_tokens is not None and max_tokens < 0):
        raise InvalidRequest("numbers of tokens must not be negative")
    row = _Row(main, proposer if draft_max else None, sampler, verifier, dice, list(prompt), clock)
    return _events(row, draft_max, max_tokens, is_end, cancelled)


def _events(
    row: "_Row",
    draft_max: int,
    max_tokens: int | None,
    is_end: Callable[[int], bool],
    cancelled: Callable[[], bool],
) -> Iterator[Event]:
    statistics = row.statistics
    reason: FinishReason | None = None
    try:
        for _ in row.read_prompt():
            if cancelled():
                reason = "cancelled"
                break
        else:
            yield Prefilled(statistics)
        while reason is None:
            left = sys.maxsize if max_tokens is None else max_tokens - statistics.predicted_n
            if left <= 0:
                reason = "length"
            elif len(row.history) > row.main.n_ctx:
                reason = "context"
            elif cancelled():
                reason = "cancelled"
            else:
                step = row.step(min(draft_max, left - 1), is_end)
                if is_end(step.tokens[-1]):
                    reason = "stop"
                yield step
        yield Finished(reason, statistics)
    finally:
        row.roll_back()


class _Row:
    """One generation: what has been said, and all that says the next part of it."""

    def __init__(
        self,
        main: LanguageModel,
        proposer: Proposer | None,
        sampler: Sampler,
        verifier: Verifier,
        dice: Dice,
        history: list[int],
        clock: Callable[[], float],
    ) -> None:
        self.main = main
        self.history = history
        self.statistics = Statistics()
        self._proposer = proposer
        self._sampler = sampler
        self._verifier = verifier
        self._dice = dice
        self._clock = clock
        self._lap_started = 0.0

    def read_prompt(self) -> Iterator[None]:
        """Bring both caches to the prompt, yielding between calls of a model."""
        statistics, started = self.statistics, self._clock()
        for n in prefill(self.main, self.history[:-1]):
            statistics.prompt_n += n
            yield
        statistics.cached_n = len(self.history) - 1 - statistics.prompt_n
        if self._proposer:
            for _ in self._proposer.prefill(self.history):
                yield
        statistics.prompt_s = self._clock() - started

    def step(self, limit: int, is_end: Callable[[int], bool]) -> Step:
        """Guess up to `limit` tokens, test them in one call of main, and commit what stands."""
        started = self._lap_started = self._clock()
        main, history, statistics = self.main, self.history, self.statistics
        limit = min(limit, main.n_ctx - len(history), main.max_logits - 1, main.max_tokens - 1)
        proposal = Proposal()
        if self._proposer and limit > 0:
            proposal = self._proposer.propose(history, limit, self._dice, self._lap)
        logits = main.evaluate([history[-1], *proposal.tokens], len(proposal.tokens) + 1)
        self._lap("main model")
        distributions = self._sampler.distributions(logits, history, proposal.tokens)
        self._lap("main sampling")
        said, n_accepted = self._verify(proposal, distributions)
        end = next((i + 1 for i, token in enumerate(said) if is_end(token)), len(said))
        said, n_accepted = said[:end], min(n_accepted, end)
        self._lap("verify")
        history.extend(said)
        self.roll_back()
        self._lap("commit")
        statistics._count_step(len(said), len(proposal.tokens), n_accepted)
        statistics.predicted_s += self._lap_started - started
        if statistics.n_steps == 1:
            statistics.first_token_s = statistics.prompt_s + statistics.predicted_s
        return Step(said, proposal.tokens, n_accepted)

    def roll_back(self) -> None:
        """Keep in both caches only what has been said, less the last token, which main has yet to read."""
        self.main.trim(min(len(self.main.cached), len(self.history) - 1))
        if self._proposer:
            self._proposer.commit(self.history)

    def _verify(self, proposal: Proposal, distributions: Sequence[Distribution]) -> tuple[list[int], int]:
        """Accepted tokens and the one after them, and how many were accepted."""
        k = len(proposal.tokens)
        if not k:  # plain decoding
            return [distributions[0].draw(self._dice)], 0
        rows, columns = align([*distributions, *proposal.distributions], self.main.n_vocab)
        drafted = np.asarray(proposal.tokens, np.int64)
        verdict = self._verifier(
            rows[None, : k + 1],
            rows[None, k + 1 :],
            (drafted if columns is None else columns.searchsorted(drafted))[None],
            np.array([k]),
            [self._dice],
        )
        n_accepted = int(verdict.n_accepted[0])
        said = verdict.tokens[0, : n_accepted + 1]
        return (said if columns is None else columns[said]).tolist(), n_accepted

    def _lap(self, part: str) -> None:
        now = self._clock()
        self.statistics.profile[part] += now - self._lap_started
        self._lap_started = now
