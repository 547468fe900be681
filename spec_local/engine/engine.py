"""The engine: speculative decoding, one step after the other, for all requests at the same time.

Requests advance at different rates. One that fails or ends disturbs no other.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spec_local.core.calls import Call, Calls, together
from spec_local.core.language_model import Context
from spec_local.core.proposal import Proposal
from spec_local.core.timer import Timer
from spec_local.engine.events import Event, Failed, Finished, Prefilled, Statistics
from spec_local.engine.prefill import Prefill
from spec_local.engine.request import Request
from spec_local.errors import InvalidRequest, SpecLocalError

_CHUNK = 32  # prompt tokens per call while other requests generate: they wait for them

Events = list[tuple[Request, Event]]


class Planner(Protocol):
    """Decides how much of the requests' proposals is verified: `spec_local.policies.sharing.SharedCalls`."""

    def begin(self, n_rows: int, n_read: int, n_others: int, n_running: int) -> None:
        """Before the requests propose, and the draft model reads prompts.

        Args:
            n_rows: requests that share a call; as long as all read their prompts, those that will.
            n_read: tokens that this call will evaluate besides: prompts, and accepted tokens again.
            n_others: requests that are evaluated in calls of their own meanwhile.
            n_running: requests that share a call as soon as all prompts have been read.
        """

    def choose(self, proposals: Sequence[Proposal], spent: float) -> Sequence[Proposal]:
        """The parts of the requests' proposals to verify, `spent` seconds after the step began."""

    def observe(self, n_drafted: int, seconds: float) -> None:
        """Learn how long a call of all requests took, with so many draft tokens, up to the commits."""


