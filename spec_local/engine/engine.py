"""The scheduler: in each step, one call of the main model for all requests.

1. Propose: the draft model drafts for all requests in the same calls.
2. Evaluate: the main model evaluates the proposals of all requests in ONE call, and in it a chunk of the
   prompt of requests that have just started.
3. Verify and commit: each request by itself, with its own rng.

Requests advance at different rates. A request that fails or ends disturbs no other.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spec_local.core.language_model import Call, Calls, Logits, run_together
from spec_local.core.proposal import Proposal
from spec_local.engine.events import Event, Failed, Finished, Prefilled, Statistics
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
        self.planner, self._clock = planner, clock

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
        request.start()

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
        events: Events = []
        for request in list(self.requests):
            if reason := request.reason_to_end():
                self.remove(request)
                events.append((request, Finished(reason, request.statistics)))
        if not self.requests:
            return events
        started = self._clock()
        generating = self._generating()
        reading = self._readers()
        events += self._draft(generating, reading)
        failed = {request for request, event in events if isinstance(event, Failed)}
        going_on = [request for request in generating if request not in failed]
        self._shorten(going_on, started)
        events += self._evaluate(going_on, [request for request in reading if request.n_unread])
        seconds = self._clock() - started
        for request in generating:
            request.count_seconds(seconds)
        if generating:
            self.statistics.predicted_s += seconds
        else:
            self.statistics.prompt_s += seconds
        for request, event in events:
            if isinstance(event, Failed | Finished):
                self.remove(request)
        return events

    def _generating(self) -> list[Request]:
        """The requests that generate in this step: all whose unevaluated tokens fit in a call."""
        left = {request.main.context: request.main.context.max_tokens for request in self.requests}
        found: list[Request] = []
        for request in self.requests:
            if not request.is_reading and request.n_unevaluated <= left[request.main.context]:
                left[request.main.context] -= request.n_unevaluated
                found.append(request)
        return found

    def _readers(self) -> list[Request]:
        """The requests that read their prompt in this step: one may wait for what another one is reading."""
        reading = [request for request in self.requests if request.is_reading]
        found = [request for i, request in enumerate(reading) if not any(map(request.waits_for, reading[:i]))]
        for request in found:
            request.reuse_cache()
        return found

    def _draft(self, generating: Sequence[Request], reading: Sequence[Request]) -> Events:
        """Draft for all requests, and let the draft model read prompts that the main model has read."""
        n_requests = Counter(request.main.context for request in self.requests)
        if self.planner:
            n_running = max(n_requests.values())
            together = n_running > 1  # otherwise each has its own model
            n = (len(generating) or n_running) if together else 1
            n_unread = sum(request.n_unread for request in reading) if together and generating else 0
            n_read = min(_CHUNK, n_unread)
            n_read += sum(
                request.n_unevaluated - 1 for request in (generating if together else generating[:1])
            )
            self.planner.begin(n, n_read, len(self.requests) - n, n_running)
        tasks: list[Calls[bool]] = []
        for request in generating:
            context = request.main.context
            share = min(context.max_tokens, context.max_logits) // n_requests[context]
            tasks.append(request.propose(share))
        with_draft = [request for request in reading if not request.n_unread]
        tasks += [request.read_with_draft(with_draft[:i]) for i, request in enumerate(with_draft)]
        with_head = [request for request in reading if request.n_unread and request.has_head]
        tasks += [request.read_with_head() for request in with_head]
        events: Events = []
        drafting = [*generating, *with_draft, *with_head]
        for request, result in zip(drafting, run_together(tasks), strict=True):
            if isinstance(result, SpecLocalError):
                events.append((request, Failed(result, request.statistics)))
            elif result and request.is_reading:
                request.end_reading()
                events.append((request, Prefilled(request.statistics)))
        return events

    def _shorten(self, generating: Sequence[Request], started: float) -> None:
        if self.planner and len({request.main.context for request in generating}) == 1 < len(generating):
            proposals = self.planner.choose(
                [request.proposal for request in generating], self._clock() - started
            )
            for request, proposal in zip(generating, proposals, strict=True):
                request.shorten(proposal)

    def _evaluate(self, generating: Sequence[Request], reading: Sequence[Request]) -> Events:
        """Call the main model, once for all requests that share it, and commit the result."""
        events: Events = []
        for context in dict.fromkeys(request.main.context for request in [*generating, *reading]):
            started = self._clock()
            steps = [
                (request, request.verify_call()) for request in generating if request.main.context is context
            ]
            n_tokens = sum(len(call.tokens) for _, call in steps)
            n_drafted = n_tokens - len(steps)  # or tokens that are evaluated again
            n_free = min(context.max_tokens - n_tokens, _CHUNK if steps else context.max_tokens)
            prompts: list[tuple[Request, Call[Any]]] = []
            for request in reading:
                if request.main.context is context and n_free > 0:
                    prompts.append((request, request.prompt_call(n_free)))
                    n_free -= len(prompts[-1][1].tokens)
            answers = context.decode([call for _, call in [*steps, *prompts]])
            self.n_calls += 1
            for (request, call), logits in zip(steps, answers, strict=False):
                events += self._commit(request, call, logits)
            for request, call in prompts:
                request.commit_prompt(call)
                self.statistics.prompt_n += len(call.tokens)
            if self.planner and len(steps) > 1 and not prompts:
                self.planner.observe(n_drafted, self._clock() - started)
        return events

    def _commit(self, request: Request, call: Call[Any], logits: Logits) -> Events:
        proposal = request.proposal
        try:
            step = request.commit(call, logits)
        except SpecLocalError as error:  # the grammar allows no token
            return [(request, Failed(error, request.statistics))]
        self.statistics.count_step(len(step.tokens), proposal, step.n_accepted)
        if request.has_ended:
            return [(request, step), (request, Finished("stop", request.statistics))]
        return [(request, step)]
