"""The messages and the tools in bodies, in the form of OpenAI's chat completions."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from spec_local.chat.messages import Message
from spec_local.errors import InvalidRequest
from spec_local.grammar.usable_schema import usable
from spec_local.server.left_out import content_of, described, has_text
from spec_local.server.sampling_body import Part

_MAX_TOOLS = 1024  # each takes a millisecond to check, and a template's time
_Function = TypeVar("_Function", bound="Function")


def _text(content: object) -> object:
    return content if content is None else content_of(content)


def other_kind(part: Any, kinds: Collection[str]) -> str | None:
    """The type of an object that has another one than these; None: it is one of them, or no such object."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) and kind not in kinds else None


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


Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class Called(Part):
    """The function of a call."""

    name: Name
    arguments: str


class _CustomCalled(Part):
    name: Name
    input: str


class Call(Part):
    """A call of a tool in an answer."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: Called | None = None
    custom: _CustomCalled | None = None

    @model_validator(mode="after")
    def _check(self) -> "Call":
        if getattr(self, self.type) is None:
            raise ValueError(f"there is no {self.type}: give it")
        return self


class ChatMessage(Part):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def custom_calls(self) -> list[Call]:
        """Calls of tools that are not functions."""
        return [call for call in self.tool_calls or () if call.type == "custom"]

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
        if calls := [call for call in self.tool_calls or () if call.type == "function"]:
            message["tool_calls"] = [call.model_dump(exclude={"custom"}) for call in calls]
        for call in self.custom_calls:
            told = described({"type": "custom_tool_call", **(call.custom or call).model_dump()})
            message["content"] = "\n".join(filter(None, (message["content"], told)))
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
    made = [each.message(f"messages[{i}]") for i, each in enumerate(messages)]
    custom = {call.id for each in messages for call in each.custom_calls}
    made = [
        {"role": "user", "content": message["content"]} if message.get("tool_call_id") in custom else message
        for message in made
    ]
    return checked_question(made, "messages")


def checked_question(messages: Sequence[Mapping[str, Any]], field: str) -> Sequence[Message]:
    """The messages, whose last one must not be a question of nothing but images and the like.

    After the result of a tool it may be: programs add pictures to results in this way.

    Raises:
        InvalidRequest: it is; the error names the field.
    """
    *before, last = messages
    follows_result = before and before[-1]["role"] == "tool"
    if last["role"] == "user" and not follows_result and not has_text(last["content"]):
        raise InvalidRequest(f"{field}: the question is only {last['content'][:60]!a}: add text to it")
    return messages  # type: ignore[return-value]


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


def functions_of(tools: Any) -> Any:
    """The tools that are functions: those of other types, which run at the provider, do not exist here."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if other_kind(tool, ("function",)) is None]


def choice_of(given: object, tools: Sequence[_Function]) -> tuple[str, Sequence[_Function]]:
    """Return the tools that the answer may or must call (see `AnswerRequest.tool_choice`), and all it may.

    Raises:
        InvalidRequest: it is not valid, or there is no such tool, or there are too many.
    """
    if len(tools) > _MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} functions: give at most {_MAX_TOOLS}")
    match given:
        case None | "auto":
            return "auto", tools
        case "none":
            return "none", tools
        case "required":
            if not tools:
                raise InvalidRequest("tool_choice needs tools that are functions: add them, or leave it out")
            return "required", tools
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            if name not in [tool.name for tool in tools]:
                raise InvalidRequest(
                    f"tool_choice names {name[:40]!r}, which is no function in tools: add it"
                )
            return name, tools
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}:
            return _allowed(mode, allowed, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": allowed}:
            return _allowed(mode, allowed, tools)
        case {"type": str(kind)} if kind not in ("function", "tool"):
            raise InvalidRequest(
                f"tool_choice asks for a tool of the type {kind[:40]!a}, which does not exist here: "
                "give auto or a function"
            )
    raise InvalidRequest("tool_choice is not supported: give auto, none, required, or a function's name")


def _allowed(mode: object, allowed: object, tools: Sequence[_Function]) -> tuple[str, Sequence[_Function]]:
    """The choice among some of the tools; those among them that are not functions do not exist here."""
    if mode not in ("auto", "required") or not isinstance(allowed, list) or len(allowed) > _MAX_TOOLS:
        raise InvalidRequest("tool_choice: give the mode auto or required, and a list of tools")
    names = [choice_of(each, tools)[0] for each in functions_of(allowed)]
    return choice_of(mode, [tool for tool in tools if tool.name in names])


def variables_of(effort: str | None, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Variables of the chat template for an effort; those that are given go before it."""
    thinking: dict[str, Any] = (
        {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    )
    return (thinking if effort else {}) | dict(given or {})
