"""Files in a conversation that a projector reads: images and sound."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Self

from spec_local.errors import InvalidRequest
from spec_local.system.files import expanded, reading

MAX_BYTES: Final = 32 << 20
"""Of a file: photos of 50 megapixels have 10 to 25 MB, and half an hour of MP3 has 28 at 128 kbit/s. A
conversation keeps the bytes of all its files."""

MAX_IMAGES: Final = 32
"""Of a conversation, with sound: with a few hundred tokens each, they fill the contexts that laptops have
memory for."""


@dataclass(frozen=True, repr=False)
class Media:
    """A file: an `Image` or an `Audio`; `MediaFile` tells them apart.

    Args:
        data: bytes of the file; its content decides on the format.
        name: for error messages, such as the file's path; files of a kind are equal if their data is.

    Attributes:
        noun: what the file is, in errors.
        format: such as "PNG" or "WAV".
        hash: SHA-256 of the data, 32 bytes.

    Raises:
        InvalidRequest: it is of no supported format, damaged, or too large.
    """

    noun: ClassVar[str] = "file"

    data: bytes
    name: str = field(default="", compare=False)
    format: str = field(init=False, compare=False)
    hash: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            kind, given = type(self).__name__, type(self.data).__name__
            raise InvalidRequest(f"{kind} takes a file's bytes, not {given}: {kind}.open takes a path")
        try:
            _check_size(len(self.data), self.noun)
            values = self._checked()
        except InvalidRequest as error:
            raise self.named(error, self.name) from None
        for name, value in {**values, "hash": hashlib.sha256(self.data).digest()}.items():
            object.__setattr__(self, name, value)

    def _checked(self) -> Mapping[str, object]:
        """The values of the attributes; raises InvalidRequest, without the name of the file."""
        raise NotImplementedError

    def __repr__(self) -> str:
        named = f"{_shown(self.name)}: " if self.name else ""
        return f"<{type(self).__name__} {named}{self.format}, {self.size}>"

    @property
    def size(self) -> str:
        """How large it is, in a few words."""
        raise NotImplementedError

    @classmethod
    def of(cls, data: bytes, name: str = "") -> Self:
        """Check the content of a file."""
        return cls(data, name)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read a file.

        Raises:
            InvalidRequest: it cannot be read, or is not valid.
        """
        path = expanded(path)
        with reading(path) as file:
            data = file.read(MAX_BYTES + 1)
        return cls.of(data, str(path))

    @classmethod
    def of_data_uri(cls, uri: str, name: str = "") -> Self:
        """Decode a data URI in base64, such as "data:image/png;base64,…".

        Its media type is ignored, since many programs give a wrong one: the content decides.

        Raises:
            InvalidRequest: it is no data URI in base64, or no valid file.
        """
        comma = uri.find(",", 0, _MAX_HEADER)
        words = [word.strip().lower() for word in uri[: max(comma, 0)].split(";")]
        if not words[0].startswith("data:") or "base64" not in words[1:]:
            error = InvalidRequest(f"the {cls.noun} is no data URI in base64: give data:image/png;base64,…")
            raise cls.named(error, name)
        return cls.of_base64(uri[comma + 1 :], name)

    @classmethod
    def of_base64(cls, text: str, name: str = "") -> Self:
        """Decode a file in base64, also the URL-safe kind, with whitespace, or without padding.

        Raises:
            InvalidRequest: it is not base64, or no valid file.
        """
        try:
            data = _decoded(text, cls.noun)
        except InvalidRequest as error:
            raise cls.named(error, name) from None
        return cls.of(data, name)

    @staticmethod
    def named(error: InvalidRequest, name: str) -> InvalidRequest:
        """An error with the name of the file."""
        return InvalidRequest(f"{_shown(name)}: {error}" if name else str(error))


_MAX_HEADER: Final = 1000
"""Characters of a data URI before its comma: a media type and its parameters."""

_ESCAPED = {f"%{ord(c):02{case}}": c for c in "+/=-_\r\n " for case in "xX"}
"""All of base64 that URIs escape. `urllib.parse.unquote` would need gigabytes for a text of percent signs."""


def _decoded(text: str, noun: str) -> bytes:
    """Decode base64; raises InvalidRequest, before anything is decoded if it is too large."""
    # Generous, for line ends and percent signs: nothing was copied yet.
    _check_size((len(text) + 1) // 2, noun)
    if "%" in text:
        for escaped, character in _ESCAPED.items():
            text = text.replace(escaped, character)
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    _check_size(len(text) * 3 // 4, noun)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:  # binascii.Error, or of characters beyond ASCII
        raise InvalidRequest(f"the {noun}'s base64 is invalid: encode the file again") from None


def _check_size(n_bytes: int, noun: str) -> None:
    if n_bytes > MAX_BYTES:
        raise InvalidRequest(f"the {noun} has more than {MAX_BYTES >> 20} MiB: make it smaller")
    if not n_bytes:
        raise InvalidRequest(f"the {noun} is empty: give the content of a file")


def _shown(name: str) -> str:
    """A name in one line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name[-100:])
