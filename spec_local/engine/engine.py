"""The engine: speculative decoding, step by step, for all requests at the same time.

Requests advance at different rates. One that fails or ends disturbs no other.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from spec_local.core.calls import Call, Timer, together
from spec_local.core.proposal import CallLoad, Proposal
from spec_local.core.sequence import Context
from spec_local.engine.events import Event, Failed, Finished, Prefilled, Statistics, Step
from spec_local.engine.prefill import Prefill
from spec_local.engine.request import Request, book, count_step
from spec_local.errors import InvalidRequest, as_failure

_CHUNK, _MIN_CHUNK = 96, 32  # prompt tokens per call beside one request that generates, and beside many

Events = list[tuple[Request, Event]]
RequestCalls = list[tuple[Request, Call[Any]]]


class Planner(Protocol):
    """Decides how much of the requests' proposals is verified: `spec_local.policies.sharing.SharedCalls`."""

    def choose(self, proposals: Sequence[Proposal], load: CallLoad, spent: float) -> Sequence[Proposal]:
        """Return the part of each proposal to verify, `spent` seconds after the step began."""

    def observe(self, load: CallLoad, n_drafted: int, seconds: float) -> None:
        """Record the time of a call of all requests, commits included.

        Args:
            n_drafted: draft tokens, and tokens that were evaluated again.
        """


