"""A request: a running answer, and the four parts of its steps: propose, evaluate, verify, commit."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spec_local.core.calls import Call, Logits, Timer
from spec_local.core.proposal import ALONE, EMPTY, ROOT, CallLoad, Limit, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution, Sampler, TokenLogprob, logprob
from spec_local.core.sequence import MainSequence
from spec_local.core.span import text_of
from spec_local.engine.events import FinishReason, Statistics, Step
from spec_local.engine.prefill import Prefill, check_prompt
from spec_local.errors import DeadEnd, InvalidRequest
from spec_local.proposers.base import Proposer
from spec_local.verifiers import VERIFIERS
from spec_local.verifiers.base import Verifier

_MAX_REREAD = 16  # tokens to evaluate again in a call with draft tokens; a plain step commits more of them


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of verification.

    tokens: the accepted draft tokens and the main model's own, up to an end token. path: the accepted nodes
    of the proposal; `tokens` may end within it. logprobs: of each of `tokens`, if requested.
    """

    tokens: Sequence[int]
    path: Sequence[int]
    logprobs: Sequence[TokenLogprob]


class Request:
    """A running answer, which continues a prompt with exactly the main model's distribution.

    It handles token ids only; samplers and constraints do not see the cells of spans. Before and after every
    step, `history` is the prompt and the output so far, the main model's cache contains all of it except the
    last token, and the draft model's cache a prefix of it.
    If the main model could not discard rejected tokens alone (see `Rollback`), its cache lacks some more: the
    next call evaluates them again.

    Args:
        main: the main model's sequence. A prefix of the prompt that is in its cache is reused.
        prompt: token ids, at least one.
        sampler: the main model's sampler. A sampler with a constraint can be used for one answer only.
        rng: the source of all randomness.
        proposer: None for plain decoding.
        verifier: the acceptance rule.
        draft_max: maximum number of draft tokens per step on one path.
        max_tokens: maximum number of tokens to generate; None: until an end token or a full context.
        is_end: whether a token ends the answer; the end token is the last one generated.
        cancelled: called before each call for this request; True ends the answer.
        clock: seconds.
        logprobs: number of alternatives to report with the log probability of each token; None: report no
            log probabilities.
        sampled_logprobs: report those under the sampler's distribution.

    Raises:
        InvalidRequest: the prompt is empty, or a number is out of range.
        ContextOverflow: the prompt is longer than the context.
    """

    def __init__(
        self,
        main: MainSequence,
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
        sampled_logprobs: bool = False,
    ) -> None:
        check_prompt(main, prompt)
        if draft_max < 0 or (max_tokens or 0) < 0 or (logprobs or 0) < 0:
            raise InvalidRequest("draft_max, max_tokens and logprobs must not be negative: give 0 or more")
        self.main = main
        self.history = list(prompt)
        self._text = list(text) if len(text := text_of(self.history)) < len(self.history) else self.history
        self.statistics = Statistics()
        self.proposal, self._load = EMPTY, ALONE
        self._sampler, self._rng = sampler, rng
        self._proposer = proposer if draft_max and main.limits.rollback != "none" else None
        self.head = self._proposer.head if self._proposer else None
        """See `Proposer`."""
        self._verifier = verifier
        self._draft_max = draft_max
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._is_end, self._cancelled = is_end, cancelled
        self._n_logprobs, self._sampled_logprobs = logprobs, sampled_logprobs
        self.prefill = Prefill(main, self.history.copy(), self._proposer, self.statistics, clock)
        """Reads the prompt before the first step."""
        self.has_ended = False
        """True if the last token is an end token."""
        if sampler.constraint:
            sampler.constraint.commit(self._text)

    def reason_to_end(self) -> FinishReason | None:
        """Return the reason why the answer ends before its next step; None: it goes on."""
        reason: FinishReason | None = None
        if self.has_ended:
            return "stop"
        if self._n_left <= 0:
            reason = "length"
        elif len(self.history) > self.main.limits.n_ctx:
            reason = "context"
        if not self.prefill.is_done or not reason:
            return "cancelled" if self._cancelled() else None
        constraint = self._sampler.constraint
        return "stop" if constraint and constraint.is_complete(self._is_end) else reason

    @property
    def plain_s(self) -> float | None:
        """Seconds of the main model's call in this step if no request had draft tokens; None: unknown."""
        costs = self._proposer.main_costs if self._proposer else None
        return costs.at(self._load).plain_s if costs else None

    @property
    def _n_left(self) -> int:
        return self._max_tokens - self.statistics.predicted_n

    # 1 Propose

    @property
    def n_unevaluated(self) -> int:
        """Tokens of the history that the next call evaluates before draft tokens."""
        return len(self.history) - len(self.main.cached)

    async def propose(self, max_tokens: int, load: CallLoad = ALONE) -> None:
        """Draft tokens for a call of up to `max_tokens` tokens, with this load."""
        self._load = load
        if self.head:  # steps without a draft may have left tokens to read
            await self.head.read()
        main, limits, n_before = self.main, self.main.limits, self.n_unevaluated
        nodes = min(limits.n_ctx - len(self.history), max_tokens - n_before)
        if n_before > 1 + _MAX_REREAD:
            nodes = 0
        elif nodes > limits.max_rollback and self._proposer and not main.checkpoint():
            nodes = limits.max_rollback
        depth = min(self._draft_max, self._n_left - 1, nodes)
        self.proposal = EMPTY
        if self._proposer and depth > 0:
            limit = Limit(depth, nodes, limits.max_branches, load)
            self.proposal = await self._proposer.propose(self.history, limit, self._rng)

    def shorten(self, proposal: Proposal) -> None:
        """Verify only this part of the proposal."""
        if proposal is not self.proposal and self._proposer:
            self.proposal = proposal
            self._proposer.shorten(proposal)

    # 2 Evaluate

    def verify_call(self) -> Call[Any]:
        """Return the main model's call that evaluates the proposal."""
        # The last tokens of the history come first: with n of them, node i of the proposal is node i + n.
        before, proposal = self.history[len(self.main.cached) :], self.proposal
        n, parents = len(before), list(range(ROOT, len(before) - 1))
        for parent in proposal.parents:
            parents.append(n + parent)
        return self.main.call([*before, *proposal.tokens], parents, 1 + len(proposal.tokens))

    # 3 Verify

    def verify(self, logits: Logits) -> Verified:
        """Choose the accepted path of the proposal, and the token after it. Only the rng advances.

        Args:
            logits: of the verifying call, float32 (1 + nodes, V): after the history, then after each node.

        Raises:
            DeadEnd: the constraint allows no token.
        """
        proposal, dead_ends = self.proposal, set[int]()
        recent = self._text[-self._sampler.window :] if self._sampler.window else None

        def distribution(node: int) -> Distribution:
            """Return p after a node, on demand: a verifier needs only some of them."""
            path = () if recent is None else [*recent, *(proposal.tokens[n] for n in proposal.path(node))]
            try:
                return self._sampler.distribution(logits[node + 1], path)
            except DeadEnd:
                if node == ROOT:
                    raise
                # This is an error only if the node is accepted; the token after it is then dropped.
                dead_ends.add(node)
                return Distribution.certain(0)

        path, token = self._verifier(
            proposal, distribution, self.main.limits.n_vocab, self._rng, len(self.history)
        )
        output: list[int] = []
        for node in path:
            output.append(proposal.tokens[node])
            # At a dead end, the next step raises an error, as it would without draft tokens.
            if node in dead_ends or self._is_end(output[-1]):
                break
        else:
            output.append(token)
        logprobs: Sequence[TokenLogprob] = ()
        if self._n_logprobs is not None:
            logprobs = [
                distribution(node).logprob(token, self._n_logprobs)
                if self._sampled_logprobs
                else logprob(logits[node + 1], token, self._n_logprobs)
                for node, token in zip((ROOT, *path), output, strict=False)
            ]
        return Verified(output, path, logprobs)

    # 4 Commit

    def commit(self, call: Call[Any], logits: Logits, verified: Verified) -> Step:
        """Append the tokens to the history, keep the accepted path in the caches, and roll the rest back."""
        proposal, proposer, output = self.proposal, self._proposer, verified.tokens
        n_before = len(call.tokens) - len(proposal.tokens)
        if proposer and proposer.needs_logits:
            proposer.observe(call.tokens[n_before - 1 :], logits)
        self.history.extend(output)
        if self._text is not self.history:
            self._text.extend(output)
        self.has_ended = self._is_end(output[-1])
        if self._sampler.constraint:
            self._sampler.constraint.commit(self._text)
        # The last token is not evaluated: it is the main model's own, or nothing follows it.
        nodes = [*range(n_before), *(node + n_before for node in verified.path[: len(output) - 1])]
        start = len(self.main.cached)
        states = self.main.commit(nodes)
        if proposer:
            proposer.commit(self.history)  # before the head gets the states
        if self.head and states is not None:
            self.head.receive(start, [call.tokens[node] for node in nodes], states)
        n_accepted = min(len(verified.path), len(output))
        self.statistics.count_step(len(output), proposal, n_accepted)
        return Step(output, proposal.without_distributions(), n_accepted, verified.logprobs)

    def count_time(self, timer: Timer) -> None:
        """Add the time of a step."""
        statistics = self.statistics
        statistics.predicted_s += timer.seconds
        for part, seconds in timer.parts.items():
            statistics.profile[part] += seconds
        statistics.last_calls = timer.calls
        if statistics.n_steps and not statistics.first_token_s:
            statistics.first_token_s = statistics.prompt_s + statistics.predicted_s

    def roll_back(self) -> None:
        """Keep only the history in both caches, without its last token, which is not evaluated yet."""
        self.prefill.close()
        with suppress(InvalidRequest):  # closed in mid-answer, or in a forked process: nothing to roll back
            self.main.truncate(min(len(self.main.cached), len(self.history) - 1))
            if self._proposer:
                self._proposer.commit(self.history)
