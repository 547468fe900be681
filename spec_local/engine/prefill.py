"""Reading a prompt into the caches of both models, before the first step of a request."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spec_local.core.calls import Call, Task
from spec_local.core.proposal import ROOT
from spec_local.core.sequence import MainSequence, ModelSequence, common_prefix
from spec_local.core.span import Cell
from spec_local.engine.events import Statistics
from spec_local.errors import ContextOverflow, InvalidRequest, SpecLocalError
from spec_local.proposers.base import Proposer

_MIN_SHARED = 16  # tokens of another request's prompt that are worth waiting for


def check_prompt(main: ModelSequence, prompt: Sequence[int]) -> None:
    """Raise an error for a prompt that cannot be read.

    Raises:
        InvalidRequest: it has no tokens, ends with an image, or has only a part of one.
        ContextOverflow: it is longer than the context.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty: give some text")
    if min(prompt) < 0:
        _check_spans(prompt)
    if len(prompt) > (n_ctx := main.limits.n_ctx):
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens but the context only {n_ctx}: shorten it or raise `n_ctx`",
            len(prompt),
            n_ctx,
        )


def _check_spans(prompt: Sequence[int]) -> None:
    end = 0
    for i, token in enumerate(prompt):
        if i < end or not isinstance(token, Cell):
            continue
        end = i + len(token.span)
        if list(prompt[i:end]) != token.span.cells:
            raise InvalidRequest("the prompt has only a part of an image: give all of its tokens")
    if end == len(prompt):
        raise InvalidRequest("the prompt ends with an image: add text after it")


class Prefill:
    """A prompt that is being read: by the main model, by the head beside it, then by the draft model.

    The last token of the prompt is not read: the first step evaluates it, and gets its logits. For a model
    that keeps states, reading may end some tokens earlier: see `stops`.

    Args:
        main: the main model's sequence.
        history: the prompt.
        proposer: reads the prompt, too; None: plain decoding.
        statistics: of the request.
        clock: seconds.

    Attributes:
        is_done: whether both models have read the prompt.
    """

    def __init__(
        self,
        main: MainSequence,
        history: Sequence[int],
        proposer: Proposer | None,
        statistics: Statistics,
        clock: Callable[[], float],
    ) -> None:
        self.main, self.is_done = main, False
        self._history, self._prompt = history, history[:-1]
        self._proposer, self._head = proposer, proposer.head if proposer else None
        self._statistics, self._clock = statistics, clock
        self._started = 0.0
        self._stops: Sequence[int] = ()  # lengths at which the state is kept; the last one ends the reading
        self._draft: Task[None] | None = None  # the draft model's part

    def start(self) -> None:
        """Start timing the first token."""
        self._started = self._clock()

    def waits_for(self, other: "Prefill") -> bool:
        """Return whether another request is reading a prefix of the prompt that this one can share."""
        if self.main.context is not other.main.context:
            return False
        known = max(len(self.main.cached), len(other.main.cached))
        n = common_prefix(self._prompt, other._prompt)
        if self.main.limits.rollback != "any":
            n = max((stop for stop in other._stops if stop <= n), default=0)
        return n >= known + _MIN_SHARED

    def reuse_cache(self) -> None:
        """Reuse the longest cached prefix of the prompt, from this sequence or another one."""
        main, head = self.main, self._head
        if head and main.limits.rollback != "any" and self._statistics.prompt_n:
            return  # the head may lack the states of what is reused: all tokens read so far would be lost
        known = self._prompt
        if head:
            known = known[: head.reuse(known)]  # the main model evaluates the others for their states
        main.reuse(known)
        if not self._stops and (stops := main.stops(self._prompt)):
            self._stops, self._prompt = stops, self._prompt[: stops[-1]]

    @property
    def n_unread(self) -> int:
        """Tokens of the prompt that the main model has not evaluated."""
        return len(self._prompt) - len(self.main.cached)

    @property
    def n_read(self) -> int:
        """Tokens of the prompt in the main model's cache, which has those of an earlier one at the start."""
        return common_prefix(self.main.cached, self._prompt)

    @property
    def span_call(self) -> Call[Any] | None:
        """The main model's call for the span that comes next in the prompt; None: tokens come next."""
        start = len(self.main.cached)
        cell = self._prompt[start] if start < len(self._prompt) else 0
        if not isinstance(cell, Cell):
            return None
        return self.main.call(self._prompt[start : start + len(cell.span)], n_logits=0)

    def call(self, n_max: int) -> Call[Any]:
        """Return the main model's next call for the prompt, of 1 to `n_max` tokens."""
        start = len(self.main.cached)
        end = next((stop for stop in self._stops if stop > start), len(self._prompt))
        chunk = self._prompt[start : min(end, start + n_max)]
        if min(chunk) < 0:
            chunk = chunk[: next((i for i, token in enumerate(chunk) if isinstance(token, Cell)), len(chunk))]
        return self.main.call(chunk, range(ROOT, len(chunk) - 1), 0)

    def commit(self, call: Call[Any]) -> None:
        """Commit the tokens of a call."""
        start, path = len(self.main.cached), range(len(call.tokens))
        states = self.main.commit(path)
        if self._head and states is not None:
            self._head.receive(start, call.tokens, states)
        self._statistics.prompt_n += len(call.tokens)
        if len(self.main.cached) in {*self._stops, len(self._prompt)}:
            self.main.keep()
            if self._head:
                self._head.keep()

    async def read_draft(self, others: "Sequence[Prefill]") -> bool:
        """Make the next call of the head or draft model; returns whether the whole prompt has been read.

        Args:
            others: whose prompts the main model has read. The draft model waits while it is reading a prefix
                of one of them that this request can share.
        """
        if self.n_unread:
            if self._head:
                await self._head.read()
            return False
        if not self._proposer:
            return True
        if not self._draft:
            reading = (o for o in others if o.draft_is_reading)
            if any(common_prefix(self._prompt, o._prompt) >= _MIN_SHARED for o in reading):
                return False
            self._draft = Task(self._proposer.prefill(self._history))
        if self._draft.call:
            try:
                # The task itself appends the tokens.
                logits = await replace(self._draft.call, appends=False)
            except SpecLocalError as error:
                self._draft.resume(error)
            else:
                self._draft.resume(logits)
        if self._draft.call:
            return False
        if isinstance(failure := self._draft.outcome, Exception):
            raise failure
        return True

    @property
    def draft_is_reading(self) -> bool:
        """Whether the draft model is reading the prompt, after the main model."""
        return self._draft is not None and self._draft.call is not None

    def finish(self) -> None:
        """Note that both models have read the prompt: the next step generates."""
        self.is_done = True
        self._statistics.cached_n = len(self._prompt) - self._statistics.prompt_n

    def count_time(self) -> None:
        """Count the time up to the end of the step in which the prompt has been read."""
        self._statistics.prompt_s = self._clock() - self._started

    def close(self) -> None:
        """Stop reading."""
        if self._draft:
            self._draft.close()
