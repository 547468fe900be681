"""What surrounds the samples in a sound file: its format, its length, and the parts that a decoder needs.

libmtmd decodes sound with miniaudio, which is given only those parts, in a file that is written anew: what it
would believe of a header, such as a length of which it allocates the memory, is checked here before.
"""

import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from spec_local.errors import InvalidRequest
from spec_local.images.container import damaged, each_part

MAX_SECONDS: Final = 1800
"""Of a file: models read 7 to 25 tokens for each second, so that half an hour has 12,600 or more."""

MIN_SECONDS: Final = 0.1
"""Some of llama.cpp's encoders abort the process with only a few frames, of 10 ms each."""

_RATES: Final = range(4_000, 384_001)  # Hz, of all recordings from telephones to studios
_MAX_CHANNELS: Final = 8
_SAMPLE_BITS: Final = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
"""By WAV's tag: integers, floats, A-law, µ-law."""
_EXTENSIBLE: Final = 0xFFFE  # the tag is then in the extension
_BEGINNING = re.compile(rb"RIFF.{4}WAVE|ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]|fLaC", re.DOTALL)
_UNSUPPORTED = re.compile(rb"OggS|FORM.{4}AIF|#!AMR|.{4}ftypM4A|RF64|\xff[\xf0\xf1\xf8\xf9]", re.DOTALL)

_MP3_RATES: Final = (44_100, 48_000, 32_000)  # Hz; half of it in MPEG-2, a quarter in MPEG-2.5
_MP3_KBITS: Final = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG-2 and 2.5
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # MPEG-1
)
_MP3_SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")
_MAX_SEARCHES: Final = 100_000  # for the beginning of a frame: each takes a microsecond, and files have a few


class Sound(NamedTuple):
    """What is known of a sound before it is decoded.

    Attributes:
        format: "WAV", "MP3" or "FLAC".
        seconds: its length.
        file: a file of the same format with no more than the samples.
    """

    format: str
    seconds: float
    file: bytes


def begins(data: bytes) -> bool:
    """Return whether a file is of sound, perhaps in a format that is not supported."""
    return bool(_BEGINNING.match(data) or _UNSUPPORTED.match(data))


def read(data: bytes) -> Sound:
    """Parse a sound file; its content decides on the format.

    Raises:
        InvalidRequest: it is of no supported format, damaged, too short or too long; one line without the
            name of the file.
    """
    if not _BEGINNING.match(data):
        raise InvalidRequest("the file is not a WAV, MP3 or FLAC sound: convert it to WAV or MP3")
    try:
        found = _wav(data) if data[:4] == b"RIFF" else _flac(data) if data[:4] == b"fLaC" else _mp3(data)
    except (struct.error, IndexError):
        raise damaged("it ends too early", "sound") from None
    if not MIN_SECONDS <= found.seconds <= MAX_SECONDS:
        limit = (
            f"less than {MIN_SECONDS} seconds" if found.seconds < 1 else f"more than {MAX_SECONDS} seconds"
        )
        raise InvalidRequest(f"the sound has {limit}: give one of another length")
    return found


def _wav(data: bytes) -> Sound:
    form, at = b"", 12
    for _ in each_part("sound"):
        kind, size = struct.unpack_from("<4sI", data, at)
        content = data[at + 8 : at + 8 + size]  # of a file that was written to a pipe, all of the rest
        at += 8 + size + size % 2
        if kind == b"fmt ":
            form = content
        elif kind == b"data":
            break
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", form)
    if tag == _EXTENSIBLE:
        (tag,) = struct.unpack_from("<H", form, 24)
    if bits not in _SAMPLE_BITS.get(tag, ()):
        raise InvalidRequest(
            f"WAV of the kind {tag} with {bits} bits is not supported: convert it to 16 bits"
        )
    _check(rate, channels)
    if block != channels * bits // 8:
        raise damaged("its sizes contradict each other", "sound")
    samples = content[: len(content) // block * block]
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits)
    file = _wav_chunk(b"RIFF", b"WAVE" + _wav_chunk(b"fmt ", form) + _wav_chunk(b"data", samples))
    return Sound("WAV", len(samples) / block / rate, file)


def _wav_chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content


def _flac(data: bytes) -> Sound:
    header, end = b"", 4
    for _ in each_part("sound"):
        (kind,) = struct.unpack_from("B", data, end)
        start, end = end + 4, end + 4 + int.from_bytes(data[end + 1 : end + 4])
        if kind & 0x7F == 0:  # STREAMINFO
            header = data[start:end]
        if kind & 0x80:  # the last one
            break
    if len(header) != 34:
        raise damaged("it has no header", "sound")
    facts = int.from_bytes(header[10:18])  # bits: 20 of the rate, 3 of the channels, 5 of bits, 36 of samples
    rate, n_samples = facts >> 44, facts & (1 << 36) - 1
    _check(rate, (facts >> 41 & 7) + 1)
    if not n_samples:
        raise InvalidRequest("the header of the FLAC file has no length: encode the file again")
    return Sound("FLAC", n_samples / rate, b"fLaC\x80" + len(header).to_bytes(3) + header + data[end:])


def _mp3(data: bytes) -> Sound:
    frames, seconds = list[bytes](), 0.0
    for frame, length in _mp3_frames(data):
        frames.append(frame)
        seconds += length
        if seconds > MAX_SECONDS:
            break
    if not frames:
        raise damaged("it has no frames", "sound")
    at = max(frames[0].find(b"Xing", 0, 64), frames[0].find(b"Info", 0, 64))
    if at >= 0 and len(frames) < 1 + int.from_bytes(frames[0][at + 8 : at + 12]):
        frames[0] = b""  # it tells of more frames than there are; otherwise, of silence at both ends
    return Sound("MP3", seconds, b"".join(frames))


def _mp3_frames(data: bytes) -> Iterator[tuple[bytes, float]]:
    """The frames of an MP3 file, all of one rate, with their lengths in seconds."""
    at, first, n_searches = 0, None, 0
    if data[:3] == b"ID3":
        at = 10 + sum((byte & 0x7F) << 7 * (3 - i) for i, byte in enumerate(data[6:10]))
        at += 10 * bool(data[5] & 0x10)
    while found := _MP3_SYNC.search(data, at):
        at = found.start()
        second, third = data[at + 1], int.from_bytes(data[at + 2 : at + 3])
        version, rate_index, kbits_index = second >> 3 & 3, third >> 2 & 3, third >> 4
        kind = version, rate_index
        if rate_index == 3 or not 0 < kbits_index < 15 or kind != (first or kind):
            at, n_searches = at + 1, n_searches + 1
            if n_searches > _MAX_SEARCHES:
                raise damaged("there is other data between its frames", "sound")
            continue
        rate = _MP3_RATES[rate_index] // {3: 1, 2: 2, 0: 4}[version]
        n_samples = 1152 if version == 3 else 576
        size = n_samples // 8 * 1000 * _MP3_KBITS[version == 3][kbits_index] // rate + (third >> 1 & 1)
        if at + size > len(data):  # the last one, cut off; or none
            return
        first = kind
        yield data[at : at + size], n_samples / rate
        at += size


def _check(rate: int, channels: int) -> None:
    if rate not in _RATES or not 1 <= channels <= _MAX_CHANNELS:
        raise InvalidRequest(
            f"sound of {rate} Hz with {channels} channels is not supported: convert it to 16 kHz"
        )
