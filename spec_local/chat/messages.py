"""Messages and tools: their types, and their forms as programs give them."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, NotRequired, TypedDict, get_args

from pydantic_core import from_json

from spec_local.errors import InvalidRequest
from spec_local.images.media import Media
from spec_local.text import bytes_of, with_whole_characters

Role = Literal["system", "user", "assistant", "tool"]


class CalledFunction(TypedDict):
    """The name of a tool, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(TypedDict):
    """A call in an answer, in the form of OpenAI's API."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    """A message of a conversation.

    images: also sounds; each with its place, the index in the content of the character that it stands before.
    reasoning_content: what the model wrote before this answer. tool_calls: what it called in this answer.
    tool_call_id: the call whose result this message of a tool is. name: of that tool.
    """

    role: Role
    content: str
    images: NotRequired[Sequence[tuple[int, Media]]]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Sequence[MessageToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


Tool = Mapping[str, object]
"""A tool that the model may call: ``{"type": "function", "function": {"name": …, "description": …,
"parameters": …}}``, with a JSON schema of the parameters."""

_ROLES = {role: role for role in get_args(Role)} | {"developer": "system"}  # OpenAI's newer name
_KEYS = {*Message.__required_keys__, *Message.__optional_keys__}
_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_NO_PARAMETERS = {"type": "object", "properties": {}}
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def messages_of(given: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages in the one form that the library uses.

    The content is text, or a list of texts, images and sounds: each part is text, an `Image`, an `Audio`, or
    a dict, which is ``{"type": "text", "text": …}`` or ``{"type": "image", "image": …}``, and so for
    ``audio``. As in llama.cpp, a line break separates texts that follow each other.

    ``developer`` is another name for ``system``. An answer with calls may have the content None. Keys with
    the value None count as missing.

    Raises:
        InvalidRequest: a message is incomplete or wrong; the error names its index.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the called tools, by the call's id
    for i, message in enumerate(given):
        made = _message(message, f"messages[{i}]")
        for call in made.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if made["role"] == "tool" and (name := names.get(made.get("tool_call_id", ""))):
            made.setdefault("name", name)
        messages.append(made)
    return messages


def check_last(messages: Sequence[Mapping[str, object]]) -> None:
    """Raise InvalidRequest if there is nothing to answer: no message, or one that waits for results."""
    if not messages:
        raise InvalidRequest("there is no question to answer: give at least one message")
    if messages[-1].get("tool_calls"):
        raise InvalidRequest("the last message calls tools: add a message with the result of each call")


def tools_of(given: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the one form that templates get, which is that of the usual training data.

    Other keys than name, description and parameters, such as ``strict``, are left out.

    Raises:
        InvalidRequest: a tool is incomplete or wrong; the error names its index.
    """
    tools: list[dict[str, Any]] = []
    names = set[str]()
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise InvalidRequest(f"{where} is not a function: give the type function")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise InvalidRequest(f"{where} has no function: give its name, description and parameters")
        name = _text(function, "name", f"{where}.function")
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.function.name is {name[:40]!a}: give up to 128 letters, digits, _ or -"
            )
        if name in names:
            raise InvalidRequest(f"{where} has the name {name!r} of another tool: rename one of them")
        parameters = function.get("parameters") or _NO_PARAMETERS
        if not isinstance(parameters, Mapping):
            raise InvalidRequest(f"{where}.function.parameters is no JSON schema: give an object")
        described = {"description": "", **{k: v for k, v in function.items() if v is not None}}
        description = _text(described, "description", f"{where}.function")
        try:
            parameters = json.loads(json.dumps(dict(parameters), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} cannot be written as JSON ({error}): correct it") from None
        names.add(name)
        known = {"name": name, "description": description, "parameters": parameters}
        tools.append({"type": "function", "function": known})
    return tools


Arguments = Literal["parsed", "text", "repaired"]
"""How templates get the arguments of calls: as the JSON object that they are, or as text. Of what is no
object, "parsed" makes text, and "repaired" an object."""


def for_template(
    messages: Sequence[Message], arguments: Arguments, *, short_ids: bool
) -> list[dict[str, Any]]:
    """Messages as a chat template gets them.

    Args:
        short_ids: replace the ids of calls by nine letters and digits.
    """

    def id_of(call: str) -> str:
        is_right = not short_ids or _SHORT_ID.fullmatch(call)
        return call if is_right else hashlib.sha256(bytes_of(call)).hexdigest()[:9]

    def called(function: CalledFunction) -> dict[str, Any]:
        text = function["arguments"]
        value = None if arguments == "text" else json_object(text)
        if value is None and arguments == "repaired":
            value = repaired_object(text)
        return {**function} if value is None else {**function, "arguments": value}

    shown: list[dict[str, Any]] = [dict(message) for message in messages]
    for message in shown:
        if "tool_call_id" in message:
            message["tool_call_id"] = id_of(message["tool_call_id"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": id_of(call["id"]), "type": "function", "function": called(call["function"])}
                for call in calls
            ]
    return shown


INVALID = object()


def json_value(text: str) -> object:
    """The value of JSON, in whose strings line breaks are allowed; `INVALID`: it is no JSON."""
    try:
        value: object = json.loads(text, strict=False, parse_constant=_refuse)
        # What is nested too deeply, or infinite, cannot be passed on.
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        whole = with_whole_characters(written)
        return value if whole == written else json.loads(whole)
    except (ValueError, RecursionError):
        return INVALID


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None: it is none."""
    found = json_value(text)
    return found if isinstance(found, dict) else None


def repaired_object(text: str) -> dict[str, Any]:
    """A JSON object for arguments that are none: what is complete of it, or the text as an argument."""
    try:
        value = json_object(json.dumps(from_json(text, allow_partial="trailing-strings")))
    except (ValueError, RecursionError):
        value = None
    return {"arguments": text} if value is None else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _message(given: Mapping[str, object], where: str) -> Message:
    values = {key: value for key, value in given.items() if value is not None}
    role = _text(values, "role", where)
    if role not in _ROLES:
        raise InvalidRequest(f"{where} has the role {role[:40]!a}: give {', '.join(get_args(Role))}")
    if unknown := sorted(map(str, values.keys() - _KEYS)):
        raise InvalidRequest(f"{where} has the unknown key {unknown[0][:40]!a}: remove it")
    calls = _calls(values.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest(f"{where} has tool_calls but the role {role}: only the assistant calls tools")
    if role == "tool" and "tool_call_id" not in values:
        raise InvalidRequest(f"{where} has no tool_call_id: give the id of the call that it answers")
    images = values.get("images", ())
    if isinstance(content := values.get("content"), list | tuple):
        values["content"], images = _parts(content, where)
    made: Message = {
        "role": _ROLES[role],
        "content": _text({"content": "", **values} if calls else values, "content", where),
    }
    if images:
        made["images"] = _placed(images, made["content"], where)
    for key in ("reasoning_content", "tool_call_id", "name"):
        if key in values:
            made[key] = _text(values, key, where)
    if calls:
        made["tool_calls"] = calls
    return made


def _parts(content: Sequence[object], where: str) -> tuple[str, list[tuple[int, Media]]]:
    """The text of parts, and the images with their places in it."""
    text, images, follows_text = "", list[tuple[int, Media]](), False
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in ("text", "image", "audio"):
            part = part.get(str(part["type"]))
        if isinstance(part, Media):
            images.append((len(text), part))
        elif isinstance(part, str):
            text += "\n" * (follows_text and bool(text)) + part
        else:
            raise InvalidRequest(
                f"{where}.content[{i}] is neither text nor an image or sound: give one of them"
            )
        follows_text = isinstance(part, str)
    return text, images


def _placed(images: object, content: str, where: str) -> list[tuple[int, Media]]:
    """Images with their places, which must be ascending."""
    found, last = list[tuple[int, Media]](), 0
    for each in images if isinstance(images, list | tuple) else [images]:
        match each:
            case (int(at), Media() as image) if last <= at <= len(content):
                found.append((last := at, image))
            case _:
                raise InvalidRequest(
                    f"{where}.images: give pairs of an ascending index of the content and an Image or Audio"
                )
    return found


def _calls(given: object, where: str) -> list[MessageToolCall]:
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise InvalidRequest(f"{where} is {type(given).__name__}: give a list of calls")
    calls: list[MessageToolCall] = []
    for i, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise InvalidRequest(f"{where}[{i}] is not the call of a function: give id, type and function")
        called: CalledFunction = {
            "name": _text(function, "name", f"{where}[{i}].function"),
            "arguments": _text(function, "arguments", f"{where}[{i}].function"),
        }
        calls.append({"id": _text(call, "id", f"{where}[{i}]"), "type": "function", "function": called})
    return calls


def _text(given: Mapping[str, object], key: str, where: str) -> str:
    value = given.get(key)
    if value is None:
        raise InvalidRequest(f"{where} has no {key}: give text")
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key} is {type(value).__name__}: give text")
    return value
