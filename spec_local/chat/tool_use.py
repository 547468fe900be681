"""The tools of an answer: in the prompt, in the settings, and in the text that the model generates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spec_local.arguments import checked
from spec_local.chat.call_formats import CallFormat, format_of
from spec_local.chat.call_grammar import call_grammar
from spec_local.chat.messages import Tool, messages_of, tools_of
from spec_local.chat.rendered import Rendered
from spec_local.chat.template import NO_TOOLS, ChatTemplate
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.errors import InvalidRequest, ModelError
from spec_local.grammar.lark import RuleSet
from spec_local.settings import GenerationSettings

_CHOICES = ("auto", "none", "required")


class ToolUse:
    """The tools of one answer, as a model's chat template defines their use.

    Args:
        tools: that the model may call, in the form of OpenAI's API (see `spec_local.chat.messages.Tool`).
        choice: ``auto``: the model decides; ``none``: it is not told of the tools; ``required``: the answer
            is one or more calls; the name of a tool: it is a call of this tool. For the last two, a grammar
            constrains the answer.
        parallel: more than one call is allowed.
        json_schema: of the settings: the answer is calls or follows it, or only calls if they are required.

    Raises:
        InvalidRequest: a tool is incomplete, the choice is unknown, or a schema cannot be used.
        ModelError: the template has no tools, or the form of its calls is not supported.
    """

    @checked
    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Tool] = (),
        choice: str = "auto",
        *,
        parallel: bool = True,
        json_schema: str | None = None,
    ) -> None:
        known = tools_of(tools)
        names = [tool["function"]["name"] for tool in known]
        if choice not in (*_CHOICES, *names) or (choice == "required" and not known):
            raise InvalidRequest(
                f"tool_choice is {choice[:40]!a}: give {', '.join(_CHOICES)} or the name of one of the tools"
            )
        self._template = template
        self.tools = known if choice != "none" else []
        """The tools that the model is told of."""
        is_named = choice in names and choice not in _CHOICES
        self.required = bool(self.tools) and choice != "auto"
        """True if the answer must be a call."""
        self._most = 1 if is_named or not parallel else None
        self._form = self._supported_form() if self.tools else None
        self._grammar: RuleSet | None = None
        if self._form and (self.required or json_schema is not None):
            self._grammar = call_grammar(
                self._form,
                [_usable(known[i], i) for i in ([names.index(choice)] if is_named else range(len(known)))],
                answer=None if self.required else json_schema,
                parallel=self._most is None,
            )

    def _supported_form(self) -> CallFormat:
        if not self._template.has_tools:
            raise ModelError(NO_TOOLS)
        form = format_of(self._template.source)
        if not form:
            raise ModelError(
                "the model writes tool calls in a form that is not supported: use a model with the form of "
                "Qwen, Hermes, Llama 3, Mistral, gpt-oss, Gemma 4, GLM, Granite, DeepSeek, Kimi K2, "
                "Command R or LFM2"
            )
        return form

    def render(self, messages: Sequence[Mapping[str, object]]) -> Rendered:
        """The text of the prompt, up to where the model begins to write.

        Where the template writes no calls, they are the end of the content.

        Raises:
            InvalidRequest, ModelError: see `ChatTemplate.prompt`.
        """
        form = format_of(self._template.source)
        if not form or "tool_calls" in self._template.source:
            return self._template.prompt(messages, self.tools)
        shown, written = messages_of(messages), list[str]()
        for message in shown:
            if calls := message.pop("tool_calls", ()):
                written.append(form.write(calls))
                message["content"] += written[-1]
        rendered = self._template.prompt(shown, self.tools)
        is_content, end = bytearray(rendered.is_content), 0
        for text in map(str.encode, written):
            start = rendered.text.find(text, end)
            if start < 0:
                break
            end = start + len(text)
            for mark in map(str.encode, form.control):
                # The marks around the calls are the template's, those in arguments are not.
                if text.startswith(mark):
                    is_content[start : start + len(mark)] = bytes(len(mark))
                if text.endswith(mark):
                    is_content[end - len(mark) : end] = bytes(len(mark))
        return replace(rendered, is_content=bytes(is_content))

    def settings(self, settings: GenerationSettings) -> GenerationSettings:
        """The settings of the answer.

        Raises:
            InvalidRequest: they have a grammar.
        """
        if not self._form:
            return settings
        if settings.grammar is not None:
            raise InvalidRequest(
                "an answer with tools cannot follow a grammar: remove it, or give the tool_choice none"
            )
        settings = replace(settings, control_text=(*settings.control_text, *self._form.control))
        if self._grammar is None:
            return settings
        return replace(settings, json_schema=None, call_grammar=self._grammar)

    def parser(self, *, partial: bool = False) -> ToolCallParser:
        """A new parser of the answer, without its reasoning; partial: see `ToolCallParser`."""
        form = self._form
        if form and self._grammar is not None:
            # In required calls, the grammar writes the openings, if there are any.
            form = replace(form, bare=form.is_json or (form.bare and not self.required))
        return ToolCallParser(
            form,
            self.tools,
            partial=partial,
            most=self._most,
            constrained=self._grammar is not None,
            or_schema=not self.required,
        )


def _usable(tool: dict[str, Any], i: int) -> dict[str, Any]:
    """The tool with what can be enforced of the schema of its parameters: it guides the model."""
    from spec_local.grammar.usable_schema import usable  # takes a while: few answers have a grammar

    function = tool["function"]
    schema = usable(json.dumps(function["parameters"]), f"tools[{i}].function.parameters").schema
    return {"function": function | {"parameters": json.loads(schema)}}
