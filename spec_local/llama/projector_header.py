"""What a projector reads, by the metadata of its file."""

from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media import Media
from spec_local.llama.gguf_header import Metadata

Kinds = tuple[type[Media], ...]
"""The kinds of files that a model reads: `Image`, `Audio`, or both."""
_HEARING = (
    *("qwen2a", "qwen2.5o", "qwen3a", "ultravox", "voxtral", "glma", "meralion", "musicflamingo"),
    *("gemma4a", "gemma4ua"),
)
"""Types that read sound of any length, in windows. libmtmd's other encoders take a sound as a whole, and
some abort the process with a long one."""


def type_of(metadata: Metadata, encoder: str) -> str:
    """llama.cpp's name for the type of an encoder, ``vision`` or ``audio``; empty: the file names none."""
    key = "projector_type"
    return str(metadata.get(f"clip.{key}") or metadata.get(f"clip.{encoder}.{key}") or "")


def readable(metadata: Metadata) -> Kinds:
    """The kinds of files that a projector reads here."""
    sees = bool(metadata.get("clip.has_vision_encoder"))
    hears = bool(metadata.get("clip.has_audio_encoder")) and type_of(metadata, "audio") in _HEARING
    return (Image,) * sees + (Audio,) * hears
