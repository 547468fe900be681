"""Sound of a conversation: the bytes of a file, whose length is checked when an `Audio` is created."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from spec_local.images import sound
from spec_local.images.media import Media


@dataclass(frozen=True, repr=False)
class Audio(Media):
    """A sound file: WAV (PCM, A-law, µ-law), MP3 or FLAC.

    It is decoded when a model reads it, at the rate and with the channels that the model needs.

    Attributes:
        format: "WAV", "MP3" or "FLAC".
        seconds: its length.

    Raises:
        InvalidRequest: it is no sound of these formats, damaged, or its length is beyond `sound.MIN_SECONDS`
            and `sound.MAX_SECONDS`.
    """

    noun: ClassVar[str] = "sound"

    seconds: float = field(init=False, compare=False)

    def _checked(self) -> Mapping[str, object]:
        found = sound.read(self.data)
        return {"format": found.format, "seconds": found.seconds}

    @property
    def size(self) -> str:
        return f"{self.seconds:.1f} seconds"

    def samples_file(self) -> bytes:
        """A file of the same format with only what a decoder needs."""
        return sound.read(self.data).file
