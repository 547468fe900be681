"""Sound files of a few formats, written without an encoder's library."""

import struct

import numpy as np

RATE = 8000


def tones(seed, seconds=4):
    """Tones of half a second each; int16 of 8 kHz."""
    time = np.arange(int(seconds * RATE)) / RATE
    pitches = np.random.default_rng(seed).uniform(200, 3500, int(seconds * 2) + 1)
    return (9000 * np.sin(2 * np.pi * pitches[(time * 2).astype(int)] * time)).astype("<i2")


def part(kind, content, size=None):
    return kind + struct.pack("<I", len(content) if size is None else size) + content


def wav(samples, rate=RATE, channels=1, *, tag=None, bits=None, before=b"", data_size=None):
    """samples: of the type that the file has."""
    bits = bits or samples.itemsize * 8
    tag = tag or (3 if samples.dtype.kind == "f" else 1)
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits)
    parts = b"WAVE" + part(b"fmt ", form) + before + part(b"data", samples.tobytes(), data_size)
    return part(b"RIFF", parts)


def clip(seed, seconds=4):
    return wav(tones(seed, seconds))


def mp3_frame(content=b""):
    """A frame of MPEG-1 with 1,152 samples of 44.1 kHz, of silence, or with this content after its header."""
    return (b"\xff\xfb\x10\xc4" + content).ljust(104, b"\0")


def mp3(n_frames=200, *, xing=None, before=b"", after=b""):
    """xing: the number of frames that a first one, without sound, tells of."""
    tag = b"" if xing is None else mp3_frame(bytes(17) + b"Xing" + struct.pack(">II", 1, xing))
    return before + tag + mp3_frame() * n_frames + after


def _crc(data, bits, polynomial):
    value = 0
    for byte in data:
        value ^= byte << bits - 8
        for _ in range(8):
            value = (value << 1 ^ polynomial * (value >> bits - 1)) & (1 << bits) - 1
    return value.to_bytes(bits // 8, "big")


def flac(samples, *, n_samples=None, before=b""):
    """FLAC of 16 bits without compression; n_samples: what its header tells."""
    n = 4000
    facts = RATE << 44 | 15 << 36 | (len(samples) if n_samples is None else n_samples)
    info = struct.pack(">HH", n, n) + bytes(6) + facts.to_bytes(8, "big") + bytes(16)
    frames = []
    for i in range(0, len(samples), n):
        block = samples[i : i + n]
        head = b"\xff\xf8\x70\x08" + bytes([i // n]) + struct.pack(">H", len(block) - 1)
        head += _crc(head, 8, 7)
        frame = head + b"\x02" + block.astype(">i2").tobytes()
        frames.append(frame + _crc(frame, 16, 0x8005))
    first = b"\x80" if not before else b"\x00"
    return b"fLaC" + first + b"\0\0\x22" + info + before + b"".join(frames)
