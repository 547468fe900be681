"""The base of OpenAI's two kinds of completions: choices, their streams and their usage."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from spec_local.errors import SpecLocalError
from spec_local.server.protocols import errors, openai_json
from spec_local.server.protocols.answer_so_far import AnswerSoFar
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.sampling_body import Part, ResponseFormat, SamplingBody, Stops
from spec_local.server.supervision.events import Delta, Event, Loaded, Reading, Token

MAX_CHOICES = 128
"""Answers to one request; OpenAI's limit, too."""


class _StreamOptions(Part):
    include_usage: bool | None = None


class OpenAIBody(SamplingBody):
    """The fields of both kinds."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stops | None = None
    response_format: ResponseFormat | None = None
    stream_options: _StreamOptions | None = None


class OpenAIExchange(Exchange):
    """An exchange with choices.

    Beyond OpenAI's protocol, it writes ``timings`` of a single answer, ``warnings`` if there are any (in the
    first and the last part of a stream), and, if the body has ``"marks": true``, an object ``specdec`` in
    each part of a stream, with the spans of its text.

    A body with several prompts has n requests for each.
    """

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """The value of ``object``; in streams it is `part_kind`."""
    part_kind: ClassVar[str]
    key: ClassVar[str]
    """The name of the part of an answer in a choice of a stream."""
    opening: ClassVar[Mapping[str, str] | str]
    """The part at the start of an answer. Empty: there is none."""

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        super().__init__(body, loaded)
        given: OpenAIBody = self._given
        self._with_logprobs = self.requests[0].settings.logprobs is not None
        self._with_usage = bool(given.stream_options and given.stream_options.include_usage)
        kind = self.part_kind if self.streams else self.kind
        self._head = openai_json.head(self.id_prefix, kind, self.model)

    @abstractmethod
    def _part(self, answer: AnswerSoFar, added: Delta) -> dict[str, Any] | str:
        """The part of an answer in a choice of a stream."""

    @abstractmethod
    def _whole(self, answer: AnswerSoFar) -> dict[str, Any]:
        """Return the fields of a choice for a whole answer."""

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        """Log probabilities of the next tokens of an answer."""

    def reading(self, index: int, event: Reading) -> Iterator[str]:
        if self._given.return_progress:
            yield self._chunk(index, type(self.opening)(), more=openai_json.progress(event))

    def write(self, index: int, event: Event) -> Iterator[str]:
        answer = self._answers[index]
        added = answer.add(event)
        if added is None:
            warnings = openai_json.warnings(self.requests)
            if self.opening or warnings:
                yield self._chunk(index, self.opening, more=warnings)
            return
        part = self._part(answer, added)
        tokens = added.tokens if self._with_logprobs else ()
        if part or tokens or (self._given.marks and (added.spans or added.n_drafted)):
            logprobs = self._logprobs(index, tokens) if tokens else None
            marks = {"specdec": openai_json.marks(added)} if self._given.marks else {}
            timings = openai_json.timings_so_far(answer) if self._given.timings_per_token else {}
            yield self._chunk(index, part, logprobs=logprobs, more=marks | timings)
        if answer.ended:
            nothing = type(part)()
            reason = openai_json.finish_reason(answer)
            timings = openai_json.timings(answer.ended)
            warnings = openai_json.warnings(self.requests, answer.ended)
            yield self._chunk(index, nothing, reason=reason, more={"timings": timings} | warnings)

    def end(self) -> Iterator[str]:
        if self._with_usage:
            yield openai_json.data(self._head | {"choices": [], "usage": self._usage()})
        yield openai_json.DONE

    @classmethod
    def refused(cls, error: SpecLocalError) -> str:
        return openai_json.data(errors.body_for("", error))

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        for answer, events in zip(self._answers, answers, strict=True):
            answer.add_all(events)
        ended = self._answers[0].ended if len(self._answers) == 1 else None
        # The times of answers that were generated together do not add up to that of the response.
        timings = {"timings": openai_json.timings(ended)} if ended else {}
        choices = [
            {
                "index": index,
                **self._whole(answer),
                "logprobs": self._logprobs(index, answer.tokens) if self._with_logprobs else None,
                "finish_reason": openai_json.finish_reason(answer),
            }
            for index, answer in enumerate(self._answers)
        ]
        closed = next((a.ended for a in self._answers if a.ended and a.ended.reasoning_closed_at), None)
        warnings = openai_json.warnings(self.requests, closed)
        return self._head | {"choices": choices, "usage": self._usage()} | timings | warnings

    def _usage(self) -> dict[str, Any]:
        return openai_json.usage(self._answers[:: self._given.n or 1], self._answers)

    def _chunk(
        self,
        index: int,
        part: Mapping[str, Any] | str,
        *,
        logprobs: Mapping[str, Any] | None = None,
        reason: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, self.key: part, "logprobs": logprobs, "finish_reason": reason}
        no_usage = {"usage": None} if self._with_usage else {}
        return openai_json.data(self._head | {"choices": [choice]} | no_usage | dict(more or {}))
