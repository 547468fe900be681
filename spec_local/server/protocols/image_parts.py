"""The images in bodies, in the forms of all protocols: where they stand, and where their data are."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spec_local.errors import InvalidRequest
from spec_local.server.protocols.left_out import left_out_beside_images

_KINDS = ("image", "image_url", "input_image", "image_file", "computer_screenshot")
_FILES = ("file", "input_file", "media")
_DATA = ("data", "base64", "image", "blob", "file_data")
"""Names of base64 in parts: of MCP and Anthropic, LangChain, AI SDK, MCP's resources, OpenAI's files."""
_MEDIA_TYPES = ("mediaType", "mimeType", "mime_type", "media_type")
_CONTENT = ("content", "parts", "output", "value", "source")
"""Keys under which there are parts. Other JSON, such as the arguments of a call, may have any form."""
_FORM = 'give {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where the data of an image are: text in base64, or a URL, which may be a data URI."""

    kind: Literal["base64", "url"]
    text: str


Put = Callable[[ImageSource, str], str]
"""Keep an image, and return the text that stands for it. The second argument is its name in errors."""


def with_marks(item: Mapping[str, Any], where: str, put: Put) -> Mapping[str, Any]:
    """A message or an item with text in place of its images.

    Args:
        where: its name in errors.

    Raises:
        InvalidRequest: an image has a form that cannot be read, or is in a file of another server.
    """
    if item.get("type") == "image_generation_call" and isinstance(result := item.get("result"), str):
        return {"role": "assistant", "content": put(ImageSource("base64", result), f"{where}.result")}
    found = _with_marked_content(item, where, put)
    if isinstance(images := found.get("images"), list):  # of Ollama, where they stand before the text
        marks = [put(_of_item(image, name), name) for image, name in _named(images, f"{where}.images")]
        content = found.get("content")
        rest = content if isinstance(content, list) else [] if content is None else [content]
        found |= {"content": [*marks, *rest] if marks else content, "images": None}
    return found


def _with_marked_content(item: Mapping[str, Any], where: str, put: Put) -> dict[str, Any]:
    return {
        key: _marked(value, f"{where}.{key}", put) if key in _CONTENT else value
        for key, value in item.items()
    }


def _named(values: list[Any], where: str) -> list[tuple[Any, str]]:
    return [(value, f"{where}[{i}]") for i, value in enumerate(values)]


def _marked(value: Any, where: str, put: Put) -> Any:
    """The value with text in place of images at any depth."""
    if isinstance(value, list):
        return [_marked(each, name, put) for each, name in _named(value, where)]
    if not isinstance(value, dict):
        return value
    if source := _source(value, where):
        return put(source, where)
    if value.get("type") == "json":
        return value
    found = _with_marked_content(value, where, put)
    return left_out_beside_images(found) or found


def _source(part: Mapping[str, Any], where: str) -> ImageSource | None:
    """Where the data of a part are; None: it is no image."""
    kind = part.get("type")
    if kind in _KINDS:
        return _found(part, where)
    if kind == "resource" and isinstance(resource := part.get("resource"), dict):  # of MCP
        return _found(resource, where) if "blob" in resource and _is_image(resource) else None
    if kind in _FILES:
        inner = part["file"] if isinstance(part.get("file"), dict) else part
        data = inner.get("file_data")
        if _is_image(inner) or (isinstance(data, str) and data[:11].lower() == "data:image/"):
            return _found(inner, where)
    return None


def _is_image(part: Mapping[str, Any]) -> bool:
    return any(str(part.get(name)).lower().startswith("image/") for name in _MEDIA_TYPES)


def _found(part: Mapping[str, Any], where: str) -> ImageSource:
    """Where the data of an image are.

    Raises:
        InvalidRequest: its part has none.
    """
    source = part.get("source")
    places = [part, source if isinstance(source, dict) else {}]
    places += [inner for name in ("image_url", "image_file") if isinstance(inner := part.get(name), dict)]
    for place, name in itertools.product(places, ("image_url", "url", *_DATA)):
        if (given := place.get(name)) is not None and not isinstance(given, dict):
            if name in ("image_url", "url"):
                return ImageSource("url", _text(given, where))
            return _of_text(given, where)
    if any(place.get(name) for place in places for name in ("file_id", "fileId", "id")):
        raise InvalidRequest(f"{where}: the image is a file's id, but no files are stored here: {_FORM}")
    raise InvalidRequest(f"{where}: the image has no data: {_FORM}")


def _of_item(given: object, where: str) -> ImageSource:
    """The source in an item of a list of images, which is a text, or a part of OpenRouter's answers."""
    return (isinstance(given, dict) and _source(given, where)) or _of_text(given, where)


def _of_text(given: object, where: str) -> ImageSource:
    """The source in a text of base64, in place of which some programs send a URL."""
    text = _text(given, where)
    is_url = text[:5].lower() == "data:" or "://" in text[:10]
    return ImageSource("url" if is_url else "base64", text)


def _text(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{where}: the image is not text: {_FORM}")
    return given