class Engine:
    """Requests that advance together.

    Args:
        planner: divides calls among requests; None: proposals are verified in full.
        statistics: receives the counts over all requests. Times are those of the engine's steps: its rate is
            that of all requests, and `prompt_s` the time of the steps in which no request generated.

    Attributes:
        requests: those that have not ended, in the order in which they were added.
        n_calls: calls of the main model.
    """

    def __init__(
        self,
        planner: Planner | None = None,
        clock: Callable[[], float] = time.perf_counter,
        statistics: Statistics | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.statistics, self.n_calls = statistics or Statistics(), 0
        self._planner, self._timer = planner, Timer(clock)

    def add(self, request: Request) -> None:
        """Start a request; its prompt is read in the next steps.

        Raises:
            InvalidRequest: the main model cannot evaluate this many requests in one call.
        """
        context = request.main.context
        n = 1 + sum(other.main.context is context for other in self.requests)
        if n > (most := min(context.max_tokens, context.max_logits)):
            raise InvalidRequest(f"{n} requests exceed the batch size of {most}: start fewer")
        self.requests.append(request)
        request.prefill.start()

    def remove(self, request: Request) -> None:
        """End a request: its caches then contain only its history."""
        if request in self.requests:
            self.requests.remove(request)
            request.roll_back()

    def close(self) -> None:
        """End all requests."""
        for request in list(self.requests):
            self.remove(request)

    def step(self) -> Events:
        """Advance all requests by one call of the main model, and return what happened.

        Returns:
            for a request, one `Prefilled` when its prompt has been read, a `Step` for each call after it, and
            one `Finished` or `Failed`, after which it is no longer in `requests`.

        Raises:
            BackendError, ContextOverflow: a call of the main model failed; the engine must be closed.
        """
        events = self._end_finished()
        if not self.requests:
            return events
        timer, (decoding, reading) = self._timer, self._split()
        timer.start()
        load = self._load(decoding, reading)

        # 1 Propose: the draft model drafts for all requests in the same calls, and reads prompts.
        events += self._propose(decoding, reading, load)
        failed = {request for request, event in events if isinstance(event, Failed)}
        going_on = [request for request in decoding if request not in failed]
        unread = [request for request in reading if request not in failed and request.prefill.n_unread]
        self._shorten(going_on, load)
        unread = self._read_spans(unread, events) if unread else unread

        calls: list[tuple[int, int]] = []  # requests that decode, and tokens of prompts
        for context in dict.fromkeys(request.main.context for request in [*going_on, *unread]):
            # 2 Evaluate: ONE call of the main model, with the proposals and chunks of new prompts.
            started = timer.clock()
            steps = self._verify_calls(context, going_on, events)
            chunks = self._chunks(context, unread, steps, events)
            if not steps and not chunks:
                continue
            logits_of_calls = context.decode([call for _, call in [*steps, *chunks]])
            self.n_calls += 1
            timer.lap("main model", sum(len(call.tokens) for _, call in [*steps, *chunks]))
            calls.append((len(steps), sum(len(call.tokens) for _, call in chunks)))
            for (request, call), logits in zip(steps, logits_of_calls, strict=False):
                try:
                    # 3 Verify: the output has exactly the main model's distribution, whatever was drafted.
                    verified = request.verify(logits)
                    timer.lap("verify")
                    # 4 Commit: the accepted path stays in the caches, everything else is rolled back.
                    step = request.commit(call, logits, verified)
                except Exception as error:  # such as a grammar that allows no token
                    events.append(_failure(request, error))
                else:
                    events.append((request, step))
                    count_step(self.statistics, step)
                    if request.has_ended:
                        events.append((request, Finished("stop", request.statistics)))
                timer.lap("commit")
            for request, call in chunks:
                try:
                    request.prefill.commit(call)
                except Exception as error:
                    events.append(_failure(request, error))
                self.statistics.prompt_n += len(call.tokens)
            timer.lap("commit")
            # The load counts the requests that began the step: one of them may have failed.
            if self._planner and len(steps) == len(decoding) > 1 and not chunks:
                n_drafted = sum(len(call.tokens) - 1 for _, call in steps)
                self._planner.observe(load, n_drafted, timer.clock() - started)

        self._count_time(decoding, calls, events)
        for request, event in events:
            if isinstance(event, Failed | Finished):
                self.remove(request)
        return events

    def _end_finished(self) -> Events:
        """Remove the requests whose answers are over."""
        events: Events = []
        for request in list(self.requests):
            if reason := request.reason_to_end():
                self.remove(request)
                events.append((request, Finished(reason, request.statistics)))
        return events

    def _split(self) -> tuple[list[Request], list[Request]]:
        """Return the requests that decode in this step, and those that read their prompt.

        A request decodes if its unevaluated tokens fit into the call. It waits while another one reads a
        prefix of its prompt that it can share.
        """
        left = {request.main.context: request.main.context.max_tokens for request in self.requests}
        decoding: list[Request] = []
        for request in self.requests:
            context = request.main.context
            if request.prefill.is_done and request.n_unevaluated <= left[context]:
                left[context] -= request.n_unevaluated
                decoding.append(request)
        all_reading = [request for request in self.requests if not request.prefill.is_done]
        reading: list[Request] = []
        for i, request in enumerate(all_reading):
            if not any(request.prefill.waits_for(other.prefill) for other in all_reading[:i]):
                reading.append(request)
                request.prefill.reuse_cache()
        return decoding, reading

    def _propose(self, decoding: Sequence[Request], reading: Sequence[Request], load: CallLoad) -> Events:
        """Draft for all requests, and let the draft model or head read what the main model has read."""
        contexts = [request.main.context for request in self.requests]
        events: Events = []
        outcomes = together(self._drafting(contexts, decoding, reading, load), self._timer)
        for request, outcome in zip([*decoding, *reading], outcomes, strict=True):
            if isinstance(outcome, Exception):
                events.append(_failure(request, outcome))
            elif outcome:  # a prompt has been read
                request.prefill.finish()
                events.append((request, Prefilled(request.statistics)))
        return events

    @staticmethod
    def _drafting(
        contexts: list[Context], decoding: Sequence[Request], reading: Sequence[Request], load: CallLoad
    ) -> Iterator[Awaitable[bool | None]]:
        """Yield the coroutine of each request that drafts, then of each that reads its prompt."""
        for request in decoding:
            context = request.main.context
            most = min(context.max_tokens, context.max_logits) // contexts.count(context)
            yield request.propose(most, load)
        read: list[Prefill] = []
        for request in reading:
            yield request.prefill.read_draft(read.copy())
            if not request.prefill.n_unread:
                read.append(request.prefill)

    def _load(self, decoding: Sequence[Request], reading: Sequence[Request]) -> CallLoad:
        """What the call of the requests that decode evaluates in this step."""
        contexts = [request.main.context for request in self.requests]
        n_running = max(map(contexts.count, contexts))
        share_calls = n_running > 1  # otherwise each has its own model
        n = len(decoding) if share_calls else 1
        n_unread = sum(request.prefill.n_unread for request in reading) if share_calls else 0
        n_again = sum(request.n_unevaluated - 1 for request in (decoding if share_calls else decoding[:1]))
        n_read = min(_chunk(len(decoding)), n_unread) + n_again
        return CallLoad(n, n_read, len(self.requests) - n, n_running)

    def _shorten(self, decoding: Sequence[Request], load: CallLoad) -> None:
        """Drop draft tokens that are not worth their time in the call that the requests share."""
        if self._planner and len({request.main.context for request in decoding}) == 1 < len(decoding):
            proposals = [request.proposal for request in decoding]
            self._timer.lap("propose")
            for request, kept in zip(
                decoding, self._planner.choose(proposals, load, self._timer.seconds), strict=True
            ):
                request.shorten(kept)

    def _verify_calls(self, context: Context, decoding: Sequence[Request], events: Events) -> RequestCalls:
        """Return the calls that evaluate the proposals; a request that can have none fails."""
        calls: RequestCalls = []
        for request in decoding:
            if request.main.context is context:
                try:
                    calls.append((request, request.verify_call()))
                except Exception as error:
                    events.append(_failure(request, error))
        return calls

    def _chunks(
        self, context: Context, unread: Sequence[Request], steps: RequestCalls, events: Events
    ) -> RequestCalls:
        """Return calls for the next parts of prompts, in addition to the requests that decode."""
        left = context.max_tokens - sum(len(call.tokens) for _, call in steps)
        left = min(left, _chunk(len(steps))) if steps else left
        chunks: RequestCalls = []
        for request in unread:
            if request.main.context is context and left > 0:
                try:
                    chunks.append((request, request.prefill.call(left)))
                    left -= len(chunks[-1][1].tokens)
                except Exception as error:
                    events.append(_failure(request, error))
        return chunks

    def _read_spans(self, unread: Sequence[Request], events: Events) -> list[Request]:
        """Read the spans that come next, in a call each; returns the requests that then go on with tokens."""
        left: list[Request] = []
        for request in unread:
            prefill = request.prefill
            try:
                if call := prefill.span_call:
                    self._timer.lap("propose")
                    request.main.context.decode([call])
                    self._timer.lap("images")
                    prefill.commit(call)
                    self.statistics.prompt_n += len(call.tokens)
                if prefill.n_unread and not (call and prefill.span_call):
                    left.append(request)
            except Exception as error:  # such as a picture that cannot be encoded
                events.append(_failure(request, error))
        return left

    def _count_time(self, decoding: Sequence[Request], calls: list[tuple[int, int]], events: Events) -> None:
        """Add the time of a step to its requests, their ledgers, and the totals; calls: see `book`."""
        self._timer.lap("commit")
        for request, event in events:
            if isinstance(event, Prefilled):  # its first step begins when the others' calls have returned
                request.prefill.count_time()
        for request in decoding:
            request.count_time(self._timer)
        steps = [(request, len(event.tokens)) for request, event in events if isinstance(event, Step)]
        waiting = [request for request in self.requests if not request.statistics.n_steps]
        book(self._timer, calls, steps, waiting)
        if decoding:
            self.statistics.predicted_s += self._timer.seconds
        else:
            self.statistics.prompt_s += self._timer.seconds


def _failure(request: Request, error: Exception) -> tuple[Request, Event]:
    """The end of one request, whatever it raised: the others go on."""
    return request, Failed(as_failure(error), request.statistics)


def _chunk(n_generating: int) -> int:
    """Prompt tokens to read in a call that so many requests wait for.

    A token of a large chunk costs less than one of a small chunk (4.6 and 6.5 ms for 96 and 32 tokens of a
    1.5 B model on two cores), but each request that generates waits for all of it: the product of the two is
    bounded.
    """
    return max(_MIN_CHUNK, _CHUNK // max(1, n_generating))
