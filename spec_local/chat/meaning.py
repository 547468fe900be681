"""What an answer means: programs send answers back with other white space, order of keys and ids in calls."""

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

from spec_local.chat.call_formats import format_of
from spec_local.chat.call_reading import SPACE
from spec_local.chat.messages import Message, Tool, json_object
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.reasoning.markers import Splitter


class Meaning(NamedTuple):
    """What the text of an answer means; equal for texts that differ only in how they are written.

    Attributes:
        thinks: there are markers of reasoning, whether or not there is any.
        reasoning, text: without outer white space, and the text without calls.
        calls: name and arguments of each; see `arguments_key`.
        ending: how the calls end, since the end of an answer may cut their closings.
    """

    thinks: bool
    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]
    ending: str


def meaning_of(text: str, template: str, splitter: Splitter, tools: Sequence[Tool]) -> Meaning:
    """The meaning of an answer.

    Args:
        template: source of the chat template.
        splitter: of this text; it is used up.
        tools: that the model may call.
    """
    parts = splitter.finish(text)
    form = format_of(template) if tools else None
    found = ToolCallParser(form, tools).finish(parts.answer)
    calls = tuple((call.name, arguments_key(call.arguments)) for call in found.calls)
    written, ending = text.rstrip(SPACE), ""
    if form and calls:
        closings = sorted(filter(written.endswith, (*form.closings, form.after.strip(SPACE))), key=len)
        ending = closings[-1] if closings and closings[-1] else written[-1:]
    thinks = parts.answer.strip(SPACE) != text.strip(SPACE)
    return Meaning(thinks, parts.reasoning.strip(SPACE), found.text.strip(SPACE), calls, ending)


@functools.lru_cache(maxsize=512)
def arguments_key(arguments: str) -> str:
    """A text that is equal for the same JSON object in another spelling; other texts stand for themselves.

    An integer is the same number with ``.0``: JavaScript does not tell them apart.
    """
    value = json_object(arguments)
    if value is not None:
        with contextlib.suppress(RecursionError):
            return "JSON " + json.dumps(_numbers(value), sort_keys=True)
    return "text " + arguments


def _numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return [_numbers(each) for each in value] if isinstance(value, list) else value


def same_message(a: Message, b: Message) -> bool:
    """Return whether two messages mean the same; reasoning and ids of calls do not count."""
    return a == b or (_key(a) == _key(b))


def _key(message: Message) -> object:
    text = message["content"].strip(SPACE) if message["role"] == "assistant" else message["content"]
    calls = [
        (call["function"]["name"], arguments_key(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], text, calls, [*message.get("images", ())]
