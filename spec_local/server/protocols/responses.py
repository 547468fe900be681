"""OpenAI's responses, without stored conversations: POST /v1/responses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from spec_local.chat.messages import json_object
from spec_local.errors import ContextOverflow, InvalidRequest, SpecLocalError
from spec_local.server.protocols import errors
from spec_local.server.protocols.answer_so_far import Blocks, Kind
from spec_local.server.protocols.chat_body import Function, chat_request, flat_functions_of, variables_of
from spec_local.server.protocols.history import Items, messages_of
from spec_local.server.protocols.openai_json import named, new_id, probabilities, warnings
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import (
    Count,
    Part,
    ResponseFormat,
    SamplingBody,
    limit,
    schema_of,
)
from spec_local.server.supervision.events import AnswerRequest, Event, Loaded

_TEXTS: Mapping[Kind, str] = {"reasoning": "reasoning_text", "content": "output_text"}
_IDS: Mapping[Kind, str] = {"reasoning": "rs_", "content": "msg_"}
_STARTS: Mapping[Kind, Mapping[str, Any]] = {
    "reasoning": {"type": "reasoning", "summary": []},
    "content": {"type": "message", "role": "assistant"},
}
_LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that asks for log probabilities."""


def _items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Tool(Function):
    type: Literal["function"]
    strict: bool | None = None


class _TextConfig(Part):
    format: ResponseFormat | None = None


class _Reasoning(Part):
    effort: str | None = None


class _Body(SamplingBody):
    input: Annotated[Items, BeforeValidator(_items)] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[_Tool] | None, BeforeValidator(flat_functions_of)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: _Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise InvalidRequest(
                    f"{name} is not supported, nothing is stored: give all messages as input"
                )
        if self.background:
            raise InvalidRequest("background is not supported: leave it out, and wait for the response")
        form = self.text.format if self.text else None
        settings = self.settings(
            max_tokens=limit(self.max_output_tokens),
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
            json_schema=schema_of(form, "text.format"),
        )
        effort = self.reasoning.effort if self.reasoning else None
        request = chat_request(
            settings,
            messages_of(self.input, "input", self.instructions, RequestImages.of(loaded)),
            self.tools or (),
            self.tool_choice,
            schemas="tools[{}].parameters",
            variables=variables_of(effort, self.chat_template_kwargs),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            warnings=self.warnings(form, "text.format"),
            **self.more(),
        )
        return [request]


