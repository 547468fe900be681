"""Sounds: what is read of a file before it is decoded, and what is refused, also files made to do harm."""

import base64
import contextlib
import pickle
import random
import struct
import time

import numpy as np
import pytest

from spec_local.errors import InvalidRequest
from spec_local.images.audio import Audio
from spec_local.images.image import Image
from spec_local.images.media_file import MediaFile
from tests.sounds import RATE, clip, flac, mp3, mp3_frame, part, tones, wav

TONES = tones(1, 2)
EXTENSIBLE = struct.pack("<HHIIHHHHIH", 0xFFFE, 2, RATE, 4 * RATE, 4, 16, 22, 16, 3, 1) + bytes(14)
ID3 = b"ID3\4\0\0\0\0\1\1" + bytes(129)
PADDED = part(b"LIST", b"odd") + b"\0"


@pytest.mark.parametrize(
    ("data", "kind", "seconds"),
    [
        (wav(TONES), "WAV", 2),
        (wav(TONES, channels=2), "WAV", 1),
        (wav(TONES.astype("f4")), "WAV", 2),
        (wav(TONES.view("u1"), tag=7), "WAV", 4),
        (wav(TONES, before=PADDED), "WAV", 2),
        (wav(TONES, data_size=0xFFFFFFFF), "WAV", 2),  # written to a pipe
        (part(b"RIFF", b"WAVE" + part(b"fmt ", EXTENSIBLE) + part(b"data", TONES.tobytes())), "WAV", 1),
        (wav(TONES) + b"more", "WAV", 2),
        (flac(TONES), "FLAC", 2),
        (flac(TONES, before=b"\x84\0\0\4text"), "FLAC", 2),
        (mp3(100), "MP3", 100 * 1152 / 44100),
        (mp3(99, xing=99), "MP3", 100 * 1152 / 44100),
        (mp3(100, before=ID3, after=b"TAG" + bytes(125)), "MP3", 100 * 1152 / 44100),
        (mp3(100, before=mp3_frame() + b"noise\xff\xfb\xff"), "MP3", 101 * 1152 / 44100),
        (mp3(100)[:-20], "MP3", 99 * 1152 / 44100),
    ],
)  # fmt: skip
def test_formats(data, kind, seconds):
    sound = Audio(data, "a.bin")
    assert (sound.format, sound.seconds) == (kind, pytest.approx(seconds))
    assert Audio(sound.samples_file()).seconds == sound.seconds
    assert repr(sound) == f"<Audio a.bin: {kind}, {seconds:.1f} seconds>"
    assert MediaFile.of(data) == sound == pickle.loads(pickle.dumps(sound))
    assert sound != Image.__new__(Image)


def test_only_samples_are_decoded():
    assert Audio(wav(TONES, before=PADDED, data_size=2 * len(TONES))).samples_file() == wav(TONES)
    assert Audio(flac(TONES, before=b"\x84\0\0\4text")).samples_file() == flac(TONES)
    tagged = mp3(100, before=b"ID3\4\0\0\0\0\0\4fLaC", after=b"TAG" + bytes(125))
    assert Audio(tagged).samples_file() == mp3(100)
    assert Audio(mp3(100, xing=100)).samples_file() == mp3(100, xing=100)
    assert Audio(mp3(100, xing=0xFFFFFFFF)).samples_file() == mp3(100)


def refused(data):
    started = time.process_time()
    with pytest.raises(InvalidRequest) as error:
        Audio(data, "a.wav")
    assert time.process_time() - started < 2
    text = str(error.value)
    assert text.startswith("a.wav: ")
    assert "\n" not in text
    return text


HOSTILE = {
    "no header": (b"RIFF\0\0\0\0WAVE", "ends too early"),
    "no samples": (wav(TONES[:0]), "less than 0.1"),
    "few samples": (wav(TONES[:700]), "less than 0.1"),
    "too long": (wav(np.zeros(4000 * 1801, "u1"), 4000), "more than 1800"),
    "a rate of 0": (wav(TONES, 0), "0 Hz"),
    "a huge rate": (wav(TONES, 0xFFFFFFFF, bits=8, channels=1), "4294967295 Hz"),
    "no channels": (wav(TONES, channels=0), "0 channels"),
    "many channels": (wav(TONES, channels=255), "255 channels"),
    "ADPCM": (wav(TONES, tag=17, bits=4), "kind 17 with 4 bits"),
    "odd bits": (wav(TONES, bits=12), "with 12 bits"),
    "wrong block": (wav(TONES).replace(struct.pack("<HH", 2, 16), struct.pack("<HH", 7, 16)), "contradict"),
    "a short form": (part(b"RIFF", b"WAVE" + part(b"fmt ", b"\1\0") + part(b"data", b"")), "ends too early"),
    "no subformat": (
        part(b"RIFF", b"WAVE" + part(b"fmt ", EXTENSIBLE[:20]) + part(b"data", b"")), "ends too early",
    ),
    "2^36 samples": (flac(TONES, n_samples=(1 << 36) - 1), "more than 1800"),
    "no length": (flac(TONES, n_samples=0), "has no length"),
    "many chunks": (b"RIFF\0\0\0\0WAVE" + bytes(8 * 100_001), "too many parts"),
    "many blocks": (b"fLaC" + b"\1\0\0\0" * 100_001, "too many parts"),
    "endless metadata": (b"fLaC" + b"\1\xff\xff\xff" * 9, "ends too early"),
    "other metadata": (b"fLaC\x84\0\0\0" + TONES.tobytes(), "no header"),
    "no frames": (b"ID3\4\0\0\x7f\x7f\x7f\x7f" + mp3(100), "no frames"),
    "half an ID3": (b"ID3\4", "ends too early"),
    "half a frame": (mp3_frame()[:50], "no frames"),
    "free format": (b"\xff\xfb\0\0" * 1000, "no frames"),
    "false frames": (mp3_frame() + b"\xff\xfb\xff" * 3_000_000, "other data between"),
    "hours": (mp3(100_000), "more than 1800"),
    "Ogg": (b"OggS" + bytes(100), "not a WAV, MP3 or FLAC"),
    "an image": (b"\x89PNG\r\n\x1a\n", "not a WAV, MP3 or FLAC"),
    "nothing": (b"", "empty"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "why"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files(data, why):
    assert why in refused(data)


def test_changed_files_are_read_or_refused():
    rng = random.Random(1)
    for data in (clip(1, 1), flac(TONES[:900]), mp3(9, xing=9), mp3(9, before=ID3)):
        for _ in range(400):
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 9)):
                changed[rng.randrange(min(100, len(data)))] = rng.randrange(256)
            with contextlib.suppress(InvalidRequest):
                found = Audio(bytes(changed[: rng.randrange(len(data) + 1)]))
                assert Audio(found.samples_file()).format == found.format


def test_content_decides(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(wav(TONES))
    assert isinstance(MediaFile.open(path), Audio)
    assert MediaFile.of_base64(base64.b64encode(wav(TONES)).decode()) == Audio.open(path)
    for unsupported in (b"OggS" + bytes(9), b"\0\0\0 ftypM4A "):
        with pytest.raises(InvalidRequest, match="not a WAV, MP3 or FLAC sound: convert it"):
            MediaFile.of(unsupported)
    with pytest.raises(InvalidRequest, match=r"Audio takes a file's bytes, not str: Audio\.open"):
        Audio("a.wav")
