"""The decoding loop: propose, evaluate, verify, commit.

It knows token ids only. Every step starts and ends in the same state: `history` is what has been said,
main's cache holds all of it but the last token, and the proposer's holds a prefix of it.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from spec_local.core.language_model import LanguageModel, Logits, prefill
from spec_local.core.proposal import EMPTY, ROOT, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution, Sampler, TokenLogprob, logprob
from spec_local.engine.events import Event, Finished, FinishReason, Prefilled, Statistics, Step
from spec_local.errors import ContextOverflow, DeadEnd, InvalidRequest
from spec_local.proposers.base import Limit, Proposer
from spec_local.verifiers import VERIFIERS, Verifier


def decode(
    main: LanguageModel,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    rng: Rng,
    proposer: Proposer | None = None,
    verifier: Verifier = VERIFIERS["block"],
    draft_max: int = 4,
    max_tokens: int | None = None,
    is_end: Callable[[int], bool] = lambda token: False,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
    logprobs: int | None = None,
) -> Iterator[Event]:
    """Continue a prompt with exactly main's distribution.

    Args:
        main: its cache may hold anything; a prefix that it shares with the prompt is reused.
        prompt: token ids, at least one.
        sampler: shapes main's logits (and, in the proposer, the draft's). One with a constraint is for one answer.
        rng: decides everything that is left to chance.
        proposer: None for plain decoding.
        draft_max: most tokens of a path to guess a step.
        max_tokens: most tokens to say; None: until an end token or the end of the context.
        is_end: whether a token ends the answer; it is said, and nothing after it.
        cancelled: asked between calls of main; True ends the answer there.
        logprobs: with how many alternatives each token's log probability is told; None: it is not.

    Yields:
        one `Prefilled`, a `Step` per call of main, one `Finished`. Closing the iterator early is fine:
        both caches then hold only what was said.

    Raises:
        InvalidRequest: the prompt is empty, or a number is out of range.
        ContextOverflow: the prompt does not fit (before anything is evaluated).
        BackendError: a model failed; the caches hold a prefix of what was said.
    """
    check_prompt(main, prompt)
    if draft_max < 0 or (max_tokens or 0) < 0 or (logprobs or 0) < 0:
        raise InvalidRequest("numbers of tokens must not be negative")
    row = _Row(main, proposer if draft_max else None, sampler, verifier, rng, list(prompt), clock, logprobs)
    return _events(row, draft_max, max_tokens, is_end, cancelled)


def check_prompt(main: LanguageModel, prompt: Sequence[int]) -> None:
    """Raise what `decode` raises for a prompt that is empty or does not fit."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: give some text")
    if len(prompt) > main.n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and the context {main.n_ctx}: shorten it or give a larger --ctx"
        )


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
        rng: Rng,
        history: list[int],
        clock: Callable[[], float],
        n_logprobs: int | None,
    ) -> None:
        self.main = main
        self.history = history
        self.statistics = Statistics()
        self._proposer = proposer
        self._sampler = sampler
        self._verifier = verifier
        self._rng = rng
        self._clock = clock
        self._n_logprobs = n_logprobs
        self._lap_started = 0.0
        self._dead_ends: set[int] = set()  # nodes of the proposal after which nothing may follow
        if sampler.constraint:
            sampler.constraint.commit(history)

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
        """Guess paths of up to `limit` tokens, test them in one call of main, and commit what stands."""
        started = self._lap_started = self._clock()
        main, history, statistics = self.main, self.history, self.statistics
        nodes = min(main.n_ctx - len(history), main.max_logits - 1, main.max_tokens - 1)
        proposal = EMPTY
        if self._proposer and min(limit, nodes) > 0:
            limits = Limit(min(limit, nodes), nodes, main.max_branches)
            proposal = self._proposer.propose(history, limits, self._rng, self._lap)
        # The last token said comes first, so that node i of the proposal is main's node i + 1.
        tokens = [history[-1], *proposal.tokens]
        logits = main.decode_tree(tokens, [ROOT, *(n + 1 for n in proposal.parents)])
        self._lap("main model")
        if self._proposer and self._proposer.listens:
            self._proposer.observe(tokens, logits)
            self._lap("observe")
        self._dead_ends.clear()
        mains = self._mains(proposal, logits)
        path, token = self._verifier(proposal, mains, main.n_vocab, self._rng, len(history))
        said = [*(proposal.tokens[node] for node in path), token]
        # Nothing comes after a dead end; the next step finds itself there, as it would without guesses.
        dead = next((n for n, node in enumerate(path, 1) if node in self._dead_ends), None)
        said = said[:dead]
        end = next((i + 1 for i, token in enumerate(said) if is_end(token)), len(said))
        said, n_accepted = said[:end], min(len(path), end)
        self._lap("verify")
        logprobs: Sequence[TokenLogprob] = ()
        if self._n_logprobs is not None:
            rows = [logits[node + 1] for node in (ROOT, *path)]
            logprobs = [logprob(row, token, self._n_logprobs) for row, token in zip(rows, said, strict=False)]
            self._lap("logprobs")
        history.extend(said)
        if self._sampler.constraint:
            self._sampler.constraint.commit(history)
        main.commit([0, *(node + 1 for node in path[: end - 1])])
        if self._proposer:
            self._proposer.commit(history)
        self._lap("commit")
        statistics.count_step(len(said), proposal, n_accepted)
        statistics.predicted_s += self._lap_started - started
        if statistics.n_steps == 1:
            statistics.first_token_s = statistics.prompt_s + statistics.predicted_s
        # Without its distributions, which over a whole vocabulary take a megabyte each.
        guessed = (
            Proposal(proposal.tokens, proposal.parents, source=proposal.source) if proposal.tokens else EMPTY
        )
        return Step(said, guessed, n_accepted, logprobs)

    def _mains(self, proposal: Proposal, logits: Logits) -> Callable[[int], Distribution]:
        """Main's distribution after a node of the proposal: a rule asks for few of them, and each takes time."""
        window = self._sampler.window
        recent = self.history[-window:] if window else None

        def distribution(node: int) -> Distribution:
            self._lap("verify")
            path = () if recent is None else [*recent, *(proposal.tokens[n] for n in proposal.path(node))]
            try:
                found = self._sampler.distribution(logits[node + 1], path)
            except DeadEnd:
                if node == ROOT:
                    raise
                # Main does not end here unless the guess stands. Whatever it is said to want then is not said.
                self._dead_ends.add(node)
                found = Distribution.certain(0)
            self._lap("main sampling")
            return found

        return distribution

    def roll_back(self) -> None:
        """Keep in both caches only what has been said, less the last token, which main has yet to read."""
        self.main.truncate(min(len(self.main.cached), len(self.history) - 1))
        if self._proposer:
            self._proposer.commit(self.history)

    def _lap(self, part: str) -> None:
        now = self._clock()
        self.statistics.profile[part] += now - self._lap_started
        self._lap_started = now
