"""The messages and the tools in bodies, in the form of OpenAI's chat completions."""

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from spec_local.chat.messages import Message
from spec_local.errors import InvalidRequest
from spec_local.grammar.usable_schema import usable
from spec_local.server.sampling_body import Part

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The kinds of parts that have text, and where."""


def flat(content: object) -> object:
    """Content as one text: its parts are lines.

    Raises:
        ValueError: a part is not text.
    """
    return "\n".join(map(_text, content)) if isinstance(content, list) else content


def _text(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError("a part of the content has no type: give text, or parts of the type text")
    if kind not in _TEXTS:
        raise ValueError(f"content of the type {kind[:40]} is not supported: give text")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a part of the content has no text: give its {_TEXTS[kind]}")
    return text


def known(kinds: Collection[str], default: str | None = None) -> BeforeValidator:
    """A check of the type of an element, with an error of one line; default: its type if none is given."""

    def check(value: object) -> object:
        if not isinstance(value, dict):
            return value
        value = {"type": default, **value} if default else value
        kind = value.get("type")
        if not isinstance(kind, str):
            raise ValueError(f"there is no type: give {', '.join(kinds)}")
        if kind not in kinds:
            raise ValueError(f"the type {kind[:40]} is not supported: give {', '.join(kinds)}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, BeforeValidator(flat)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class Called(Part):
    """The function of a call."""

    name: Name
    arguments: str


class Call(Part):
    """A call of a tool in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: Called


class ChatMessage(Part):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self, where: str) -> dict[str, Any]:
        """The message as the library expects it; `where`: its name in errors."""
        role = "system" if self.role == "developer" else self.role
        if self.content is None and role != "assistant":
            raise InvalidRequest(f"{where}.content is missing: give text")
        if self.tool_calls and role != "assistant":
            raise InvalidRequest(f"{where} has tool_calls: only messages of the assistant have them")
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if role == "tool":
            if self.tool_call_id is None:
                raise InvalidRequest(f"{where}.tool_call_id is missing: give the id of the call")
            message["tool_call_id"] = self.tool_call_id
            if self.name:
                message["name"] = self.name
        return message


class Function(Part):
    """The description of a function; parameters: a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool(self) -> dict[str, Any]:
        """The tool as the library expects it."""
        function = self.model_dump(include={*Function.model_fields}, exclude_none=True)
        return {"type": "function", "function": function}


class Tool(Part):
    """A tool."""

    type: Literal["function"]
    function: Function


def messages_of(messages: Sequence[ChatMessage]) -> Sequence[Message]:
    """Messages as the library expects them.

    Raises:
        InvalidRequest: a message lacks something, or there is none.
    """
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message")
    return [each.message(f"messages[{i}]") for i, each in enumerate(messages)]  # type: ignore[misc]


def tool_warnings(tools: Sequence[Function], choice: str, json_schema: str | None, field: str) -> list[str]:
    """Sentences about what of the tools' schemas a grammar of calls does not enforce.

    field: of the schema of each tool, with its index in place of ``{}``.

    Raises:
        InvalidRequest: there is such a grammar, and a schema cannot be used.
    """
    if choice == "none" or (choice == "auto" and json_schema is None):
        return []
    return [
        warning
        for i, tool in enumerate(tools)
        if tool.parameters and choice in ("auto", "required", tool.name)
        for warning in usable(json.dumps(tool.parameters), field.format(i)).warnings
    ]


def choice_of(given: object, tools: Sequence[Function]) -> str:
    """Return the tools that the answer may or must call: see `AnswerRequest.tool_choice`.

    Raises:
        InvalidRequest: it is not valid, or there is no such tool.
    """
    match given:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required":
            if not tools:
                raise InvalidRequest("tool_choice needs tools: add them, or leave tool_choice out")
            return "required"
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            if name not in [tool.name for tool in tools]:
                raise InvalidRequest(f"tool_choice names {name[:40]!r}, which is not among the tools: add it")
            return name
    raise InvalidRequest("tool_choice is not supported: give auto, none, required, or a function's name")