class Responses(Exchange):
    """A response. Reasoning is an item of the output."""

    body = _Body

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        super().__init__(body, loaded)
        given, request = self._given, self.requests[0]
        self._answer, self._blocks = self._answers[0], Blocks()
        self._output: list[dict[str, Any]] = []
        self._n_events = 0
        self._logprobs: list[dict[str, Any]] = []
        """Of the text that grows, and of tokens that have no text yet."""
        self._n_written = 0
        """Number of those that belong to the text."""
        sampling, choice = request.settings.sampling, request.tool_choice
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "instructions": given.instructions,
            "max_output_tokens": request.settings.max_tokens,
            "metadata": given.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": given.reasoning.effort if given.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": _choice(given.tool_choice, choice),
            "tools": [tool.model_dump() for tool in given.tools or ()],
            "top_logprobs": given.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            **warnings(self.requests),
        }

    def begin(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def write(self, index: int, event: Event) -> Iterator[str]:
        added = self._answer.add(event)
        if added and self._given.has_logprobs and (added.content or not added.reasoning):
            self._logprobs += map(probabilities, added.tokens)
        for change in self._blocks.changes(added, is_last=bool(self._answer.ended)) if added else ():
            match change:
                case ("open", kind, _):
                    yield self._start(new_id(_IDS[kind]), **_STARTS[kind], content=[])
                    yield self._item_event(
                        "content_part.added", content_index=0, part=_part(kind, "") | self._more(kind)
                    )
                case ("text", kind, text):
                    n_before = self._n_written
                    if kind == "content":
                        self._n_written = len(self._logprobs)
                    more = self._more(kind, n_before)
                    yield self._item_event(f"{_TEXTS[kind]}.delta", content_index=0, delta=text, **more)
                case ("close", kind, text):
                    more = self._more(kind)
                    part = _part(kind, text) | more
                    yield self._item_event(f"{_TEXTS[kind]}.done", content_index=0, text=text, **more)
                    yield self._item_event("content_part.done", content_index=0, part=part)
                    yield self._stop("incomplete" if self._is_cut else "completed", content=[part])
                    self._logprobs, self._n_written = self._logprobs[self._n_written :], 0
                case ("open call", call):
                    start = {"type": "function_call", "call_id": call.id, "name": call.name}
                    yield self._start(new_id("fc_"), **start, arguments="")
                case ("arguments", text):
                    yield self._item_event("function_call_arguments.delta", delta=text)
                case ("close call", call):
                    function = {"name": call.name, "arguments": call.arguments}
                    yield self._item_event("function_call_arguments.done", **function)
                    is_cut = self._is_cut and json_object(call.arguments) is None
                    yield self._stop("incomplete" if is_cut else "completed", arguments=call.arguments)
        if self._answer.ended:
            response = self._response()
            yield self._event(f"response.{response['status']}", response=response)

    @classmethod
    def refused(cls, error: SpecLocalError) -> str:
        return named({"type": "error", **_failure(error), "param": None, "sequence_number": 0})

    def failed(self, error: SpecLocalError) -> str:
        failure = {"status": "failed", "error": _failure(error)}
        return self._event("response.failed", response=self._response() | failure)

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        for event in answers[0]:
            list(self.write(0, event))  # the response is what the stream makes
        return self._response()

    @property
    def _is_cut(self) -> bool:
        ended = self._answer.ended
        return ended is not None and ended.reason in ("length", "context")

    def _response(self) -> dict[str, Any]:
        answer = self._answer
        status, details, usage, completed_at = "in_progress", None, None, None
        if answer.ended:
            status = "incomplete" if self._is_cut else "completed"
            details = {"reason": "max_output_tokens"} if self._is_cut else None
            completed_at = None if self._is_cut else int(time.time())
            n_generated = answer.statistics.predicted_n
            usage = {
                "input_tokens": answer.n_prompt,
                "input_tokens_details": {"cached_tokens": answer.n_cached, "cache_write_tokens": 0},
                "output_tokens": n_generated,
                "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
                "total_tokens": answer.n_prompt + n_generated,
            }
        return (
            self._head
            | warnings(self.requests, answer.ended)
            | {
                "status": status,
                "completed_at": completed_at,
                "error": None,
                "incomplete_details": details,
                "output": self._output,
                "usage": usage,
            }
        )

    def _more(self, kind: Kind, first: int = 0) -> dict[str, Any]:
        """Other fields of events with text: its log probabilities from the first one on."""
        return {"logprobs": self._logprobs[first : self._n_written]} if kind == "content" else {}

    def _start(self, id: str, **item: Any) -> str:
        self._output.append({"id": id, **item, "status": "in_progress"})
        return self._output_event("added")

    def _stop(self, status: str, **content: Any) -> str:
        self._output[-1] |= {**content, "status": status}
        return self._output_event("done")

    def _output_event(self, what: str) -> str:
        index = len(self._output) - 1
        return self._event(f"response.output_item.{what}", output_index=index, item=self._output[-1])

    def _item_event(self, kind: str, **more: Any) -> str:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **place, **more)

    def _event(self, kind: str, **more: Any) -> str:
        event = {"type": kind, "sequence_number": self._n_events, **more}
        self._n_events += 1
        return named(event)


def _failure(error: SpecLocalError) -> dict[str, str]:
    code = "invalid_prompt" if errors.status_of(error) < 500 else "server_error"
    if isinstance(error, ContextOverflow):
        code = "context_length_exceeded"  # by which Codex shortens the prompt
    message = errors.body_for("", error)["error"]["message"]
    return {"code": code, "message": message}  # OpenAI's clients know no other codes


def _choice(given: object, choice: str) -> object:
    """The tool_choice of a response."""
    if isinstance(given, dict) and given["type"] == "allowed_tools":
        return given
    return choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    return {"type": _TEXTS[kind], "text": text} | ({"annotations": []} if kind == "content" else {})
