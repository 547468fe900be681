"""The forms in which models write tool calls, as their chat templates define them."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spec_local.chat.messages import INVALID, MessageToolCall, Tool, json_object, json_value

SPACE = " \t\r\n"
_NAME = r"[\w.:/-]{1,128}"
_MAX_HEADER = 256
"""Characters of gpt-oss's header; more than the longest name needs."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: the text of a JSON object."""

    id: str
    name: str
    arguments: str

    @property
    def message(self) -> MessageToolCall:
        """The call as an element of ``tool_calls`` in a message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Read(NamedTuple):
    """Calls, and the index at which their text ends; no calls: what seemed to begin one is text."""

    calls: Sequence[ToolCall] = ()
    end: int = 0


_Reader = Callable[[str, int, int, Sequence[Tool]], Read | None]
"""Reads the calls at an opening in a text, given its start and end; None: they are not complete."""
_MALFORMED = Read()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A form in which models write calls.

    Attributes:
        signs: texts that the chat templates of these models contain, all of them.
        openings: texts with which a call begins.
        read: reads what follows an opening.
        closings: texts that may follow a call.
        bare: `BARE_OPENINGS` at the start of an answer, or after a call, begin a call, too, if it names one
            of the tools: small models often leave the openings out.
        control: control tokens in calls; in other answers, these have no text.
        prefix: what precedes the JSON of a call, for answers that must be calls; None: not supported.
        arguments: the name of the arguments in that JSON.
    """

    signs: tuple[str, ...]
    openings: tuple[str, ...]
    read: _Reader
    closings: tuple[str, ...] = ()
    bare: bool = False
    control: tuple[str, ...] = ()
    prefix: str | None = None
    arguments: str = "arguments"


def format_of(template: str) -> CallFormat | None:
    """The form of the models with this chat template; None: it is not known."""
    return next((known for known in _FORMATS if all(sign in template for sign in known.signs)), None)


def read_bare(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a call that is JSON without a mark: it must name one of the tools and have arguments."""
    stop = _json_end(text, end - 1)
    if stop is None:
        return None
    value = json_value(text[end - 1 : stop])
    if not isinstance(value, dict) or not value.keys() & {"arguments", "parameters"}:
        return _MALFORMED
    call = _call_of(value)
    return Read([call], stop) if call and _tool(call.name, tools) else _MALFORMED


def _read_json(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a call, or a list of calls, that follows the opening as JSON."""
    at = _skip_space(text, end)
    if at == len(text):
        return None
    if text[at] not in "[{":
        return _MALFORMED
    stop = _json_end(text, at)
    if stop is None:
        return None
    value = json_value(text[at:stop])
    found = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call]
    return Read(calls, stop) if calls and len(calls) == len(found) else _MALFORMED


