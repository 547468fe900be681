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


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request generates.

    sampler: the main model's. A sampler with a constraint can be used for one answer only.
    rng: the source of all randomness.
    proposer: None for plain decoding.
    verifier: the acceptance rule.
    draft_max: maximum number of draft tokens per step on one path.
    max_tokens: maximum number of tokens to generate; None: until an end token or a full context.
    is_end: whether a token ends the answer; the end token is the last one generated.
    cancelled: called before each call for this request; True ends the answer.
    clock: seconds.
    logprobs: number of alternatives to report with the log probability of each token; None: report no log
        probabilities.
    sampled_logprobs: report those under the sampler's distribution.

    Raises:
        InvalidRequest: a number is out of range.
    """

    sampler: Sampler
    rng: Rng
    proposer: Proposer | None = None
    verifier: Verifier = VERIFIERS["block"]
    draft_max: int = 4
    max_tokens: int | None = None
    is_end: Callable[[int], bool] = lambda token: False
    cancelled: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
    logprobs: int | None = None
    sampled_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.draft_max < 0 or (self.max_tokens or 0) < 0 or (self.logprobs or 0) < 0:
            raise InvalidRequest("draft_max, max_tokens and logprobs must not be negative: give 0 or more")


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

    Raises:
        InvalidRequest: the prompt is empty.
        ContextOverflow: the prompt is longer than the context.
    """

    def __init__(self, main: MainSequence, prompt: Sequence[int], options: RequestOptions) -> None:
        check_prompt(main, prompt)
        self.main, self._options = main, options
        self.history = list(prompt)
        self._text = list(text) if len(text := text_of(self.history)) < len(self.history) else self.history
        self.statistics = Statistics()
        self.proposal, self._load = EMPTY, ALONE
        self._sampler, self._is_end = options.sampler, options.is_end
        may_draft = options.draft_max and main.limits.rollback != "none"
        self._proposer = options.proposer if may_draft else None
        self.head = self._proposer.head if self._proposer else None
        """See `Proposer`."""
        self._max_tokens = sys.maxsize if options.max_tokens is None else options.max_tokens
        self.prefill = Prefill(main, self.history.copy(), self._proposer, self.statistics, options.clock)
        """Reads the prompt before the first step."""
        self.has_ended = False
        """True if the last token is an end token."""
        if self._sampler.constraint:
            self._sampler.constraint.commit(self._text)

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
            return "cancelled" if self._options.cancelled() else None
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
        depth = min(self._options.draft_max, self._n_left - 1, nodes)
        self.proposal = EMPTY
        if self._proposer and depth > 0:
            limit = Limit(depth, nodes, limits.max_branches, load)
            self.proposal = await self._proposer.propose(self.history, limit, self._options.rng)

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

        rng, n_logprobs = self._options.rng, self._options.logprobs
        path, token = self._options.verifier(
            proposal, distribution, self.main.limits.n_vocab, rng, len(self.history)
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
        if n_logprobs is not None:
            logprobs = [
                distribution(node).logprob(token, n_logprobs)
                if self._options.sampled_logprobs
                else logprob(logits[node + 1], token, n_logprobs)
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
        step = Step(output, proposal.without_distributions(), n_accepted, verified.logprobs)
        count_step(self.statistics, step)
        return step

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


def count_step(statistics: Statistics, step: Step) -> None:
    """Count a step, but not its time."""
    proposal, n_accepted = step.proposal, step.n_accepted
    statistics.n_steps += 1
    statistics.predicted_n += len(step.tokens)
    statistics.draft_n += len(proposal.tokens)
    statistics.draft_n_accepted += n_accepted
    statistics.steps_by[proposal.source] += 1
    if not proposal.tokens:
        return
    depth = proposal.depth
    for counts, n in ((statistics.tested_at, depth), (statistics.accepted_at, n_accepted)):
        counts.extend([0] * (depth - len(counts)))
        for position in range(n):
            counts[position] += 1


def book(
    timer: Timer,
    calls: Sequence[tuple[int, int]],
    steps: Sequence[tuple[Request, int]],
    waiting: Sequence[Request],
) -> None:
    """Add the seconds that drafting saved each answer in a step, or cost it: `Statistics.saved_s`.

    A step is compared with the plain steps that would have generated its tokens at the same moment. Times are
    as measured: the causes add up to what the user saw. Plain steps are the reference, and their noise is no
    loss.

    Args:
        timer: of the step.
        calls: of each of its calls of the main model: requests that decoded, and tokens of prompts.
        steps: requests that decoded, with the number of generated tokens.
        waiting: requests that have not begun to decode.
    """
    draft_model = timer.parts.get("draft model", 0.0)
    drafting = timer.parts.get("propose", 0.0) + draft_model
    drafted = any(request.proposal.tokens for request, _ in steps)
    n_calls = sum(n_decoding > 0 for n_decoding, _ in calls)  # several if requests do not share a context
    for request, n_tokens in steps:
        if (plain := request.plain_s) is None:
            continue
        cause = request.proposal.source
        if cause == "none":
            own = request.head and not drafted  # its head reads what steps without a draft have left
            cause = ("draft" if own else "others") if drafted or draft_model else "searching"
        saved = -drafting
        if drafted:
            reading = timer.parts.get("images", 0.0) + _reading(timer, calls, plain)
            saved = n_tokens * n_calls * plain - timer.seconds + reading
        request.statistics.saved_s[cause] += saved
    for request in waiting:
        if request.plain_s is not None:
            request.statistics.saved_s["others" if drafted else "reading"] -= drafting


def _reading(timer: Timer, calls: Sequence[tuple[int, int]], plain: float) -> float:
    """Seconds of the main model's calls that plain steps would also have spent on reading prompts.

    In a call with a part of a prompt, which is long, all tokens take about equally long. What exceeds a plain
    call and the draft tokens' part is due to the prompt.
    """
    seconds = 0.0
    main = [call for call in timer.calls if call.part == "main model"]
    for call, (n_decoding, n_read) in zip(main, calls, strict=True):
        if n_read:
            n_more = call.n - n_read - n_decoding
            seconds += call.seconds - (plain if n_decoding else 0.0) - n_more * call.seconds / call.n
    return seconds
