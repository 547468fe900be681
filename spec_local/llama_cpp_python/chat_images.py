"""Images in the messages of llama-cpp-python: marks stand for them until the prompt is tokenized."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.images.image import Image
from spec_local.images.marks import NumberedMarks
from spec_local.images.media import MAX_IMAGES
from spec_local.text import bytes_of


class MarkedMessages:
    """Messages with marks, which nobody can guess, in place of their images.

    Args:
        messages: with images as in OpenAI's API: ``{"type": "image_url", "image_url": {"url": …}}``
            with a data URI.

    Attributes:
        messages: the same ones; the contents of those with images have become text.
        images: in their order.

    Raises:
        InvalidRequest: an image is invalid, or there are too many.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        self.images: list[Image] = []
        self._marks = NumberedMarks()
        self.messages = [self._marked(message) for message in messages]
        if len(self.images) > MAX_IMAGES:
            raise InvalidRequest(f"the messages have {len(self.images)} images: give at most {MAX_IMAGES}")

    def _marked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list) or all(part.get("type") != "image_url" for part in content):
            return message
        text, follows_text = "", False
        for part in content:
            is_image = part.get("type") == "image_url"
            if is_image:
                url = part["image_url"]
                text += self._marks.of(len(self.images))
                self.images.append(Image.of_data_uri(url["url"] if isinstance(url, Mapping) else url))
            else:
                text += "\n" * follows_text + part["text"]  # as in llama.cpp
            follows_text = not is_image
        return {**message, "content": text}

    def tokens(
        self,
        prompt: bytes,
        tokenize: Callable[[bytes, bool], Sequence[int]],
        image_tokens: Callable[[Image], Sequence[int]],
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
