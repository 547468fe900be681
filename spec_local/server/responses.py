"""OpenAI's responses, without stored conversations: POST /v1/responses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from spec_local.chat.messages import Message, json_object
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.server import errors
from spec_local.server.answer_so_far import AnswerSoFar, Blocks, Kind
from spec_local.server.chat_body import Function, Name, Text, choice_of, known, tool_warnings
from spec_local.server.events import AnswerRequest, Event, Loaded
from spec_local.server.openai_json import named, new_id, warnings
from spec_local.server.protocol import Exchange
from spec_local.server.sampling_body import Count, Part, ResponseFormat, SamplingBody, limit, read, schema_of


class _MessageItem(Part):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class _CallItem(Part):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class _OutputItem(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: Text


class _ReasoningText(Part):
    text: str


class _ReasoningItem(Part):
    type: Literal["reasoning"]
    content: list[_ReasoningText] | None = None


_TEXTS: Mapping[Kind, str] = {"reasoning": "reasoning_text", "content": "output_text"}
_IDS: Mapping[Kind, str] = {"reasoning": "rs_", "content": "msg_"}
_STARTS: Mapping[Kind, Mapping[str, Any]] = {
    "reasoning": {"type": "reasoning", "summary": []},
    "content": {"type": "message", "role": "assistant"},
}
_MORE: Mapping[Kind, dict[str, Any]] = {"reasoning": {}, "content": {"logprobs": []}}
"""Other fields of the events with text."""
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_Item = Annotated[
    _MessageItem | _CallItem | _OutputItem | _ReasoningItem,
    Field(discriminator="type"),
    known(_ITEMS, default="message"),
]


def _items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Tool(Function):
    type: Literal["function"]
    strict: bool | None = None


class _TextConfig(Part):
    format: ResponseFormat | None = None


class _Body(SamplingBody):
    input: Annotated[list[_Item], BeforeValidator(_items)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[Annotated[_Tool, known(("function",))]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None

    def request(self) -> AnswerRequest:
        if self.previous_response_id is not None or self.conversation is not None:
            raise InvalidRequest(
                "previous_response_id and conversation are not supported: give all messages as input"
            )
        if self.background:
            raise InvalidRequest("background is not supported: leave it out, and wait for the response")
        form = self.text.format if self.text else None
        settings = self.settings(
            max_tokens=limit(self.max_output_tokens),
            json_schema=schema_of(form, "text.format"),
        )
        tools = self.tools or ()
        tool_choice = choice_of(self.tool_choice, tools)
        return AnswerRequest(
            settings,
            self._messages(),
            [tool.tool() for tool in tools],
            tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            warnings=[
                *self.warnings(form, "text.format"),
                *tool_warnings(tools, tool_choice, settings.json_schema, "tools[{}].parameters"),
            ],
        )

    def _messages(self) -> Sequence[Message]:
        """The items as messages: calls and reasoning are parts of the assistant's."""
        if not self.input:
            raise InvalidRequest("input is empty: give text, or at least one message")
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        reasoning = ""

        def assistant(content: str) -> dict[str, Any]:
            nonlocal reasoning
            thought = {"reasoning_content": reasoning} if reasoning else {}
            reasoning = ""
            messages.append({"role": "assistant", "content": content} | thought)
            return messages[-1]

        for item in self.input:
            match item:
                case _MessageItem(role="assistant", content=content):
                    assistant(content)
                case _MessageItem(role=role, content=content):
                    messages.append({"role": "user" if role == "user" else "system", "content": content})
                case _CallItem():
                    is_next = messages and messages[-1]["role"] == "assistant" and not reasoning
                    message = messages[-1] if is_next else assistant("")
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
                case _OutputItem():
                    messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
                case _ReasoningItem():
                    reasoning += "".join(part.text for part in item.content or ())
        if not messages:
            raise InvalidRequest("input has no message: give text, or at least one message")
        return messages  # type: ignore[return-value]


class Responses(Exchange):
    """A response. Reasoning is an item of the output."""

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        given = read(_Body, body)
        request = given.request()
        self.requests, self.streams = [request], bool(given.stream)
        self._answer, self._blocks = AnswerSoFar(), Blocks()
        self._output: list[dict[str, Any]] = []
        self._n_events = 0
        sampling, choice = request.settings.sampling, request.tool_choice
        is_named = choice not in ("auto", "none", "required")
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": given.model or loaded.name,
            "instructions": given.instructions,
            "max_output_tokens": request.settings.max_tokens,
            "metadata": {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": {"type": "function", "name": choice} if is_named else choice,
            "tools": [tool.model_dump() for tool in given.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            **warnings(self.requests),
        }

    def begin(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def write(self, index: int, event: Event) -> Iterator[str]:
        added = self._answer.add(event)
        for change in self._blocks.changes(added, is_last=bool(self._answer.ended)) if added else ():
            match change:
                case ("open", kind, _):
                    yield self._start(new_id(_IDS[kind]), **_STARTS[kind], content=[])
                    yield self._item_event("content_part.added", content_index=0, part=_part(kind, ""))
                case ("text", kind, text):
                    yield self._item_event(
                        f"{_TEXTS[kind]}.delta", content_index=0, delta=text, **_MORE[kind]
                    )
                case ("close", kind, text):
                    part = _part(kind, text)
                    yield self._item_event(f"{_TEXTS[kind]}.done", content_index=0, text=text, **_MORE[kind])
                    yield self._item_event("content_part.done", content_index=0, part=part)
                    yield self._stop("incomplete" if self._is_cut else "completed", content=[part])
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

    def failed(self, error: SpecLocalError) -> str:
        code = "invalid_prompt" if errors.status_of(error) < 500 else "server_error"
        failure = {"status": "failed", "error": {"code": code, "message": str(error)}}
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
        status, details, usage = "in_progress", None, None
        if answer.ended:
            status = "incomplete" if self._is_cut else "completed"
            details = {"reason": "max_output_tokens"} if self._is_cut else None
            n_generated = answer.statistics.predicted_n
            usage = {
                "input_tokens": answer.n_prompt,
                "input_tokens_details": {"cached_tokens": answer.n_cached, "cache_write_tokens": 0},
                "output_tokens": n_generated,
                "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
                "total_tokens": answer.n_prompt + n_generated,
            }
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": self._output,
            "usage": usage,
        }

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


def _part(kind: Kind, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _TEXTS[kind], "text": text}
    return part | ({"annotations": []} if kind == "content" else {}) | _MORE[kind]
