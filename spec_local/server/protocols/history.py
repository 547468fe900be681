"""Conversations as programs send them, in the messages of the library.

One reader serves all protocols, since programs mix them: messages of OpenAI's chat completions and of
Anthropic's, items of OpenAI's responses. Earlier turns may come from any other server. What can be read of
them is read, and the rest becomes a note. Only the question itself, the last message, must be readable.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any

from pydantic import WithJsonSchema

from spec_local.chat.messages import Message
from spec_local.errors import InvalidRequest
from spec_local.server.protocols.left_out import described, has_text, note, readable, role_of, text_of
from spec_local.server.protocols.request_images import RequestImages

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "function": "tool", "model": "assistant"},  # OpenAI's, its old one, Gemini's
}
_ALL_ROLES = _ROLES | {
    **{"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant"},  # LangChain, ShareGPT
    **{"ipython": "tool", "observation": "tool", "tool_response": "tool"},  # Llama, GLM, Qwen
}
"""With those that no protocol has, but that histories of programs do."""
_UNFINISHED = "[no result: the call was interrupted]"
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_content", "think")
"""Parts of an answer that are its reasoning: of Anthropic and Mistral, LangChain, Bedrock, LibreChat."""
_REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Fields with reasoning: of DeepSeek, OpenRouter and vLLM, Ollama, OpenRouter, LiteLLM."""
_CALLS = ("tool_use", "tool_call", "invalid_tool_call", "tool-call", "function_call")
"""Parts of an answer that are calls: of Anthropic, LangChain, AI SDK, OpenAI's responses."""
_RESULTS = ("tool_result", "tool-result", "function_call_output")
_MAX_WAITING = 16  # calls without a result that another one may belong to
_THOUGHT_TEXTS = ("thinking", "reasoning", "think", "text", "content", "summary")
_IDS = ("tool_call_id", "tool_use_id", "call_id", "toolCallId")

Items = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": [*_ROLES]},
                    "content": {
                        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
                        "description": 'Text, or parts such as `{"type": "text", "text": "Hi"}`.',
                    },
                },
                "required": ["role", "content"],
            },
        }
    ),
]
"""Messages or items of a body, each of which `messages_of` reads."""


def messages_of(
    given: Sequence[Mapping[str, Any]],
    field: str = "messages",
    system: str | None = None,
    images: RequestImages | None = None,
) -> Sequence[Message]:
    """Messages as the library expects them.

    Calls without an id get one, and results without one belong to the first call that has none yet, by the
    name of the tool if they have it.

    Args:
        given: see `Items`.
        field: their name in errors.
        system: content of a system message before them.
        images: those of the request; None: the model reads only text, and notes stand for them.

    Raises:
        InvalidRequest: there is no message, one has no role, or the question or an image cannot be read.
    """
    reader = _Reader()
    if system:
        reader.add("system", system)
    for i, item in enumerate(images.marked(given, field) if images else given):
        reader.read(item, f"{field}[{i}]", is_last=i == len(given) - 1)
    if not reader.messages:
        raise InvalidRequest(f"{field} is empty: give at least one message")
    for call in reader.messages[-1].get("tool_calls", ()):  # a program sends what was interrupted once more
        reader.messages.append({"role": "tool", "content": _UNFINISHED, "tool_call_id": call["id"]})
    *before, last = reader.messages
    follows_result = before and before[-1]["role"] == "tool"  # programs add pictures to results in this way
    if last["role"] == "user" and not follows_result and not has_text(last["content"]):
        raise InvalidRequest(f"{field}: the question is only {last['content'][:60]!a}: add text to it")
    if images:
        reader.messages = [images.placed(message) for message in reader.messages]
    return reader.messages  # type: ignore[return-value]