def _read_tagged(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a call in tags: JSON, or a function in tags."""
    if text[start:end] == _FUNCTION:
        return _read_tags(text, start, _QWEN, tools)
    at = _skip_space(text, end)
    if text.startswith(_FUNCTION, at):
        return _read_tags(text, at, _QWEN, tools)
    return None if _FUNCTION.startswith(text[at:]) else _read_json(text, start, end, tools)


def _read_mistral(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a list of calls, or the name of a tool and its arguments."""
    if text[_skip_space(text, end) :][:1] in ("", "[", "{"):
        return _read_json(text, start, end, tools)
    header = _MISTRAL.match(text, end)
    if not header:
        is_begun = len(text) - end < _MAX_HEADER and "{" not in text[end:]
        return None if is_begun else _MALFORMED
    return _read_arguments(text, header.end(), header["name"], header["id"])


def _read_gpt_oss(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a header with the name of a tool, and its arguments."""
    at = text.find(_MESSAGE, start, start + _MAX_HEADER)
    if at < 0:
        return None if len(text) - start < _MAX_HEADER else _MALFORMED
    header = _GPT_OSS.fullmatch(text, start, at)
    name = header and (header["name"] or header["recipient"])
    return _read_arguments(text, at + len(_MESSAGE), name) if name else _MALFORMED


def _read_arguments(text: str, at: int, name: str, id: str | None = None) -> Read | None:
    at = _skip_space(text, at)
    if at == len(text):
        return None
    stop = _json_end(text, at) if text[at] == "{" else at
    if stop is None:
        return None
    call = _call(name, json_value(text[at:stop]), id)
    return Read([call], stop) if call else _MALFORMED


def _read_gemma(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a call in Gemma 4's notation: JSON with names without quotes, and strings in marks."""
    strings = text[end:].split(_GEMMA_QUOTE)
    written, length = "", 0
    for i, part in enumerate(strings):
        if i % 2:
            written += json.dumps(part, ensure_ascii=False)
        elif (stop := part.find(_GEMMA_END)) >= 0:
            written += _GEMMA_KEY.sub(r'\1"\2":', part[:stop])
            name, brace, arguments = written.partition("{")
            call = (
                _call(name.strip(), json_value(brace + arguments))
                if re.fullmatch(_NAME, name.strip())
                else None
            )
            return Read([call], end + length + stop) if call else _MALFORMED
        else:
            written += _GEMMA_KEY.sub(r'\1"\2":', part)
        length += len(part) + len(_GEMMA_QUOTE)
    return None


class _Tags(NamedTuple):
    """The format of calls in tags.

    Attributes:
        head: the name of the tool. parameter: the name of a parameter, before its value. value_end: what
        follows the value; it looks ahead, as a value can contain tags, too. begin, end: what the next
        parameter begins with, and what the call ends with.
    """

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    value_end: re.Pattern[str]
    begin: str
    end: str


def _read_tags(text: str, at: int, tags: _Tags, tools: Sequence[Tool]) -> Read | None:
    head = tags.head.match(text, at)
    if not head:
        is_begun = len(text) - at < _MAX_HEADER and "\n" not in text[at:].strip(SPACE)
        return None if is_begun else _MALFORMED
    properties = _properties(_tool(head["name"], tools))
    arguments: dict[str, object] = {}
    at = _skip_space(text, head.end())
    while not text.startswith(tags.end, at):
        parameter = tags.parameter.match(text, at)
        if not parameter:
            rest = text[at:]
            is_begun = rest.startswith(tags.begin) or any(t.startswith(rest) for t in (tags.begin, tags.end))
            return None if is_begun else _MALFORMED
        value = tags.value_end.search(text, parameter.end())
        if not value:
            return None
        name = parameter["name"].strip()
        arguments[name] = _value(text[parameter.end() : value.start()], properties.get(name))
        at = value.end()
    call = _call(head["name"], arguments)
    return Read([call], at + len(tags.end)) if call else _MALFORMED


def _read_glm(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    return _read_tags(text, end, _GLM, tools)


def _properties(tool: Mapping[str, object] | None) -> Mapping[str, object]:
    """The schemas of a tool's parameters by name."""
    parameters = tool.get("parameters") if tool else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> object:
    """The value of a parameter: text if its schema says so, otherwise JSON if it is."""
    text = text.removeprefix("\n").removesuffix("\n")
    if _is_text(schema):
        return text
    value = json_value({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    return text if value is INVALID else value


def _is_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kind, constants = schema.get("type"), schema.get("enum")
    if kind is None and isinstance(constants, Sequence):
        return all(isinstance(each, str) for each in constants)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _tool(name: str, tools: Sequence[Tool]) -> Mapping[str, object] | None:
    for tool in tools:
        function = tool["function"]
        if isinstance(function, Mapping) and function["name"] == name:
            return function
    return None


def _call_of(value: object) -> ToolCall | None:
    """The call that an object is; None: it is none."""
    if not isinstance(value, dict):
        return None
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})), value.get("id"))


def _call(name: object, arguments: object, id: object = None) -> ToolCall | None:
    """A call; None: it is malformed. Some models write the arguments as the text of an object."""
    found = json_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict) or not isinstance(name, str) or not name:
        return None
    new = f"call_{secrets.token_hex(12)}"
    return ToolCall(id if isinstance(id, str) and id else new, name, json.dumps(found, ensure_ascii=False))


_LEXEME = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)


def _json_end(text: str, start: int) -> int | None:
    """The end of an object or list that starts at an index, whether or not it is valid; None: it is open."""
    depth = 0
    for lexeme in _LEXEME.finditer(text, start):
        first = lexeme[0][0]
        depth += (first in "[{") - (first in "]}")
        if not depth:
            return lexeme.end()
    return None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


