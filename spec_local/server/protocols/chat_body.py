"""The tools in bodies, and the choice among them, in the form of OpenAI's chat completions."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from spec_local.chat.messages import Message
from spec_local.errors import InvalidRequest
from spec_local.grammar.usable_schema import usable
from spec_local.server.protocols.left_out import content_of
from spec_local.server.protocols.sampling_body import Part
from spec_local.server.supervision.events import AnswerRequest
from spec_local.settings import GenerationSettings

_MAX_TOOLS = 1024  # each takes a millisecond to check, and a template's time


def _text(content: object) -> object:
    return content if content is None else content_of(content)


Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


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


def chat_request(
    settings: GenerationSettings,
    messages: Sequence[Message],
    functions: Sequence[Function],
    choice: object,
    *,
    schemas: str,
    warnings: Sequence[str],
    **more: Any,
) -> AnswerRequest:
    """The request of a chat with tools.

    Args:
        choice: the body's ``tool_choice``. schemas: see `_tool_warnings`.
        warnings: about the other fields. more: the other fields of `AnswerRequest`.

    Raises:
        InvalidRequest: the choice is not valid, or a schema that must hold cannot be used.
    """
    chosen, functions = choice_of(choice, functions)
    more["warnings"] = [*warnings, *_tool_warnings(functions, chosen, settings.json_schema, schemas)]
    return AnswerRequest(settings, messages, [each.tool() for each in functions], chosen, **more)


def _tool_warnings(tools: Sequence[Function], choice: str, json_schema: str | None, field: str) -> list[str]:
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
    """The tools that are functions, in the form of chat completions, whichever protocol they are written in.

    Those of other types, which run at the provider, do not exist here.
    """

    def is_other(tool: Any) -> bool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return isinstance(kind, str) and kind != "function" and "input_schema" not in tool

    def nested(tool: Any) -> Any:
        if not isinstance(tool, dict) or not ("function" in tool or "name" in tool):
            return tool
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("parameters") is None:
            function = {**function, "parameters": function.get("input_schema")}
        return {"type": "function", "function": function}

    return [nested(tool) for tool in tools if not is_other(tool)] if isinstance(tools, list) else tools


def flat_functions_of(tools: Any) -> Any:
    """`functions_of` in the form of responses, whose functions are no objects of their own."""
    functions = functions_of(tools)
    if not isinstance(functions, list):
        return functions
    return [
        {**each["function"], "type": "function"}
        if isinstance(each, dict) and isinstance(each.get("function"), dict)
        else each
        for each in functions
    ]


def choice_of(given: object, tools: Sequence[Function]) -> tuple[str, Sequence[Function]]:
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
        case {"type": "auto" | "none" | "any" | "required" as mode}:  # Anthropic's form
            return choice_of(mode, tools)
        case "required" | "any":  # OpenAI's, and Mistral's and Anthropic's
            if not tools:
                raise InvalidRequest("tool_choice needs tools that are functions: add them, or leave it out")
            return "required", tools
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function" | "tool",
            "name": str(name),
        }:
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


def _allowed(mode: object, allowed: object, tools: Sequence[Function]) -> tuple[str, Sequence[Function]]:
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