class _Reader:
    """Reads one item after another into `messages`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thoughts: list[str] = []  # of items before the answer that they belong to
        self._open: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """Ids of calls without a result; the names of their functions, and whether the id was made here."""
        self._texts: set[str] = set()  # ids of calls that have become text
        self._n_calls = 0

    def add(self, role: str, content: str) -> dict[str, Any]:
        """Add a message."""
        message = {"role": role, "content": content}
        if role == "assistant":
            if self.messages and self.messages[-1]["role"] in ("user", "system"):
                self._open.clear()  # what has no result by now was interrupted
            if reasoning := "".join(self._thoughts):
                message["reasoning_content"] = reasoning
            self._thoughts.clear()
        self.messages.append(message)
        return message

    def read(self, item: Mapping[str, Any], where: str, *, is_last: bool) -> None:
        """Add an item. where: its name in errors."""
        kind = item.get("type")
        if item.get("role") is not None or not isinstance(kind, str) or kind in ("message", *_ALL_ROLES):
            self._read_message(item, _role(item, where, is_last), where, is_last)
        elif kind == "function_call":
            if not _is_of_function(item):
                self.add("assistant", self._told(item))
                return
            continued = self.messages and self.messages[-1]["role"] == "assistant" and not self._thoughts
            self._call(self.messages[-1] if continued else self.add("assistant", ""), item)
        elif kind == "function_call_output":
            self._result(item, readable(item.get("output")))
        elif kind == "reasoning":
            self._thoughts += filter(None, [_thought(item)])
        elif role := role_of(kind):
            if text := described(item):
                self.add(role, text)
        elif is_last and kind != "mcp_list_tools":
            raise InvalidRequest(f"{where}: the type {kind[:40]} is not supported: give a message")
        elif kind != "mcp_list_tools" and not str(item.get("id")).startswith("rs_"):  # of reasoning
            self.add("assistant", note(kind))

    def _read_message(self, item: Mapping[str, Any], role: str, where: str, is_last: bool) -> None:
        content = item.get("content", item.get("parts"))  # Gemini's name, and the AI SDK's
        parts = content if isinstance(content, list) else [] if content is None else [content]
        if role == "tool":
            self._result(item, "\n".join([readable(content), *_pictures(item)]))
            return
        follows_result = self.messages and self.messages[-1]["role"] == "tool"
        is_question = is_last and role != "assistant" and not follows_result
        if is_question and content is None:
            raise InvalidRequest(f"{where}.content is missing: give text")
        is_question &= not any(_kind(part) in _RESULTS for part in parts)
        answers, has_result = role == "assistant", False
        thought = next(filter(None, (_thought(item.get(name)) for name in _REASONING)), "") if answers else ""
        thoughts, texts, calls = [thought], list[str](), list[Any]()

        def add() -> None:
            self._thoughts += thoughts
            told = [self._told(call) for call in calls if not _is_of_function(call)]
            lines = filter(None, [*texts, *told]) if told else texts
            message = self.add(role, "\n".join(lines))
            for call in filter(_is_of_function, calls):
                self._call(message, call)
            for each in (thoughts, texts, calls):
                each.clear()

        for part in parts:
            kind = _kind(part)
            if answers and kind in _THOUGHTS:
                thoughts += [] if thought else [_thought(part)]
            elif answers and kind in _CALLS:
                calls.append(part)
            elif kind in _RESULTS:
                has_result = True
                if texts or calls:
                    add()
                self._result(part, readable(part.get("content", part.get("output"))))
            elif is_question:
                try:
                    texts.append(text_of(part))
                except ValueError as error:
                    raise InvalidRequest(f"{where}.content: {error}") from None
            elif part is not None:
                texts.append(readable(part))
        texts += _pictures(item)
        if answers:
            given = item.get("tool_calls")
            calls += given if isinstance(given, list) else []
            calls += [call] if (call := item.get("function_call")) else []
            refusal = item.get("refusal")
            texts += [refusal] if isinstance(refusal, str) and refusal else []
        if texts or calls or not has_result:
            add()

    def _told(self, call: object) -> str:
        """A call that is not one of a function, as text."""
        given = call if isinstance(call, dict) else {}
        self._texts.add(_id_of(given) or "")
        custom = given["custom"] if isinstance(given.get("custom"), dict) else given
        return described({**custom, "type": "custom_tool_call"})

    def _call(self, message: dict[str, Any], call: Mapping[str, Any]) -> None:
        """Add a call to a message of the assistant."""
        name, function = _called(call)
        id = _id_of(call)
        arguments = next((function[k] for k in ("arguments", "input", "args") if k in function), None)
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
        self._n_calls += 1
        made = id or f"call_{self._n_calls}"
        self._open[made] = name, id is None
        function = {"name": name, "arguments": arguments if arguments.strip() else "{}"}
        message.setdefault("tool_calls", []).append({"id": made, "type": "function", "function": function})

    def _result(self, given: Mapping[str, Any], content: str) -> None:
        """Add the result of a call. Without a call that it can belong to, it is a message of the user."""
        id = next(filter(None, _strings(given, *_IDS)), None)
        name = next(filter(None, _strings(given, "name", "tool_name", "toolName")), None)
        if id not in self._open:
            waiting = list(islice(self._open.items(), _MAX_WAITING))
            fitting = [each for each, (called, is_made) in waiting if is_made or id is None]
            same = [each for each in fitting if name in (None, self._open[each][0])]
            id = next(iter(same or fitting), id)
        if id is not None:
            self._open.pop(id, None)
        if id is None or id in self._texts:
            self.add("user", content)
            return
        message = self.add("tool", content) | {"tool_call_id": id}
        if name:
            message["name"] = name
        self.messages[-1] = message


def _role(item: Mapping[str, Any], where: str, is_last: bool) -> str:
    """The role of a message; one that is unknown is read as the user's, unless it is asked now."""
    role, kind = item.get("role"), _kind(item)
    if role is None and kind in _ALL_ROLES:
        role = kind
    if role is None:
        raise InvalidRequest(f"{where}.role is missing: add it")
    found = _ALL_ROLES.get(role.lower()) if isinstance(role, str) else None
    if not found and (is_last or not isinstance(role, str)):
        raise InvalidRequest(f"{where}.role: give {', '.join(map(repr, _ROLES))}")
    return found or "user"


def _kind(part: object) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _id_of(call: Mapping[str, Any]) -> str | None:
    return next(filter(None, _strings(call, "call_id", "toolCallId", "id")), None)


def _is_of_function(call: object) -> bool:
    return isinstance(call, dict) and call.get("type") != "custom" and bool(_called(call)[0])


def _called(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name of a call's function, empty if it has none; and the object that has it."""
    function = call["function"] if isinstance(call.get("function"), dict) else call
    return next(filter(None, _strings(function, "name", "toolName")), ""), function


def _pictures(message: Mapping[str, Any]) -> list[str]:
    """Notes in place of a message's images in Ollama's form."""
    images = message.get("images")
    return [text_of({"type": "image"}) for _ in images] if isinstance(images, list) else []


def _strings(given: Mapping[str, Any], *names: str) -> list[str]:
    """The texts of these names that are there; numbers are text."""
    values = (given.get(name) for name in names)
    return [str(value) for value in values if isinstance(value, str | int)]


def _thought(given: object) -> str:
    """The text of a piece of reasoning in any of its forms; empty: it is encrypted."""
    if isinstance(given, list):
        return "".join(map(_thought, given))
    if isinstance(given, dict):
        values = (given.get(name) for name in _THOUGHT_TEXTS)
        return next(filter(None, map(_thought, values)), "")
    return given if isinstance(given, str) else ""
