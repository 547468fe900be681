"""Images and sounds in the messages of llama-cpp-python: marks stand for them until a prompt is tokenized."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.marks import NumberedMarks
from spec_local.images.media import MAX_IMAGES, Media
from spec_local.text import bytes_of

_KINDS = {
    "image_url": ("url", Image.of_data_uri, "data:image/png;base64,…"),
    "input_audio": ("data", Audio.of_base64, "base64"),
}
"""By the type of a part: the key of its data, what reads them, and what they are."""


class MarkedMessages:
    """Messages with marks, which nobody can guess, in place of their images and sounds.

    Args:
        messages: with parts as in OpenAI's API: ``{"type": "image_url", "image_url": {"url": …}}`` with a
            data URI, and ``{"type": "input_audio", "input_audio": {"data": …}}`` with base64.

    Attributes:
        messages: the same ones; the contents of those with images or sounds have become text.
        images: also sounds, in their order.

    Raises:
        InvalidRequest: an image or sound is invalid, or there are too many.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        self.images: list[Media] = []
        self._marks = NumberedMarks()
        self.messages = [self._marked(message) for message in messages]
        if len(self.images) > MAX_IMAGES:
            raise InvalidRequest(f"the messages have {len(self.images)} images: give at most {MAX_IMAGES}")

    def _marked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list) or all(part.get("type") not in _KINDS for part in content):
            return message
        text, follows_text = "", False
        for part in content:
            is_image = part.get("type") in _KINDS
            if is_image:
                text += self._marks.of(len(self.images))
                self.images.append(_media(part))
            elif not isinstance(part.get("text"), str):
                raise InvalidRequest(f"a part of the type {part.get('type')!r} has no text: give a text")
            else:
                text += "\n" * follows_text + part["text"]  # as in llama.cpp
            follows_text = not is_image
        return {**message, "content": text}

    def tokens(
        self,
        prompt: bytes,
        tokenize: Callable[[bytes, bool], Sequence[int]],
        image_tokens: Callable[[Media], Sequence[int]],
    ) -> list[int]:
        """The tokens of a prompt that a template has made of the messages.

        Args:
            tokenize: of a text; the second argument says whether it begins the prompt.
            image_tokens: see `Model.image_tokens`.
        """
        first, *rest = self._marks.split(prompt.decode("utf-8", "surrogateescape"))
        found = list(tokenize(bytes_of(first), True))
        for number, text in zip(rest[::2], rest[1::2], strict=True):
            found += image_tokens(self.images[int(number)])
            found += tokenize(bytes_of(text), False) if text else ()
        return found


def _media(part: Mapping[str, Any]) -> Media:
    kind = part["type"]
    key, read, form = _KINDS[kind]
    data = part.get(kind)
    data = data.get(key) if isinstance(data, Mapping) else data
    if not isinstance(data, str):
        raise InvalidRequest(f'a part of the type {kind!r} has no data: give {{"{key}": "{form}"}} in {kind}')
    return read(data)
