"""Images and sounds while a template renders the text around them: unguessable marks stand for them."""

from collections.abc import Callable, Sequence

from spec_local.chat.messages import Message
from spec_local.chat.rendered import Rendered
from spec_local.errors import InvalidRequest, ModelError
from spec_local.images.marks import NumberedMarks
from spec_local.images.media import MAX_IMAGES, Media


def rendered_with_images(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], Rendered]
) -> Rendered:
    """The rendered text of messages with their images.

    Where the template leaves out images in results of tools, they become the user's.

    Args:
        messages: in the library's form.
        render: renders messages without images.

    Raises:
        InvalidRequest: there are too many images.
        ModelError: the template leaves out an image; and what `render` raises.
    """
    marks = ImageMarks(messages)
    try:
        return marks.put(render(marks.messages))
    except ModelError:
        if not any(message["role"] == "tool" and message.get("images") for message in messages):
            raise
    marks = ImageMarks(_after_results(messages))
    return marks.put(render(marks.messages))


def _after_results(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the images of results in the user's message after them."""
    found, waiting = list[Message](), list[tuple[int, Media]]()
    for message in messages:
        if message["role"] == "tool":
            message = message.copy()
            waiting += [(0, image) for _, image in message.pop("images", ())]
        elif waiting and message["role"] == "user":
            message, waiting = message | {"images": [*waiting, *message.get("images", ())]}, []
        elif waiting:
            found.append({"role": "user", "content": "", "images": waiting})
            waiting = []
        found.append(message)
    return [*found, {"role": "user", "content": "", "images": waiting}] if waiting else found


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
        self._images: list[Media] = []
        self._marks = NumberedMarks()
        self.messages = [self._marked(message) for message in messages]
        if len(self._images) > MAX_IMAGES:
            raise InvalidRequest(
                f"the conversation has {len(self._images)} images and sounds: give at most {MAX_IMAGES}"
            )

    def _marked(self, message: Message) -> Message:
        if not message.get("images"):
            return message
        content, text, end = message["content"], "", 0
        for at, image in message["images"]:
            text += content[end:at] + self._marks.of(len(self._images))
            self._images.append(image)
            end = at
        marked = message | {"content": text + content[end:]}
        del marked["images"]
        return marked

    def put(self, rendered: Rendered) -> Rendered:
        """The images in place of their marks in a rendered text.

        Raises:
            ModelError: the template leaves out an image.
        """
        if not self._images:
            return rendered
        return rendered.with_images(
            [self._marks.of(i).encode() for i in range(len(self._images))], self._images
        )