_FENCE = "```"
BARE_OPENINGS = ("{", f"{_FENCE}json\n{{", f"{_FENCE}\n{{")
"""The last character of each begins the JSON."""
_FUNCTION, _MESSAGE = "<function=", "<|message|>"
_GEMMA_QUOTE, _GEMMA_END = '<|"|>', "<tool_call|>"
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_MISTRAL = re.compile(rf"\s*(?P<name>{_NAME})\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{{)")
_GPT_OSS = re.compile(
    r"(?:<\|end\|>)?(?:<\|start\|>assistant)?\s*"
    rf"(?:to=functions\.(?P<recipient>{_NAME})\s*)?"
    rf"(?:<\|channel\|>\w+\s*(?:to=functions\.(?P<name>{_NAME})\s*)?)?"
    r"(?:<\|constrain\|>)?\w*\s*"
)
_QWEN = _Tags(
    head=re.compile(rf"<function=(?P<name>{_NAME})>"),
    parameter=re.compile(r"<parameter=(?P<name>[^<>\n]+)>"),
    value_end=re.compile(r"</parameter>\s*(?=<parameter=|</function>)"),
    begin="<parameter=",
    end="</function>",
)
_GLM = _Tags(
    head=re.compile(rf"\s*(?P<name>{_NAME})\s*(?=<)"),
    parameter=re.compile(r"<arg_key>(?P<name>[^<>\n]+)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)"),
    begin="<arg_key>",
    end="</tool_call>",
)
_FORMATS = (
    # gpt-oss. The token that ends a call, <|call|>, ends the answer, too.
    CallFormat(
        signs=("<|channel|>", "functions."),
        openings=("<|end|><|start|>assistant", "<|start|>assistant", "<|channel|>", "to=functions."),
        read=_read_gpt_oss,
        closings=("<|call|>", "<|end|>"),
        control=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    CallFormat(
        signs=("[TOOL_CALLS]",),
        openings=("[TOOL_CALLS]",),
        read=_read_mistral,
        control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    CallFormat(  # Gemma 4
        signs=("<|tool_call>call:",),
        openings=("<|tool_call>call:",),
        read=_read_gemma,
        closings=(_GEMMA_END,),
        control=("<|tool_call>", _GEMMA_END, _GEMMA_QUOTE),
    ),
    CallFormat(  # GLM 4.5 and later
        signs=("<tool_call>", "<arg_key>"),
        openings=("<tool_call>",),
        read=_read_glm,
        control=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    CallFormat(  # Qwen3-Coder and Qwen3.5
        signs=("<tool_call>", _FUNCTION),
        openings=("<tool_call>", _FUNCTION),
        read=_read_tagged,
        closings=("</tool_call>",),
        control=("<tool_call>", "</tool_call>"),
    ),
    CallFormat(  # Hermes, Qwen2.5, Qwen3, Granite 4 and many others
        signs=("<tool_call>",),
        openings=("<tool_call>",),
        read=_read_tagged,
        closings=("</tool_call>", _FENCE),
        bare=True,
        control=("<tool_call>", "</tool_call>"),
        prefix="<tool_call>\n",
    ),
    CallFormat(  # Granite 3, Phi-4-mini
        signs=("<|tool_call|>",),
        openings=("<|tool_call|>",),
        read=_read_json,
        closings=("<|/tool_call|>", _FENCE),
        bare=True,
        control=("<|tool_call|>", "<|/tool_call|>"),
    ),
    CallFormat(  # Nemotron
        signs=("<TOOLCALL>",),
        openings=("<TOOLCALL>",),
        read=_read_json,
        closings=("</TOOLCALL>",),
        control=("<TOOLCALL>", "</TOOLCALL>"),
    ),
    CallFormat(  # Llama 3
        signs=('"parameters"', '"name"'),
        openings=("<|python_tag|>",),
        read=_read_json,
        bare=True,
        closings=(";", _FENCE),
        control=("<|python_tag|>",),
        prefix="",
        arguments="parameters",
    ),
)
BARE = CallFormat(signs=(), openings=(), read=_read_json, bare=True)
"""Calls that a JSON schema asks for."""
