"""The images and sounds of one request: marks stand for them until its texts have been read."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.images.image import Image
from spec_local.images.marks import NumberedMarks
from spec_local.images.media import MAX_IMAGES, Media
from spec_local.images.media_file import MediaFile
from spec_local.server.protocols.image_parts import ImageSource, Keeper, with_marks
from spec_local.server.protocols.image_urls import ImageHosts
from spec_local.server.supervision.events import Loaded
from spec_local.system.cancellation import check_wanted

MARKER = "<__media__>"
"""What stands for an image in the text of a prompt, as in llama.cpp's server."""
_KEPT_BYTES = 128 << 20
"""Of images that were decoded once: programs send a conversation's images again with each question."""


class RequestImages:
    """The images and sounds of one request.

    Args:
        hosts: from which they are fetched.
        reads: the kinds that the model reads.
    """

    def __init__(self, hosts: ImageHosts, reads: Collection[type[Media]] = (Image,)) -> None:
        self._hosts, self._keeper = hosts, Keeper(reads, self._put)
        self._sources: list[tuple[ImageSource, str]] = []
        self._marks = NumberedMarks()

    @classmethod
    def of(cls, loaded: Loaded) -> "RequestImages | None":
        """Those of a request to a model; None: it reads only text."""
        return cls(ImageHosts(loaded.image_hosts), loaded.reads) if loaded.reads else None

    def marked(self, items: Sequence[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
        """Messages or items with marks in place of images; field: their name in errors.

        Raises:
            InvalidRequest: there are too many images, or one has a form that cannot be read.
        """
        return [with_marks(item, f"{field}[{i}]", self._keeper) for i, item in enumerate(items)]

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
        content, images = "", list[tuple[int, Media]]()
        for number, after in zip(others[::2], others[1::2], strict=True):
            content += rest.removesuffix("\n")
            images.append((len(content), self._image(*self._sources[int(number)])))
            rest = after.removeprefix("\n")
        return message | {"content": content + rest, "images": images} if images else message

    def prompt(self, text: str, data: object, field: str) -> list[str | Media]:
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

    def before(self, data: Sequence[Any], field: str, texts: Sequence[str]) -> list[str | Media]:
        """Images and sounds in base64, with texts around them: one more, or one, which follows all images."""
        texts = [*[""] * (len(data) + 1 - len(texts)), *texts]
        wheres = [f"{field}[{i}]" for i in range(len(data))]
        for each, where in zip(data, wheres, strict=True):
            if not isinstance(each, str):
                raise InvalidRequest(f"{where}: the image is not text: give it in base64")
            self._put(ImageSource("url" if each[:5] == "data:" else "base64", each, MediaFile), where)
        images = [self._image(*source) for source in self._sources[len(self._sources) - len(data) :]]
        parts = [part for pair in zip(texts[1:], images, strict=True) for part in reversed(pair)]
        return [part for part in (texts[0], *parts) if part != ""]

    def _image(self, source: ImageSource, where: str) -> Media:
        check_wanted()
        if source.kind == "base64":
            return _known.image(source, where)
        if source.text[:5].lower() == "data:":
            return _known.image(source, where, is_uri=True)
        try:
            data = self._hosts.fetch(source.text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from None
        return source.media.of(data, where)


class _KnownImages:
    """The images that were used last, by their texts: to decode one again takes up to seconds.

    Args:
        most_bytes: of the images that are kept.
    """

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._images: OrderedDict[bytes, Media] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def image(self, source: ImageSource, where: str, *, is_uri: bool = False) -> Media:
        """The image or sound of a text in base64, or of a data URI.

        Raises:
            InvalidRequest: see `Media`.
        """
        text, media = source.text, source.media
        prefix = f"{media.noun} {is_uri:d}".encode()
        key = hashlib.sha256(prefix + text.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if found := self._images.get(key):
                self._images.move_to_end(key)
                return found
        made = (media.of_data_uri if is_uri else media.of_base64)(text, where)
        with self._lock:
            if key not in self._images:
                self._images[key] = made
                self._n_bytes += len(made.data)
            while self._n_bytes > self._most_bytes:
                self._n_bytes -= len(self._images.popitem(last=False)[1].data)
        return made


_known = _KnownImages()
