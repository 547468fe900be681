"""Images while a template renders the text around them: marks that nobody can guess stand for them."""

import secrets
from collections.abc import Sequence

from spec_local.chat.messages import Message
from spec_local.chat.rendered import Rendered
from spec_local.errors import InvalidRequest
from spec_local.images.image import MAX_IMAGES, Image


class ImageMarks:
    """The images of some messages.

    Args:
        messages: in the library's form.

    Attributes:
        messages: the same, with marks in their contents instead of images.

    Raises:
        InvalidRequest: there are too many images.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._images: list[Image] = []
        self._nonce = secrets.token_hex(8)
        self.messages = [self._marked(message) for message in messages]
        if len(self._images) > MAX_IMAGES:
            raise InvalidRequest(
                f"the conversation has {len(self._images)} images: give at most {MAX_IMAGES}"
            )

    def _marked(self, message: Message) -> Message:
        if not message.get("images"):
            return message
        content, text, end = message["content"], "", 0
        for at, image in message["images"]:
            text += content[end:at] + self._mark(len(self._images))
            self._images.append(image)
            end = at
        marked = message | {"content": text + content[end:]}
        del marked["images"]
        return marked

    def _mark(self, i: int) -> str:
        return f"[image {self._nonce} {i}]"

    def put(self, rendered: Rendered) -> Rendered:
        """The images in place of their marks in a rendered text.

        Raises:
            ModelError: the template leaves out an image.
        """
        if not self._images:
            return rendered
        return rendered.with_images([self._mark(i).encode() for i in range(len(self._images))], self._images)