class Engine:
    """Requests that advance together.

    Args:
        planner: divides calls among requests; None: what the requests propose is verified.
        statistics: receives the counts over all requests. Times are those of the engine's steps: its rate is
            the total, and `prompt_s` the time of the steps in which no request generated.

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
            InvalidRequest: the main model cannot evaluate so many requests in one call.
        """
        context = request.main.context
        n = 1 + sum(other.main.context is context for other in self.requests)
        if n > min(context.max_tokens, context.max_logits):
            raise InvalidRequest(f"{n} requests exceed the batch size of {context.max_tokens}: start fewer")
        self.requests.append(request)
        if request.prefill:
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
            BackendError: a call of the main model failed; the requests have not advanced.
        """
        events = self._finished()
        if not self.requests:
            return events
        timer = self._timer
        timer.start()
        decoding, prefills = self._split()

        # 1 Propose: the draft model drafts for all requests in the same calls, and reads prompts.
        events += self._propose(decoding, prefills)
        failed = {request for request, event in events if isinstance(event, Failed)}
        going_on = [request for request in decoding if request not in failed]
        unread = [p for request, p in prefills.items() if p.n_unread and request not in failed]
        self._shorten(going_on)

        mains = [*(request.main for request in going_on), *(prefill.main for prefill in unread)]
        for context in dict.fromkeys(main.context for main in mains):
            # 2 Evaluate: ONE call of the main model, with the proposals and chunks of new prompts.
            started = timer.clock()
            mine = [request for request in going_on if request.main.context is context]
            steps = [(request, request.verify_call()) for request in mine]
            n_tokens = sum(len(call.tokens) for _, call in steps)
            chunks = self._chunks(context, unread, n_tokens)
            answers = context.decode([call for _, call in [*steps, *chunks]])
            self.n_calls += 1
            timer.lap("main model")

            for (request, call), logits in zip(steps, answers, strict=False):
                try:
                    # 3 Verify: the output has exactly the main model's distribution, whatever was drafted.
                    verified = request.verify(logits)
                    timer.lap("verify")
                    # 4 Commit: the accepted path stays in the caches, all else is rolled back.
                    step = request.commit(call, logits, verified)
                except SpecLocalError as error:  # the grammar allows no token
                    events.append((request, Failed(error, request.statistics)))
                else:
                    events.append((request, step))
                    self.statistics.count_step(len(step.tokens), step.proposal, step.n_accepted)
                    if request.has_ended:
                        events.append((request, Finished("stop", request.statistics)))
                timer.lap("commit")
            for prefill, call in chunks:
                prefill.commit(call)
                self.statistics.prompt_n += len(call.tokens)
            if self._planner and len(steps) > 1 and not chunks:
                self._planner.observe(n_tokens - len(steps), timer.clock() - started)

        self._count_time(decoding)
        for request, event in events:
            if isinstance(event, Failed | Finished):
                self.remove(request)
        return events

    def _finished(self) -> Events:
        """Remove the requests whose answers are over."""
        events: Events = []
        for request in list(self.requests):
            if reason := request.reason_to_end():
                self.remove(request)
                events.append((request, Finished(reason, request.statistics)))
        return events

    def _split(self) -> tuple[list[Request], dict[Request, Prefill]]:
        """Return the requests that decode in this step, and those that read their prompt.

        Those decode whose unevaluated tokens fit in a call. A prompt may wait for another one that is read.
        """
        left = {request.main.context: request.main.context.max_tokens for request in self.requests}
        decoding: list[Request] = []
        prefills: dict[Request, Prefill] = {}
        for request in self.requests:
            context = request.main.context
            if request.prefill:
                prefills[request] = request.prefill
            elif request.n_unevaluated <= left[context]:
                left[context] -= request.n_unevaluated
                decoding.append(request)
        reading = list(prefills.values())
        for i, (request, prefill) in enumerate(list(prefills.items())):
            if any(map(prefill.waits_for, reading[:i])):
                del prefills[request]
        for prefill in prefills.values():
            prefill.reuse_cache()
        return decoding, prefills

    def _propose(self, decoding: Sequence[Request], prefills: dict[Request, Prefill]) -> Events:
        """Draft for all requests, and let the draft model or head read what the main model has read."""
        n_rows = Counter(request.main.context for request in self.requests)
        self._announce(decoding, list(prefills.values()), max(n_rows.values()))
        tasks: list[Calls[bool | None]] = []
        for request in decoding:
            context = request.main.context
            tasks.append(request.propose(min(context.max_tokens, context.max_logits) // n_rows[context]))
        read = [prefill for prefill in prefills.values() if not prefill.n_unread]
        for prefill in prefills.values():
            others = read[: read.index(prefill)] if prefill in read else ()
            tasks.append(prefill.draft(others))
        events: Events = []
        for request, outcome in zip([*decoding, *prefills], together(tasks, self._timer), strict=True):
            if isinstance(outcome, SpecLocalError):
                events.append((request, Failed(outcome, request.statistics)))
            elif outcome and request.prefill:
                request.prefill.finish()
                request.prefill = None
                events.append((request, Prefilled(request.statistics)))
        return events

    def _announce(self, decoding: Sequence[Request], prefills: Sequence[Prefill], n_running: int) -> None:
        """Tell the planner what this step's call will evaluate."""
        if not self._planner:
            return
        together = n_running > 1  # otherwise each has its own model
        n = (len(decoding) or n_running) if together else 1
        n_unread = sum(prefill.n_unread for prefill in prefills) if together and decoding else 0
        n_again = sum(request.n_unevaluated - 1 for request in (decoding if together else decoding[:1]))
        self._planner.begin(n, min(_CHUNK, n_unread) + n_again, len(self.requests) - n, n_running)

    def _shorten(self, decoding: Sequence[Request]) -> None:
        """Drop draft tokens that would not repay their time in the call that the requests share."""
        if self._planner and len({request.main.context for request in decoding}) == 1 < len(decoding):
            proposals = [request.proposal for request in decoding]
            self._timer.lap("propose")
            for request, kept in zip(
                decoding, self._planner.choose(proposals, self._timer.seconds), strict=True
            ):
                request.shorten(kept)

    def _chunks(
        self, context: Context, unread: Sequence[Prefill], n_tokens: int
    ) -> list[tuple[Prefill, Call[Any]]]:
        """Return calls for the next parts of prompts, beside `n_tokens` of requests that decode."""
        left = min(context.max_tokens - n_tokens, _CHUNK if n_tokens else context.max_tokens)
        chunks: list[tuple[Prefill, Call[Any]]] = []
        for prefill in unread:
            if prefill.main.context is context and left > 0:
                chunks.append((prefill, prefill.call(left)))
                left -= len(chunks[-1][1].tokens)
        return chunks

    def _count_time(self, decoding: Sequence[Request]) -> None:
        """Add the time of a step to the requests that decoded in it, and to the whole."""
        self._timer.lap("commit")
        for request in decoding:
            request.count_time(self._timer)
        if decoding:
            self.statistics.predicted_s += self._timer.seconds
        else:
            self.statistics.prompt_s += self._timer.seconds
