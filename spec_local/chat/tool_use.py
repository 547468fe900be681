"""The tools of an answer: in the prompt, in the settings, and in the text that the model generates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spec_local.arguments import checked
from spec_local.chat.call_formats import BARE, CallFormat, format_of
from spec_local.chat.messages import Tool, tools_of
from spec_local.chat.rendered import Rendered
from spec_local.chat.template import NO_TOOLS, ChatTemplate
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.errors import InvalidRequest, ModelError
from spec_local.settings import GenerationSettings

_CHOICES = ("auto", "none", "required")
_VALUES = {"const", "enum", "default", "examples"}
"""Keywords of JSON schemas that hold values, not schemas."""


class ToolUse:
    """The tools of one answer, as a model's chat template defines their use.

    Args:
        tools: that the model may call, in the form of OpenAI's API (see `spec_local.chat.messages.Tool`).
        choice: ``auto``: the model decides; ``none``: it is not told of the tools; ``required``: the answer
            is a call; the name of a tool: it is a call of this tool. For the last two, a JSON schema
            constrains the answer.

    Raises:
        InvalidRequest: a tool is incomplete, the choice is unknown, or the model's form of calls cannot be
            constrained.
        ModelError: the template has no tools, or the form of its calls is not supported.
    """

    @checked
    def __init__(self, template: ChatTemplate, tools: Sequence[Tool] = (), choice: str = "auto") -> None:
        known = tools_of(tools)
        names = [tool["function"]["name"] for tool in known]
        if choice not in (*_CHOICES, *names) or (choice == "required" and not known):
            raise InvalidRequest(
                f"tool_choice is {choice[:40]!a}: give {', '.join(_CHOICES)} or the name of one of the tools"
            )
        self._template = template
        self.tools = known if choice != "none" else []
        """The tools that the model is told of."""
        self._callable = [] if choice in ("auto", "none") else known
        if choice in names and choice not in _CHOICES:
            self._callable = [known[names.index(choice)]]
        self._form = self._supported_form() if self.tools else None

    def _supported_form(self) -> CallFormat:
        if not self._template.has_tools:
            raise ModelError(NO_TOOLS)
        form = format_of(self._template.source)
        if not form:
            raise ModelError(
                "the model writes tool calls in a form that is not supported: use a model with the form of "
                "Qwen, Hermes, Llama 3, Mistral, gpt-oss, Gemma 4, GLM or Granite"
            )
        if self._callable and form.prefix is None:
            raise InvalidRequest(
                "this model's form of tool calls cannot be required: give the tool_choice auto or none"
            )
        return form

    @property
    def required(self) -> bool:
        """True if the answer must be a call."""
        return bool(self._callable)

    def render(self, messages: Sequence[Mapping[str, object]]) -> Rendered:
        """The text of the prompt, up to where the model begins to write.

        Raises:
            InvalidRequest, ModelError: see `ChatTemplate.prompt`.
        """
        rendered = self._template.prompt(messages, self.tools)
        if not self._form or not self.required:
            return rendered
        prefix = (self._form.prefix or "").encode()
        if rendered.text.rstrip().endswith(b"<think>"):
            prefix = b"\n</think>\n\n" + prefix
        return Rendered(rendered.text + prefix, rendered.is_content + bytes(len(prefix)))

    def settings(self, settings: GenerationSettings) -> GenerationSettings:
        """The settings of the answer.

        Raises:
            InvalidRequest: they constrain the answer already, or the schema of a tool that must be called
                cannot be used.
        """
        if not self._form:
            return settings
        if settings.constrained:
            raise InvalidRequest(
                "an answer with tools cannot follow a grammar or a JSON schema: remove it, or give the "
                "tool_choice none"
            )
        if self.required:
            return replace(settings, json_schema=_schema(self._callable, self._form.arguments))
        return replace(settings, control_text=(*settings.control_text, *self._form.control))

    def parser(self) -> ToolCallParser:
        """A new parser of the answer, without its reasoning."""
        return ToolCallParser(BARE if self.required else self._form, self.tools)


def _schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> str:
    """The JSON schema of a call of one of these tools."""
    calls, definitions = [], {}
    for i, tool in enumerate(tools):
        function = tool["function"]
        definitions[str(i)] = _moved(function["parameters"], f"#/$defs/{i}")
        properties = {"name": {"const": function["name"]}, arguments: {"$ref": f"#/$defs/{i}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", arguments]})
    return json.dumps({"anyOf": calls, "$defs": definitions})


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself as part of another one."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: each if key in _VALUES else _moved(each, root) for key, each in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
