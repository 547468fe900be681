"""A request: a running answer, and everything that its steps need."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from spec_local.core import language_model
from spec_local.core.language_model import Call, Calls, Logits, common_prefix
from spec_local.core.proposal import EMPTY, ROOT, Limit, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution, Sampler, TokenLogprob, logprob
from spec_local.engine.events import FinishReason, Statistics, Step
from spec_local.errors import ContextOverflow, DeadEnd, InvalidRequest, SpecLocalError
from spec_local.proposers.base import Proposer
from spec_local.verifiers import VERIFIERS
from spec_local.verifiers.base import Verifier

_MIN_SHARED = 16  # tokens of another request's prompt that are worth waiting for
_MAX_REREAD = 16  # tokens to evaluate again in a call with draft tokens; a plain step commits more of them


def check_prompt(main: language_model.LanguageModel, prompt: Sequence[int]) -> None:
    """Raise an error for a prompt that is empty or too long.

    Raises:
        InvalidRequest: it has no tokens.
        ContextOverflow: it is longer than the context.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty: give some text")
    if len(prompt) > main.n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens but the context only {main.n_ctx}: "
            "shorten it or raise --ctx"
        )


class Request:
    """A running answer, which continues a prompt with exactly the main model's distribution.

    It handles token ids only. Before and after every step, `history` is the prompt and the output so far, the
    main model's cache contains all of it except the last token, and the draft model's cache a prefix of it.
    If the main model could not discard rejected tokens alone (see `Rollback`), its cache lacks some more: the
    next call evaluates them again.

    Args:
        main: the main model's row. A prefix of the prompt that is in its cache is reused.
        prompt: token ids, at least one.
        sampler: the main model's sampler. A sampler with a constraint can be used for one answer only.
        rng: the source of all randomness.
        proposer: None for plain decoding.
        draft_max: maximum number of draft tokens per step on one path.
        max_tokens: maximum number of tokens to generate; None: until an end token or a full context.
        is_end: whether a token ends the answer; the end token is the last one generated.
        cancelled: called before each call for this request; True ends the answer.
        logprobs: number of alternatives to report with the log probability of each token; None: report no
            log probabilities.

    Raises:
        InvalidRequest: the prompt is empty, or a number is out of range.
        ContextOverflow: the prompt is longer than the context.
    """

    def __init__(
        self,
        main: language_model.Row,
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
    ) -> None:
        check_prompt(main, prompt)
        if draft_max < 0 or (max_tokens or 0) < 0 or (logprobs or 0) < 0:
            raise InvalidRequest("draft_max, max_tokens and logprobs must not be negative: give 0 or more")
        self.main = main
        self.history = list(prompt)
        self.statistics = Statistics()
        self.proposal = EMPTY
        self.is_reading = True
        """True if a part of the prompt has not been evaluated."""
        self._prompt = self.history[:-1]
        self._sampler, self._rng = sampler, rng
        self._proposer = proposer if draft_max and main.rollback != "none" else None
        self._head = self._proposer.head if self._proposer else None
        self._verifier = verifier
        self._draft_max = draft_max
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._is_end, self._cancelled, self._clock = is_end, cancelled, clock
        self._n_logprobs = logprobs
        self._started = 0.0
        self._reading: Calls[None] | None = None  # the draft model's reading of the prompt
        self._next_call: Call[Any] | None = None  # of that
        self._lap_started = 0.0
        self.has_ended = False
        """True if the last token is an end token."""
        self._dead_ends: set[int] = set()  # nodes of the proposal after which no token is allowed
        if sampler.constraint:
            sampler.constraint.commit(self.history)

    def reason_to_end(self) -> FinishReason | None:
        """Return the reason why the answer ends before its next step; None: it goes on."""
        reason: FinishReason | None = None
        if self.has_ended:
            return "stop"
        if self._n_left <= 0:
            reason = "length"
        elif len(self.history) > self.main.n_ctx:
            reason = "context"
        if self.is_reading or not reason:
            return "cancelled" if self._cancelled() else None
        constraint = self._sampler.constraint
        return "stop" if constraint and constraint.is_complete(self._is_end) else reason

    @property
    def _n_left(self) -> int:
        return self._max_tokens - self.statistics.predicted_n

    # Reading the prompt

    def start(self) -> None:
        """Note that the time to the first token begins."""
        self._started = self._clock()

    def waits_for(self, other: "Request") -> bool:
        """Return whether another request is reading a beginning of the prompt that this one can share."""
        if self.main.context is not other.main.context:
            return False
        known = max(len(self.main.cached), len(other.main.cached))
        n = common_prefix(self._prompt, other._prompt)
        if self.main.rollback != "any" and n < len(other._prompt):
            return False  # it has only the state after its whole prompt
        return n >= known + _MIN_SHARED

    def reuse_cache(self) -> None:
        """Take what is cached of the prompt, in this request's row or another one."""
        main, head = self.main, self._head
        if head and main.rollback != "any" and self.statistics.prompt_n:
            return  # if the head lacked states of what is taken, all that was read would be lost again
        main.reuse(self._prompt)
        if head:
            head.reuse(self._prompt)
            if head.n_received < len(main.cached):
                main.truncate(head.n_received)  # the states after it are evaluated again

    @property
    def n_unread(self) -> int:
        """Tokens of the prompt that the main model has not evaluated."""
        return len(self._prompt) - len(self.main.cached)

    def prompt_call(self, n_max: int) -> Call[Any]:
        """The main model's next call for the prompt, of 1 to `n_max` tokens."""
        start = len(self.main.cached)
        chunk = self._prompt[start : start + n_max]
        return self.main.call(chunk, range(ROOT, len(chunk) - 1), 0)

    def commit_prompt(self, call: Call[Any]) -> None:
        """Commit the tokens of a call for the prompt."""
        self._commit(call, range(len(call.tokens)))
        self.statistics.prompt_n += len(call.tokens)

    @property
    def has_head(self) -> bool:
        """True if a head reads the main model's hidden states while it reads the prompt."""
        return self._head is not None

    def read_with_head(self) -> Calls[bool]:
        """Make the head's calls for the tokens that the main model has evaluated; returns False."""
        if self._head:
            yield from self._head.read_calls()
        return False

    def read_with_draft(self, others: "Sequence[Request]") -> Calls[bool]:
        """Make the draft model's next call for the prompt; returns whether there are no more.

        Args:
            others: if the draft model is reading a beginning of one of their prompts that this request can
                share afterwards, it waits for that.
        """
        if self._proposer and not self._reading:
            if any(o._next_call and common_prefix(self._prompt, o._prompt) >= _MIN_SHARED for o in others):
                return False
            self._reading = self._proposer.prefill(self.history)
            self._next_call = next(self._reading, None)
        if self._reading and self._next_call:
            try:
                try:
                    logits = yield self._next_call
                except SpecLocalError as error:
                    self._next_call = self._reading.throw(error)
                else:
                    self._next_call = self._reading.send(logits)
            except StopIteration:
                self._next_call = None
        return self._next_call is None

    def end_reading(self) -> None:
        """The prompt is evaluated by both models."""
        self.is_reading = False
        self.main.checkpoint(lasting=True)  # for another answer
        self.statistics.cached_n = len(self._prompt) - self.statistics.prompt_n
        self.statistics.prompt_s = self._clock() - self._started

    # Steps

    @property
    def n_unevaluated(self) -> int:
        """Tokens of the history that the next call evaluates before draft tokens."""
        return len(self.history) - len(self.main.cached)

    def propose(self, max_tokens: int) -> Calls[bool]:
        """Draft tokens for a call of up to so many tokens; returns whether there are any."""
        self._lap_started = self._clock()
        if self._head:  # steps without a draft may have left tokens to read
            yield from self._head.read_calls()
            self._lap("draft model")
        main, n_before = self.main, self.n_unevaluated
        nodes = min(main.n_ctx - len(self.history), max_tokens - n_before)
        if n_before > 1 + _MAX_REREAD:
            nodes = 0
        elif nodes > main.max_rollback and self._proposer and not main.checkpoint():
            nodes = main.max_rollback
        depth = min(self._draft_max, self._n_left - 1, nodes)
        self.proposal = EMPTY
        if self._proposer and depth > 0:
            limit = Limit(depth, nodes, self.main.max_branches)
            self.proposal = yield from self._proposer.propose(self.history, limit, self._rng, self._lap)
        return bool(self.proposal.tokens)

    def shorten(self, proposal: Proposal) -> None:
        """Verify only this part of the proposal."""
        if proposal is not self.proposal and self._proposer:
            self.proposal = proposal
            self._proposer.shorten(proposal)

    def verify_call(self) -> Call[Any]:
        """The main model's call that verifies the proposal."""
        # The last tokens of the history come first: with n of them, node i of the proposal is node i + n.
        before, proposal = self.history[len(self.main.cached) :], self.proposal
        parents = [*range(ROOT, len(before) - 1), *(n + len(before) for n in proposal.parents)]
        return self.main.call([*before, *proposal.tokens], parents, 1 + len(proposal.tokens))

    def commit(self, call: Call[Any], logits: Logits) -> Step:
        """Verify the proposal, and commit the accepted path and the token after it."""
        self._lap("main model")
        main, history, proposal = self.main, self.history, self.proposal
        n_before = len(call.tokens) - len(proposal.tokens)
        if self._proposer and self._proposer.needs_logits:
            self._proposer.observe(call.tokens[n_before - 1 :], logits)
            self._lap("observe")
        self._dead_ends.clear()
        p = self._main_distribution(proposal, logits)
        path, token = self._verifier(proposal, p, main.n_vocab, self._rng, len(history))
        output = [*(proposal.tokens[node] for node in path), token]
        # Stop at a dead end: the next step raises an error there, as it would without draft tokens.
        dead = next((n for n, node in enumerate(path, 1) if node in self._dead_ends), None)
        output = output[:dead]
        end = next((i + 1 for i, token in enumerate(output) if self._is_end(token)), len(output))
        output, n_accepted = output[:end], min(len(path), end)
        self.has_ended = self._is_end(output[-1])
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
        nodes = [*range(n_before), *(node + n_before for node in path[: end - 1])]
        self._commit(call, nodes)
        self._lap("commit")
        self.statistics.count_step(len(output), proposal, n_accepted)
        # Without the distributions: over a whole vocabulary, each takes a megabyte.
        tokens, parents, source, values = proposal.tokens, proposal.parents, proposal.source, proposal.values
        drafted = Proposal(tokens, parents, source=source, values=values) if tokens else EMPTY
        return Step(output, drafted, n_accepted, logprobs)

    def _commit(self, call: Call[Any], path: Sequence[int]) -> None:
        """Commit a path of the main model's tree, and hand its hidden states to the head that reads them."""
        main, head = self.main, self._head
        start = len(main.cached)
        states = main.states(path) if head else None  # a copy: committing may call the model
        main.commit(path)
        if self._proposer and not self.is_reading:
            self._proposer.commit(self.history)
        if head and states is not None:
            head.receive(start, [call.tokens[node] for node in path], states)

    def count_seconds(self, seconds: float) -> None:
        """Add the time of a step."""
        self.statistics.predicted_s += seconds
        if self.statistics.n_steps == 1:
            self.statistics.first_token_s = self.statistics.prompt_s + self.statistics.predicted_s

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
        if self._reading:
            self._reading.close()
        with suppress(InvalidRequest):  # closed in mid-answer, or in a forked process: nothing to roll back
            self.main.truncate(min(len(self.main.cached), len(self.history) - 1))
            if self._proposer:
                self._proposer.commit(self.history)

    def _lap(self, part: str) -> None:
        now = self._clock()
        self.statistics.profile[part] += now - self._lap_started
        self._lap_started = now
