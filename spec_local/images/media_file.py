"""A file whose content decides whether it is an image or sound."""

from typing import Self

from spec_local.errors import InvalidRequest
from spec_local.images import container, sound
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import Media

_NEITHER = (
    "the file is neither a JPEG, PNG, GIF, WebP or BMP image nor a WAV, MP3 or FLAC sound: convert it to "
    "one of these formats"
)


class MediaFile(Media):
    """An image or sound: `of`, `open`, `of_data_uri` and `of_base64` return an `Image` or an `Audio`."""

    @classmethod
    def of(cls, data: bytes, name: str = "") -> Self:
        """The image or sound that a file contains."""
        if data and not sound.begins(data) and not container.is_known(data):
            raise cls.named(InvalidRequest(_NEITHER), name)
        return (Audio if sound.begins(data) else Image)(data, name)  # type: ignore[return-value]
