"""Content as text: also what a model of text cannot read, and calls of tools that do not exist here."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import Media

_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
"""The kinds of parts that have text, and where."""
MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(
        ("document", "file", "input_file", "document_url", "container_upload", "resource"), "document"
    ),
}
"""What parts of these types are."""
_NAMES = ("title", "filename", "name")
_NOTE = "left out: this model reads text only"
_NOTES_BESIDE: Mapping[frozenset[type[Media]], str] = {  # what a model reads, and the note
    frozenset([Image]): "left out: this model reads text and images only",
    frozenset([Audio]): "left out: this model reads text and sound only",
    frozenset([Image, Audio]): "left out: this model reads text, images and sound only",
}
_PLACEHOLDER = re.compile(
    rf"\[(?:{'|'.join({*MEDIA.values()})})(?: \S.*)? (?:{'|'.join([_NOTE, *_NOTES_BESIDE.values()])})\]"
)
_CALL = re.compile(r"\w+_(?:call|tool_use)|mcp_approval_request")
_RESULT = re.compile(r"\w+_(?:call_output|tool_result)|mcp_approval_response")
_UNSAID = {
    *("id", "type", "status", "call_id", "tool_use_id", "approval_request_id", "cache_control", "caller"),
    *("encrypted_content", "encrypted_index", "signature"),
}
"""Keys of items whose values say nothing to a model."""


def text_of(part: object) -> str:
    """The text of a part of a message; of an image, a document or the like, a note that it was left out.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ValueError("a part of the content is not an object: give text, or parts of the type text")
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise ValueError("a part of the content has no type: give text, or parts of the type text")
    if kind in _TEXTS:
        text = part.get(_TEXTS[kind])
        text = text.get("value") if isinstance(text, dict) else text  # OpenAI's assistants, LibreChat
        if not isinstance(text, str):
            raise ValueError(f"a part of the content has no text: give its {_TEXTS[kind]}")
        return text
    if kind == "search_result":
        return "\n".join([*_strings(part, "title", "source"), readable(part.get("content"))])
    if kind in ("tool_reference", "resource_link") or role_of(kind):
        return described(part)
    match part:
        case {"type": "resource", "resource": {"text": str(text)} as resource}:  # of MCP
            return "\n".join([*_strings(resource, "uri"), text])
    if kind not in MEDIA and isinstance(text := part.get("text"), str):
        return text
    if kind not in MEDIA:
        raise ValueError(f"content of the type {kind[:40]} is not supported: give text")
    match part.get("source"):
        case {"type": "text", "data": str(text)}:
            return "\n".join([*_strings(part, "title", "context"), text])
        case {"type": "content", "content": content}:
            return "\n".join([*_strings(part, "title", "context"), readable(content)])
    inner = part.get(kind)
    names = [*_strings(part, *_NAMES), *_strings(inner if isinstance(inner, dict) else {}, *_NAMES)]
    return f"[{' '.join([MEDIA[kind], *names[:1]])} {_NOTE}]"


def left_out_beside_images(part: Mapping[str, Any], reads: Iterable[type[Media]]) -> str | None:
    """The note in place of a part that a model of such files cannot read; None: it is no such part."""
    if part.get("type") not in MEDIA or not _PLACEHOLDER.fullmatch(text := text_of(part)):
        return None
    return text.replace(_NOTE, _NOTES_BESIDE[frozenset(reads)])


def content_of(content: object) -> str:
    """The text of the content of a message: its parts are lines.

    Raises:
        ValueError: it is not text, nor a list of parts.
    """
    if isinstance(content, list):
        return "\n".join(map(text_of, content))
    if not isinstance(content, str):
        raise ValueError("the content is not text: give text, or a list of parts")
    return content


def readable(content: object) -> str:
    """The text of a result or an earlier turn: other JSON is text, and what cannot be read is a note."""
    if not isinstance(content, list):
        return "" if content is None else _readable_part(content)
    if content and not any(isinstance(part, str) or _is_part(part) for part in content):
        return json.dumps(content, ensure_ascii=False)
    return "\n".join(map(_readable_part, content))


def _readable_part(part: object) -> str:
    try:
        return text_of(part)
    except ValueError:
        return note(part["type"]) if _is_part(part) else json.dumps(part, ensure_ascii=False)


def _is_part(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def note(kind: str) -> str:
    """What stands for a part or an item of an earlier turn that cannot be read."""
    return f"[{' '.join(kind.split())[:40]} left out: it cannot be read here]"


def has_text(content: str) -> bool:
    """Return whether there is more in a message than notes that something was left out."""
    lines = content.splitlines()
    return not lines or not all(_PLACEHOLDER.fullmatch(line) or not line for line in lines)


def role_of(kind: str) -> str | None:
    """The role of a message in place of an item that is not a function's; None: it has another meaning."""
    if _CALL.fullmatch(kind):
        return "assistant"
    return "user" if _RESULT.fullmatch(kind) else None


def described(item: Mapping[str, Any]) -> str:
    """A call of a tool that does not exist here, or its result, as text; empty: it carries nothing."""
    told = {"result": f"[image {_NOTE}]"} if item["type"] == "image_generation_call" else _told(item)
    return f"[{item['type']}: {json.dumps(told, ensure_ascii=False)}]" if told else ""


def _told(value: Any) -> Any:
    """The value without what says nothing."""
    if isinstance(value, list):
        return [_told(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _is_part(value) and value["type"] in MEDIA:
        return text_of(value)
    kept = {key: _told(each) for key, each in value.items() if key not in _UNSAID}
    return {key: each for key, each in kept.items() if each not in (None, "", [], {})}


def _strings(part: Mapping[str, Any], *names: str) -> Iterator[str]:
    """The texts of these names that are there, each as one line."""
    return (" ".join(value.split()) for name in names if isinstance(value := part.get(name), str) and value)
