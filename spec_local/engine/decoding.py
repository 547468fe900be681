"""The decoding loop: propose, evaluate, verify, commit.

It handles token ids only. Before and after every step, `history` is the prompt and the output so far, the
main model's cache contains all of it except the last token, and the draft model's cache a prefix of it.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

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
    """Continue a prompt with exactly the main model's distribution.

    Args:
        main: the main model. A prefix of the prompt that is in its cache is reused.
        prompt: token ids, at least one.
        sampler: the main model's sampler. A sampler with a constraint can be used for one answer only.
        rng: the source of all randomness.
        proposer: None for plain decoding.
        draft_max: maximum number of draft tokens per step on one path.
        max_tokens: maximum number of tokens to generate; None: until an end token or a full context.
        is_end: whether a token ends the answer; the end token is the last one generated.
        cancelled: called before each step; True ends the answer.
        logprobs: number of alternatives to report with the log probability of each token; None: report no
            log probabilities.

    Yields:
        one `Prefilled`, a `Step` per call of the main model, one `Finished`. The iterator may be closed
        early: both caches then contain only tokens of the history.

    Raises:
        InvalidRequest: the prompt is empty, or a number is out of range.
        ContextOverflow: the prompt is longer than the context; raised before anything is evaluated.
        BackendError: a call of a model failed; the caches contain a prefix of the history.
    """
    check_prompt(main, prompt)
    if draft_max < 0 or (max_tokens or 0) < 0 or (logprobs or 0) < 0:
        raise InvalidRequest("draft_max, max_tokens and logprobs must not be negative: give 0 or more")
    row = _Row(main, proposer if draft_max else None, sampler, verifier, rng, list(prompt), clock, logprobs)
    return _events(row, draft_max, max_tokens, is_end, cancelled)


def check_prompt(main: LanguageModel, prompt: Sequence[int]) -> None:
    """Raise the errors of `decode` for a prompt that is empty or too long."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: give some text")
    if len(prompt) > main.n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens but the context only {main.n_ctx}: "
            "shorten it or raise --ctx"
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
        if reason in ("length", "context") and row.is_complete(is_end):
            reason = "stop"
        yield Finished(reason, statistics)
    finally:
        with suppress(InvalidRequest):  # closed in mid-answer, or in a forked process: nothing to roll back
            row.roll_back()


class _Row:
    """The state of one generation: the history, and everything that a step needs."""

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
        self._dead_ends: set[int] = set()  # nodes of the proposal after which no token is allowed
        if sampler.constraint:
            sampler.constraint.commit(history)

    def is_complete(self, is_end: Callable[[int], bool]) -> bool:
        """Whether the constraint allows only an end token after the history."""
        constraint = self._sampler.constraint
        return constraint is not None and constraint.is_complete(is_end)

    def read_prompt(self) -> Iterator[None]:
        """Evaluate the prompt in both caches, yielding between calls of a model."""
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
        """Propose paths of up to `limit` tokens, verify them in one call, and commit the accepted one."""
        started = self._lap_started = self._clock()
        main, history, statistics = self.main, self.history, self.statistics
        nodes = min(main.n_ctx - len(history), main.max_logits - 1, main.max_tokens - 1)
        proposal = EMPTY
        if self._proposer and min(limit, nodes) > 0:
            limits = Limit(min(limit, nodes), nodes, main.max_branches)
            proposal = self._proposer.propose(history, limits, self._rng, self._lap)
        # The last token of the history comes first: node i of the proposal is node i + 1 of the call.
        tokens = [history[-1], *proposal.tokens]
        logits = main.decode_tree(tokens, [ROOT, *(n + 1 for n in proposal.parents)])
        self._lap("main model")
        if self._proposer and self._proposer.needs_logits:
            self._proposer.observe(tokens, logits)
            self._lap("observe")
        self._dead_ends.clear()
        p = self._main_distribution(proposal, logits)
        path, token = self._verifier(proposal, p, main.n_vocab, self._rng, len(history))
        output = [*(proposal.tokens[node] for node in path), token]
        # Stop at a dead end: the next step raises an error there, as it would without draft tokens.
        dead = next((n for n, node in enumerate(path, 1) if node in self._dead_ends), None)
        output = output[:dead]
        end = next((i + 1 for i, token in enumerate(output) if is_end(token)), len(output))
        output, n_accepted = output[:end], min(len(path), end)
        self._lap("verify")
        logprobs: Sequence[TokenLogprob] = ()
        if self._n_logprobs is not None:
            rows = [logits[node + 1] for node in (ROOT, *path)]
            logprobs = [
                logprob(row, token, self._n_logprobs) for row, token in zip(rows, output, strict=False)
            ]
            self._lap("logprobs")
        history.extend(output)
        if self._sampler.constraint:
            self._sampler.constraint.commit(history)
        main.commit([0, *(node + 1 for node in path[: end - 1])])
        if self._proposer:
            self._proposer.commit(history)
        self._lap("commit")
        statistics.count_step(len(output), proposal, n_accepted)
        statistics.predicted_s += self._lap_started - started
        if statistics.n_steps == 1:
            statistics.first_token_s = statistics.prompt_s + statistics.predicted_s
        # Drop the distributions: over a whole vocabulary, each takes a megabyte.
        drafted = EMPTY
        if proposal.tokens:
            drafted = Proposal(proposal.tokens, proposal.parents, source=proposal.source)
        return Step(output, drafted, n_accepted, logprobs)

    def _main_distribution(self, proposal: Proposal, logits: Logits) -> Callable[[int], Distribution]:
        """The main model's distribution after a node, on demand: a verifier needs only some of them."""
        window = self._sampler.window
        recent = self.history[-window:] if window else None

        def distribution(node: int) -> Distribution:
            self._lap("verify")
            path = () if recent is None else [*recent, *(proposal.tokens[n] for n in proposal.path(node))]
            try:
                result = self._sampler.distribution(logits[node + 1], path)
            except DeadEnd:
                if node == ROOT:
                    raise
                # This is an error only if the node is accepted; the token after it is then dropped.
                self._dead_ends.add(node)
                result = Distribution.certain(0)
            self._lap("main sampling")
            return result

        return distribution

    def roll_back(self) -> None:
        """Keep only the history in both caches, without its last token, which is not evaluated yet."""
        self.main.truncate(min(len(self.main.cached), len(self.history) - 1))
        if self._proposer:
            self._proposer.commit(self.history)

    def _lap(self, part: str) -> None:
        now = self._clock()
        self.statistics.profile[part] += now - self._lap_started
        self._lap_started = now
