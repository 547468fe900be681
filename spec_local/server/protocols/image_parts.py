"""Images and sounds in bodies, in the forms of all protocols: where they stand, and where the data are."""

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spec_local.errors import InvalidRequest
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import Media
from spec_local.server.protocols.left_out import MEDIA, left_out_beside_images

_READ: Mapping[str, type[Media]] = {"image": Image, "audio": Audio}
_KINDS = {kind: _READ[what] for kind, what in MEDIA.items() if what in _READ}
_FILES = ("file", "input_file", "media")
_DATA = ("data", "base64", "image", "blob", "file_data")
"""Names of base64 in parts: of MCP and Anthropic, LangChain, AI SDK, MCP's resources, OpenAI's files."""
_URLS = ("image_url", "audio_url", "url")
_INNER = ("image_url", "image_file", "audio_url", "input_audio")
_MEDIA_TYPES = ("mediaType", "mimeType", "mime_type", "media_type")
_CONTENT = ("content", "parts", "output", "value", "source")
"""Keys under which there are parts. Other JSON, such as the arguments of a call, may have any form."""
_FORMS: Mapping[type[Media], str] = {
    Image: 'give {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}',
    Audio: 'give {"type": "input_audio", "input_audio": {"data": "…", "format": "wav"}}',
}


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where the data of an image or sound are: text in base64, or a URL, which may be a data URI.

    media: what it is; `MediaFile`: its content decides.
    """

    kind: Literal["base64", "url"]
    text: str
    media: type[Media] = Image


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps what a model reads.

    reads: the kinds of files. put: keeps an image or sound, and returns the text that stands for it; the
    second argument is its name in errors.
    """

    reads: Collection[type[Media]]
    put: Callable[[ImageSource, str], str]


def with_marks(item: Mapping[str, Any], where: str, keeper: Keeper) -> Mapping[str, Any]:
    """A message or an item with text in place of its images and sounds.

    Args:
        where: its name in errors.

    Raises:
        InvalidRequest: an image has a form that cannot be read, or is in a file of another server.
    """
    sees = Image in keeper.reads
    if sees and item.get("type") == "image_generation_call" and isinstance(result := item.get("result"), str):
        return {"role": "assistant", "content": keeper.put(ImageSource("base64", result), f"{where}.result")}
    found = _with_marked_content(item, where, keeper)
    images = found.get("images") if sees else None  # of Ollama, where they stand before the text
    if isinstance(images, list):
        marks = [keeper.put(_of_item(image, name), name) for image, name in _named(images, f"{where}.images")]
        content = found.get("content")
        rest = content if isinstance(content, list) else [] if content is None else [content]
        found |= {"content": [*marks, *rest] if marks else content, "images": None}
    return found


def _with_marked_content(item: Mapping[str, Any], where: str, keeper: Keeper) -> dict[str, Any]:
    return {
        key: _marked(value, f"{where}.{key}", keeper) if key in _CONTENT else value
        for key, value in item.items()
    }


def _named(values: list[Any], where: str) -> list[tuple[Any, str]]:
    return [(value, f"{where}[{i}]") for i, value in enumerate(values)]


def _marked(value: Any, where: str, keeper: Keeper) -> Any:
    """The value with text in place of images and sounds at any depth."""
    if isinstance(value, list):
        return [_marked(each, name, keeper) for each, name in _named(value, where)]
    if not isinstance(value, dict):
        return value
    if source := _source(value, where, keeper.reads):
        return keeper.put(source, where)
    if value.get("type") == "json":
        return value
    found = _with_marked_content(value, where, keeper)
    return left_out_beside_images(found, keeper.reads) or found


def _source(part: Mapping[str, Any], where: str, reads: Collection[type[Media]]) -> ImageSource | None:
    """Where the data of a part are; None: the model does not read it."""
    kind, inner = part.get("type"), part
    media = _KINDS.get(kind) if isinstance(kind, str) else None
    if kind == "resource" and isinstance(resource := part.get("resource"), dict):  # of MCP
        inner, media = resource, _media_of(resource) if "blob" in resource else None
    elif kind in _FILES:
        inner = part["file"] if isinstance(part.get("file"), dict) else part
        data = inner.get("file_data")
        media = _media_of(inner) or (_kind_of(data[5:]) if isinstance(data, str) else None)
    return _found(inner, where, media) if media in reads and media else None


def _media_of(part: Mapping[str, Any]) -> type[Media] | None:
    return next(filter(None, (_kind_of(str(part.get(name))) for name in _MEDIA_TYPES)), None)


def _kind_of(media_type: str) -> type[Media] | None:
    return _READ.get(media_type[:6].lower().removesuffix("/"))


def _found(part: Mapping[str, Any], where: str, media: type[Media]) -> ImageSource:
    """Where the data of an image or sound are.

    Raises:
        InvalidRequest: its part has none.
    """
    source = part.get("source")
    places = [part, source if isinstance(source, dict) else {}]
    places += [inner for name in _INNER if isinstance(inner := part.get(name), dict)]
    for place, name in itertools.product(places, (*_URLS, *_DATA)):
        if (given := place.get(name)) is not None and not isinstance(given, dict):
            if name in _URLS:
                return ImageSource("url", _text(given, where, media), media)
            return _of_text(given, where, media)
    if any(place.get(name) for place in places for name in ("file_id", "fileId", "id")):
        raise InvalidRequest(
            f"{where}: the {media.noun} is a file's id, but no files are stored here: {_FORMS[media]}"
        )
    raise InvalidRequest(f"{where}: the {media.noun} has no data: {_FORMS[media]}")


def _of_item(given: object, where: str) -> ImageSource:
    """The source in an item of a list of images, which is a text, or a part of OpenRouter's answers."""
    return (isinstance(given, dict) and _source(given, where, [Image])) or _of_text(given, where, Image)


def _of_text(given: object, where: str, media: type[Media]) -> ImageSource:
    """The source in a text of base64, in place of which some programs send a URL."""
    text = _text(given, where, media)
    is_url = text[:5].lower() == "data:" or "://" in text[:10]
    return ImageSource("url" if is_url else "base64", text, media)


def _text(given: object, where: str, media: type[Media]) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{where}: the {media.noun} is not text: {_FORMS[media]}")
    return given
