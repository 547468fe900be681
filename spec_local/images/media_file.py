"""A file whose content decides whether it is an image or sound."""

from typing import Self

from spec_local.images import sound
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import Media


class MediaFile(Media):
    """An image or sound: `of`, `open`, `of_data_uri` and `of_base64` return an `Image` or an `Audio`."""

    @classmethod
    def of(cls, data: bytes, name: str = "") -> Self:
        """The image or sound that a file contains."""
        return (Audio if sound.begins(data) else Image)(data, name)  # type: ignore[return-value]
