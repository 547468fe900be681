"""Images and sounds while a template renders the text around them: unguessable marks stand for them."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from spec_local.chat.messages import Message
from spec_local.chat.rendered import Rendered
from spec_local.errors import InvalidRequest, ModelError
from spec_local.images.marks import NumberedMarks
from spec_local.images.media import MAX_IMAGES, Media

Render = Callable[[Sequence[Message]], Rendered]


def rendered_with_images(messages: Sequence[Message], render: Render) -> Rendered:
    """The rendered text of messages with their images.

    Where the template leaves out images in results of tools, they become the user's.

    Args:
        messages: in the library's form.
        render: renders messages without images.

    Raises:
        InvalidRequest: there are too many images.
        ModelError: the template leaves out an image; and what `render` raises.
    """
    try:
        return _rendered(messages, render)
    except ModelError:
        if not any(message["role"] == "tool" and message.get("images") for message in messages):
            raise
    return _rendered(_after_results(messages), render)


def _rendered(messages: Sequence[Message], render: Render) -> Rendered:
    images = [image for message in messages for _, image in message.get("images", ())]
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(
            f"the conversation has {len(images)} images and sounds: give at most {MAX_IMAGES}"
        )
    if not images:
        return render(messages)
    marks = NumberedMarks()
    numbered = map(marks.of, itertools.count())
    rendered = render([_marked(message, numbered) for message in messages])
    return rendered.with_images([marks.of(i).encode() for i in range(len(images))], images)


def _marked(message: Message, marks: Iterator[str]) -> Message:
    """The message with marks in its content instead of images."""
    content, text, end = message["content"], "", 0
    for at, _ in message.get("images", ()):
        text += content[end:at] + next(marks)
        end = at
    marked = message | {"content": text + content[end:]}
    marked.pop("images", None)
    return marked


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
