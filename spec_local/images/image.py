"""Images of a conversation: the bytes of a file, checked when an `Image` is created.

Pillow decodes them, imported with the first image; `spec_local.images.decoding` says why Pillow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from spec_local.errors import InvalidRequest
from spec_local.images import container
from spec_local.images.media import Media

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_PIXELS: Final = 64_000_000
"""Of an image: phones take photos of up to 50 megapixels. Decoding 64 needs 0.3 to 1 GB for a moment."""


@dataclass(frozen=True, repr=False)
class Image(Media):
    """An image file: JPEG, PNG, GIF or WebP (of both, the first frame), or BMP.

    It is decoded once when it is created, and nothing of that is kept: a damaged file is found before an
    answer begins. For 12 megapixels, this takes 0.06 s (JPEG) to 0.35 s (PNG). Unpickling checks nothing
    again.

    Attributes:
        format: "BMP", "GIF", "JPEG", "PNG" or "WEBP".
        width, height: in pixels, upright: after EXIF's orientation is applied.

    Raises:
        InvalidRequest: it is no image of these formats, damaged, or beyond `MAX_BYTES` or `MAX_PIXELS`.
    """

    noun: ClassVar[str] = "image"

    width: int = field(init=False, compare=False)
    height: int = field(init=False, compare=False)

    def _checked(self) -> Mapping[str, object]:
        found = _contained(self.data)
        from spec_local.images import decoding

        decoding.check(found)
        size = found.width, found.height
        width, height = size if found.orientation < 5 else reversed(size)
        return {"format": found.format, "width": width, "height": height}

    @property
    def size(self) -> str:
        return f"{self.width} × {self.height} pixels"

    def pixels(self) -> "NDArray[np.uint8]":
        """The image, decoded now: RGB, upright, on white where it is transparent; (height, width, 3).

        Colour profiles are ignored, as by the programs that prepare images for training.
        """
        from spec_local.images import decoding

        try:
            return decoding.decode(_contained(self.data))
        except InvalidRequest as error:  # too little memory
            raise self.named(error, self.name) from None


def _contained(data: bytes) -> container.Container:
    found = container.read(data)
    if found.width <= 0 or found.height <= 0:
        raise container.damaged("it has no pixels")
    if found.width * found.height > MAX_PIXELS:
        raise InvalidRequest(
            f"the image has {found.width} × {found.height} pixels, more than the limit of "
            f"{MAX_PIXELS // 1_000_000} megapixels: make it smaller"
        )
    return found
