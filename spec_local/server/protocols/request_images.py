"""The images of one request: marks stand for them while its texts are read, and then they are decoded."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.images.image import MAX_IMAGES, Image
from spec_local.images.marks import NumberedMarks
from spec_local.server.protocols.image_parts import ImageSource, with_marks
from spec_local.server.protocols.image_urls import ImageHosts
from spec_local.server.supervision.events import Loaded
from spec_local.system.cancellation import check_wanted

MARKER = "<__media__>"
"""What stands for an image in the text of a prompt, as in llama.cpp's server."""
_KEPT_BYTES = 128 << 20
"""Of images that were decoded once: programs send a conversation's images again with each question."""


class RequestImages:
    """The images of one request.

    Args:
        hosts: from which images are fetched.
    """

    def __init__(self, hosts: ImageHosts) -> None:
        self._hosts = hosts
        self._sources: list[tuple[ImageSource, str]] = []
        self._marks = NumberedMarks()

    @classmethod
    def of(cls, loaded: Loaded) -> "RequestImages | None":
        """Those of a request to a model; None: it reads only text."""
        return cls(ImageHosts(loaded.image_hosts)) if loaded.reads_images else None

    def marked(self, items: Sequence[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
        """Messages or items with marks in place of images; field: their name in errors.

        Raises:
            InvalidRequest: there are too many images, or one has a form that cannot be read.
        """
        return [with_marks(item, f"{field}[{i}]", self._put) for i, item in enumerate(items)]

    def _put(self, source: ImageSource, where: str) -> str:
        if len(self._sources) == MAX_IMAGES:
            raise InvalidRequest(f"{where}: there are more than {MAX_IMAGES} images: send fewer")
        self._sources.append((source, where))
        return self._marks.of(len(self._sources) - 1)

    def placed(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in which images, with their places, have replaced the marks.

        Nothing stands between text and an image: the line breaks that join a mark to other parts are removed.

        Raises:
            InvalidRequest: an image cannot be read.
        """
        rest, *others = self._marks.split(message["content"])
        content, images = "", list[tuple[int, Image]]()
        for number, after in zip(others[::2], others[1::2], strict=True):
            content += rest.removesuffix("\n")
            images.append((len(content), self._image(*self._sources[int(number)])))
            rest = after.removeprefix("\n")
        return message | {"content": content + rest, "images": images} if images else message

    def prompt(self, text: str, data: object, field: str) -> list[str | Image]:
        """The texts and images of a prompt of llama.cpp's server.

        Args:
            text: with a `MARKER` for each image.
            data: the images in base64.
            field: the name of the prompt in errors.

        Raises:
            InvalidRequest: they are not as many as the markers, or one cannot be read.
        """
        if not isinstance(data, list) or not all(isinstance(each, str) for each in data):
            raise InvalidRequest(f"{field}.multimodal_data is not a list of texts: give images in base64")
        texts = text.split(MARKER)
        if len(data) != len(texts) - 1:
            raise InvalidRequest(
                f"{field}: prompt_string has {len(texts) - 1} of {MARKER}, but multimodal_data has "
                f"{len(data)} images: give as many"
            )
        return self.before(data, f"{field}.multimodal_data", texts)

    def before(self, data: Sequence[Any], field: str, texts: Sequence[str]) -> list[str | Image]:
        """Images in base64, with texts around them: one more, or a single one, which follows all images."""
        texts = [*[""] * (len(data) + 1 - len(texts)), *texts]
        wheres = [f"{field}[{i}]" for i in range(len(data))]
        for each, where in zip(data, wheres, strict=True):
            if not isinstance(each, str):
                raise InvalidRequest(f"{where}: the image is not text: give it in base64")
            self._put(ImageSource("url" if each[:5] == "data:" else "base64", each), where)
        images = [self._image(*source) for source in self._sources[len(self._sources) - len(data) :]]
        parts = [part for pair in zip(texts[1:], images, strict=True) for part in reversed(pair)]
        return [part for part in (texts[0], *parts) if part != ""]

    def _image(self, source: ImageSource, where: str) -> Image:
        check_wanted()
        if source.kind == "base64":
            return _known.image(source.text, where)
        if source.text[:5].lower() == "data:":
            return _known.image(source.text, where, is_uri=True)
        try:
            data = self._hosts.fetch(source.text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from None
        return Image(data, where)


class _KnownImages:
    """The images that were used last, by their texts: to decode one again takes up to seconds.

    Args:
        most_bytes: of the images that are kept.
    """

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._images: OrderedDict[bytes, Image] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def image(self, text: str, where: str, *, is_uri: bool = False) -> Image:
        """The image of a text in base64, or of a data URI.

        Raises:
            InvalidRequest: see `Image`.
        """
        key = hashlib.sha256(b"%d" % is_uri + text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if found := self._images.get(key):
                self._images.move_to_end(key)
                return found
        made = (Image.of_data_uri if is_uri else Image.of_base64)(text, where)
        with self._lock:
            if key not in self._images:
                self._images[key] = made
                self._n_bytes += len(made.data)
            while self._n_bytes > self._most_bytes:
                self._n_bytes -= len(self._images.popitem(last=False)[1].data)
        return made


_known = _KnownImages()
