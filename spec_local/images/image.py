"""Images of a conversation: the bytes of a file, checked when an `Image` is created.

Pillow decodes them, imported with the first image; `spec_local.images.decoding` says why Pillow.
"""

import base64
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spec_local.errors import InvalidRequest
from spec_local.images import container
from spec_local.system.files import expanded, reading

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES: Final = 32 << 20
"""Of a file: photos of 50 megapixels have 10 to 25 MB. A conversation keeps the bytes of all its images."""

MAX_PIXELS: Final = 64_000_000
"""Of an image: phones take photos of up to 50 megapixels. Decoding 64 needs 0.3 to 1 GB for a moment."""

MAX_IMAGES: Final = 32
"""Of a conversation: with a few hundred tokens each, they fill the contexts that laptops have memory for."""


@dataclass(frozen=True, repr=False)
class Image:
    """An image file: JPEG, PNG, GIF or WebP (of both, the first frame), or BMP.

    It is decoded once when it is created, and nothing of that is kept: a damaged file is found before an
    answer begins. For 12 megapixels, this takes 0.06 s (JPEG) to 0.35 s (PNG). Unpickling checks nothing
    again.

    Args:
        data: bytes of the file; its content decides on the format.
        name: for error messages, such as the file's path; images are equal if their data is.

    Attributes:
        format: "BMP", "GIF", "JPEG", "PNG" or "WEBP".
        width, height: in pixels, upright: after EXIF's orientation is applied.
        hash: SHA-256 of the data, 32 bytes.

    Raises:
        InvalidRequest: it is no image of these formats, damaged, or beyond `MAX_BYTES` or `MAX_PIXELS`.
    """

    data: bytes
    name: str = field(default="", compare=False)
    format: str = field(init=False, compare=False)
    width: int = field(init=False, compare=False)
    height: int = field(init=False, compare=False)
    hash: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            given = type(self.data).__name__
            raise InvalidRequest(f"Image takes a file's bytes, not {given}: Image.open takes a path")
        try:
            _check_size(len(self.data))
            found = _contained(self.data)
            from spec_local.images import decoding

            decoding.check(found)
        except InvalidRequest as error:
            raise _named(error, self.name) from None
        size = found.width, found.height
        width, height = size if found.orientation < 5 else reversed(size)
        values = {"format": found.format, "width": width, "height": height}
        for name, value in {**values, "hash": hashlib.sha256(self.data).digest()}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        named = f"{_shown(self.name)}: " if self.name else ""
        return f"<Image {named}{self.format}, {self.width} × {self.height} pixels>"

    @classmethod
    def open(cls, path: Path | str) -> "Image":
        """Read an image from a file.

        Raises:
            InvalidRequest: the file cannot be read, or is no valid image.
        """
        path = expanded(path)
        with reading(path) as file:
            data = file.read(MAX_BYTES + 1)
        return cls(data, str(path))

    @classmethod
    def of_data_uri(cls, uri: str, name: str = "") -> "Image":
        """Decode a data URI in base64, such as "data:image/png;base64,…".

        Its media type is ignored, since many programs give a wrong one: the content decides.

        Raises:
            InvalidRequest: it is no data URI in base64, or no valid image.
        """
        comma = uri.find(",", 0, _MAX_HEADER)
        words = [word.strip().lower() for word in uri[: max(comma, 0)].split(";")]
        if not words[0].startswith("data:") or "base64" not in words[1:]:
            error = InvalidRequest("the image is no data URI in base64: give data:image/png;base64,…")
            raise _named(error, name)
        return cls.of_base64(uri[comma + 1 :], name)

    @classmethod
    def of_base64(cls, text: str, name: str = "") -> "Image":
        """Decode a file in base64, also the URL-safe kind, with whitespace, or without padding.

        Raises:
            InvalidRequest: it is not base64, or no valid image.
        """
        try:
            data = _decoded(text)
        except InvalidRequest as error:
            raise _named(error, name) from None
        return cls(data, name)

    def pixels(self) -> "NDArray[np.uint8]":
        """The image, decoded now: RGB, upright, on white where it is transparent; (height, width, 3).

        Colour profiles are ignored, as by the programs that prepare images for training.
        """
        from spec_local.images import decoding

        try:
            return decoding.decode(_contained(self.data))
        except InvalidRequest as error:  # too little memory
            raise _named(error, self.name) from None


_MAX_HEADER: Final = 1000
"""Characters of a data URI before its comma: a media type and its parameters."""

_ESCAPED = {f"%{ord(c):02{case}}": c for c in "+/=-_\r\n " for case in "xX"}
"""All of base64 that URIs escape. `urllib.parse.unquote` would need gigabytes for a text of percent signs."""


def _decoded(text: str) -> bytes:
    """Decode base64; raises InvalidRequest, before anything is decoded if it is too large."""
    _check_size((len(text) + 1) // 2)  # generous, for line ends and percent signs: nothing was copied yet
    if "%" in text:
        for escaped, character in _ESCAPED.items():
            text = text.replace(escaped, character)
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    _check_size(len(text) * 3 // 4)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:  # binascii.Error, or of characters beyond ASCII
        raise InvalidRequest("the image's base64 is invalid: encode the file again") from None


def _check_size(n_bytes: int) -> None:
    if n_bytes > MAX_BYTES:
        raise InvalidRequest(f"the image has more than {MAX_BYTES >> 20} MiB: make it smaller")
    if not n_bytes:
        raise InvalidRequest("the image is empty: give the content of an image file")


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


def _named(error: InvalidRequest, name: str) -> InvalidRequest:
    return InvalidRequest(f"{_shown(name)}: {error}" if name else str(error))


def _shown(name: str) -> str:
    """A name in one line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name[-100:])
