"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from spec_local import answer_json
from spec_local.core.text import printable
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.server import openai_json
from spec_local.server.answer_so_far import AnswerSoFar
from spec_local.server.chat_body import ChatMessage, Tool, choice_of, messages_of
from spec_local.server.events import AnswerRequest, Delta, Event, Loaded, Token
from spec_local.server.sampling_body import (
    Count,
    Part,
    ResponseFormat,
    SamplingBody,
    Stops,
    choices,
    limit,
    read,
)

if TYPE_CHECKING:
    from spec_local.chat.tool_calls import ToolCall


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool | None = None


class _Body(SamplingBody):
    messages: list[ChatMessage]
    n: Annotated[int, Field(ge=1, le=openai_json.MAX_CHOICES)] | None = None
    stop: Stops | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    stream_options: StreamOptions | None = None

    def requests(self) -> list[AnswerRequest]:
        if self.functions or self.function_call:
            raise InvalidRequest("functions and function_call are not supported: give tools and tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: give true for it")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        form = self.response_format.to_json_schema() if self.response_format else None
        settings = self.settings(
            max_tokens=limit(most),
            stops=self.stop,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=form,
        )
        functions = [tool.function for tool in self.tools or ()]
        tool_choice = choice_of(self.tool_choice, functions)
        messages, tools = messages_of(self.messages), [function.tool() for function in functions]
        return [
            AnswerRequest(each, messages, tools, tool_choice, marks=bool(self.marks))
            for each in choices(settings, self.n or 1)
        ]


class ChatCompletions:
    """An exchange: see `spec_local.server.protocol.Exchange`.

    Beyond OpenAI's protocol: ``reasoning_content`` in messages, ``timings`` of a single answer, and, if the
    body has ``"marks": true``, an object ``specdec`` in each part of a stream, with the spans of its text.
    """

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        given = read(_Body, body)
        self.requests: Sequence[AnswerRequest] = given.requests()
        self.streams = bool(given.stream)
        self._logprobs, self._marks = bool(given.logprobs), bool(given.marks)
        self._with_usage = bool(given.stream_options and given.stream_options.include_usage)
        self._model = given.model or loaded.name
        self._head = openai_json.head("chatcmpl-", "chat.completion.chunk", self._model)
        self._answers = [AnswerSoFar() for _ in self.requests]

    def begin(self) -> Iterator[str]:
        yield from ()

    def write(self, index: int, event: Event) -> Iterator[str]:
        answer = self._answers[index]
        n_calls = len(answer.calls)
        added = answer.add(event)
        if added is None:
            yield self._chunk(index, {"role": "assistant", "content": ""})
            return
        delta: dict[str, Any] = {}
        if added.reasoning:
            delta["reasoning_content"] = added.reasoning
        if added.content:
            delta["content"] = added.content
        if added.tool_calls:
            delta["tool_calls"] = [
                {"index": n_calls + i} | _call(call) for i, call in enumerate(added.tool_calls)
            ]
        tokens = added.tokens if self._logprobs else ()
        if delta or tokens or (self._marks and (added.spans or added.n_drafted)):
            marks = {"specdec": _marks(added)} if self._marks else {}
            yield self._chunk(index, delta, logprobs=_logprobs(tokens) if tokens else None, more=marks)
        if answer.ended:
            reason = openai_json.finish_reason(answer.ended, called=bool(answer.calls))
            yield self._chunk(index, {}, reason, more={"timings": openai_json.timings(answer.ended)})

    def end(self) -> Iterator[str]:
        if self._with_usage:
            total = openai_json.usage(self._answers[:1], self._answers)
            yield openai_json.data(self._head | {"choices": [], "usage": total})
        yield openai_json.DONE

    def failed(self, error: SpecLocalError) -> Iterator[str]:
        yield openai_json.failure(error)

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        for answer, events in zip(self._answers, answers, strict=True):
            for event in events:
                answer.add(event)
        return (
            self._head
            | {
                "object": "chat.completion",
                "choices": [self._choice(i, answer) for i, answer in enumerate(self._answers)],
                "usage": openai_json.usage(self._answers[:1], self._answers),
            }
            | openai_json.timings_of(self._answers)
        )

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        *,
        logprobs: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        no_usage = {"usage": None} if self._with_usage else {}
        return openai_json.data(self._head | {"choices": [choice]} | no_usage | dict(more or {}))

    def _choice(self, index: int, answer: AnswerSoFar) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content if answer.content or not answer.calls else None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(answer.tokens) if self._logprobs else None,
            "finish_reason": openai_json.finish_reason(answer.ended, called=bool(answer.calls)),
        }


def _call(call: "ToolCall") -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [_token(token) for token in tokens], "refusal": None}


def _token(token: Token) -> dict[str, Any]:
    top = [answer_json.token(other.id, other.piece, other.logprob) for other in token.top]
    return answer_json.token(token.id, token.piece, token.logprob) | {"top_logprobs": top}


def _marks(added: Delta) -> dict[str, Any]:
    """Which text was drafted, and by what."""
    return {
        "spans": [
            {
                "text": printable(span.text),
                "kind": span.kind,
                "rejected": [printable(text) for text in span.rejected],
            }
            for span in added.spans
        ],
        "proposer": added.source,
        "draft_n": added.n_drafted,
        "draft_n_accepted": added.n_accepted,
    }
