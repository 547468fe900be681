"""Reading tool calls in texts: what a call is, and the JSON in which most models write them."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spec_local.chat.messages import MessageToolCall, Tool, json_object, json_value

SPACE = " \t\r\n"
NAME = r"[\w.:/-]{1,128}"
MAX_HEADER = 256
"""Characters of a header with the name of a tool; more than the longest name needs."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: the text of a JSON object, or its beginning if the answer was cut."""

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


class Begun(NamedTuple):
    """A call whose arguments, a JSON object, begin at an index.

    depth: number of brackets around the arguments that close after them. listed: other calls may follow
    after a comma.
    """

    call: ToolCall
    at: int
    depth: int = 0
    listed: bool = False


Reader = Callable[[str, int, int, Sequence[Tool]], Read | Begun | None]
"""Reads the calls at an opening in a text, given its start and end; None: too little of them is there."""
MALFORMED = Read()


def read_bare(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | Begun | None:
    """Read a call that is JSON without a mark: it must name one of the tools and have arguments."""
    if head := _HEAD.match(text, end - 1):
        return _begun(head) if tool_named(head["name"], tools) else MALFORMED
    stop = json_end(text, end - 1)
    if stop is None:
        return None
    value = json_value(text[end - 1 : stop])
    if not isinstance(value, dict) or not value.keys() & {"arguments", "parameters"}:
        return MALFORMED
    call = _call_of(value)
    return Read([call], stop) if call and tool_named(call.name, tools) else MALFORMED


def read_json(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | Begun | None:
    """Read a call, or a list of calls, that follows the opening as JSON."""
    head = _HEAD.match(text, skip_space(text, end))
    return _begun(head) if head else read_whole_json(text, start, end, tools)


def read_whole_json(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """The same, as soon as all of them are complete."""
    at = skip_space(text, end)
    if at == len(text):
        return None
    if text[at] not in "[{":
        return MALFORMED
    stop = json_end(text, at)
    if stop is None:
        return None
    value = json_value(text[at:stop])
    found = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call]
    return Read(calls, stop) if calls and len(calls) == len(found) else MALFORMED


def read_arguments(text: str, at: int, name: str, id: str | None = None) -> Read | Begun | None:
    """Read the arguments of a call whose name is known, from an index on."""
    at = skip_space(text, at)
    if at == len(text):
        return None
    return Begun(_named(name, id), at) if text[at] == "{" else MALFORMED


def tool_named(name: str, tools: Sequence[Tool]) -> Mapping[str, object] | None:
    """The function with this name; None: there is none."""
    for tool in tools:
        function = tool["function"]
        if isinstance(function, Mapping) and function["name"] == name:
            return function
    return None


def call_of(name: object, arguments: object, id: object = None) -> ToolCall | None:
    """A call; None: it is malformed. Some models write the arguments as the text of an object."""
    found = json_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict) or not isinstance(name, str) or not name:
        return None
    return _named(name, id, json.dumps(found, ensure_ascii=False))


def skip_space(text: str, at: int) -> int:
    """The index of the next character that is no white space."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def json_end(text: str, start: int) -> int | None:
    """The end of an object or list that starts at an index, whether or not it is valid; None: it is open."""
    depth = 0
    for lexeme in _LEXEME.finditer(text, start):
        first = lexeme[0][0]
        depth += (first in "[{") - (first in "]}")
        if not depth:
            return lexeme.end()
    return None


_LEXEME = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_HEAD = re.compile(
    r'(?P<list>\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*|"tool_call_id"\s*:\s*"\w*"\s*,\s*)*'
    rf'"(?:tool_)?name"\s*:\s*"(?P<name>{NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
"""What precedes the arguments in the JSON of a call, or of a list of calls."""


def _begun(head: re.Match[str]) -> Begun:
    return Begun(_named(head["name"]), head.end(), depth=1, listed=bool(head["list"]))


def _named(name: str, id: object = None, arguments: str = "") -> ToolCall:
    return ToolCall(id if isinstance(id, str) and id else f"call_{secrets.token_hex(12)}", name, arguments)


def _call_of(value: object) -> ToolCall | None:
    """The call that an object is; None: it is none."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name", value.get("tool_name")), value.get("parameters", {})
    return call_of(name, value.get("arguments", arguments), value.get("id"))
