"""Anthropic's messages: POST /v1/messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from spec_local.errors import SpecLocalError
from spec_local.server.protocols import errors
from spec_local.server.protocols.answer_so_far import AnswerSoFar, Blocks, Kind, arguments_of
from spec_local.server.protocols.chat_body import (
    Function,
    Name,
    Text,
    chat_request,
    flat_functions_of,
    variables_of,
)
from spec_local.server.protocols.history import Items, messages_of
from spec_local.server.protocols.openai_json import named, new_id, warnings
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import (
    Part,
    ResponseFormat,
    SamplingBody,
    Stops,
    limit,
    schema_of,
)
from spec_local.server.supervision.events import AnswerRequest, Event, Loaded
from spec_local.text import printable

_TYPES: Mapping[Kind, str] = {"reasoning": "thinking", "content": "text"}


def _custom(tools: object) -> object:
    """The tools that are functions: those of other types do not exist here."""
    if not isinstance(tools, list):
        return tools
    tools = [tool | {"type": "function"} if _is_custom(tool) else tool for tool in tools]
    return [
        {**tool, "input_schema": tool.get("parameters")} if isinstance(tool, dict) else tool
        for tool in flat_functions_of(tools)
    ]


def _is_custom(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") in (None, "custom")


class _Tool(Part):
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.input_schema)


class _ThinkingConfig(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    display: str | None = None
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class _OutputConfig(Part):
    format: ResponseFormat | None = None
    effort: str | None = None


class _Body(SamplingBody):
    messages: Items
    system: Text | None = None
    stop_sequences: Stops | None = None
    tools: Annotated[list[_Tool] | None, BeforeValidator(_custom)] = None
    tool_choice: Any = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_format: ResponseFormat | None = None

    @property
    def shows_thinking(self) -> bool:
        wanted = self.thinking
        return wanted is not None and wanted.type != "disabled" and wanted.display != "omitted"

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        form, field = self.output_config.format if self.output_config else None, "output_config.format"
        if self.output_format is not None:  # its name in the beta
            form, field = self.output_format, "output_format"
        settings = self.settings(
            max_tokens=limit(self.max_tokens),
            stops=self.stop_sequences,
            reasoning_budget=self.thinking.budget_tokens if self.thinking else None,
            json_schema=schema_of(form, field),
        )
        one_only = isinstance(self.tool_choice, dict) and self.tool_choice.get("disable_parallel_tool_use")
        request = chat_request(
            settings,
            messages_of(self.messages, system=self.system, images=RequestImages.of(loaded)),
            [tool.function() for tool in self.tools or ()],
            self.tool_choice,
            schemas="tools[{}].input_schema",
            variables=self._variables(),
            parallel_tool_calls=one_only is not True,
            warnings=self.warnings(form, field),
            **self.more(),
        )
        return [request]

    def _variables(self) -> dict[str, Any]:
        variables = variables_of(self.output_config.effort if self.output_config else None)
        if self.thinking and self.thinking.type != "adaptive":
            variables["enable_thinking"] = self.thinking.type == "enabled"
        return variables | (self.chat_template_kwargs or {})


class Messages(Exchange):
    """A message. It has reasoning, in blocks of the type ``thinking``, only if the body asks for thinking."""

    body = _Body

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        super().__init__(body, loaded)
        self._answer = self._answers[0]
        self._blocks = Blocks(("reasoning", "content") if self._given.shows_thinking else ("content",))
        self._content: list[dict[str, Any]] = []
        self._head = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            **warnings(self.requests),
        }

    def write(self, index: int, event: Event) -> Iterator[str]:
        added = self._answer.add(event)
        if added is None:
            yield named({"type": "message_start", "message": self._message()})
            return
        for change in self._blocks.changes(added, is_last=bool(self._answer.ended)):
            match change:
                case ("open", "content", _):
                    yield self._start({"type": "text", "text": ""})
                case ("open", _, _):
                    yield self._start({"type": "thinking", "thinking": "", "signature": ""})
                case ("text", kind, text):
                    yield self._delta(f"{_TYPES[kind]}_delta", _TYPES[kind], text)
                case ("close", kind, text):
                    self._content[-1][_TYPES[kind]] = text
                    if kind == "reasoning":
                        yield self._delta("signature_delta", "signature", "")  # clients wait for one
                    yield self._event("stop")
                case ("open call", call):
                    yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
                case ("arguments", text):
                    yield self._delta("input_json_delta", "partial_json", text)
                case ("close call", call):
                    self._content[-1]["input"] = arguments_of(call)
                    yield self._event("stop")
        if self._answer.ended:
            message = self._message()
            delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
            more = warnings((), self._answer.ended)  # the others were in the beginning
            yield named({"type": "message_delta", "delta": delta, "usage": message["usage"], **more})
            yield named({"type": "message_stop"})

    @classmethod
    def sign_of_life(cls, state: str, model: str) -> str:
        return named({"type": "ping"})

    @classmethod
    def refused(cls, error: SpecLocalError) -> str:
        return named(errors.body_for(errors.ANTHROPIC, error))

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        for event in answers[0]:
            list(self.write(0, event))  # the message is what the stream makes
        return self._message()

    def _message(self) -> dict[str, Any]:
        answer = self._answer
        return (
            self._head
            | warnings(self.requests, answer.ended)
            | {
                "content": self._content,
                "stop_reason": _stop_reason(answer),
                "stop_sequence": printable(answer.ended.stopping_word) or None if answer.ended else None,
                "usage": {
                    "input_tokens": answer.n_prompt - answer.n_cached,
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": answer.n_cached,
                    "output_tokens": answer.statistics.predicted_n,
                },
            }
        )

    def _start(self, block: dict[str, Any]) -> str:
        self._content.append(block)
        return self._event("start", content_block=block)

    def _delta(self, kind: str, key: str, text: str) -> str:
        return self._event("delta", delta={"type": kind, key: text})

    def _event(self, what: str, **more: Any) -> str:
        return named({"type": f"content_block_{what}", "index": len(self._content) - 1, **more})


def _stop_reason(answer: AnswerSoFar) -> str | None:
    if not answer.ended:
        return None
    if answer.ended.reason == "length":
        return "max_tokens"
    if answer.ended.reason == "context":
        return "model_context_window_exceeded"
    if answer.calls:
        return "tool_use"
    return "stop_sequence" if answer.ended.stopping_word else "end_turn"
