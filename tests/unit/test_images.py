"""Images: what is decoded, to which pixels, and what is refused, among it files made to do harm."""

import base64
import copy
import hashlib
import io
import itertools
import pickle
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PillowImage
from PIL import ImageOps
from PIL.PngImagePlugin import PngImageFile

from spec_local.errors import InvalidRequest
from spec_local.images import container, decoding
from spec_local.images.image import MAX_PIXELS, Image
from spec_local.images.media import MAX_BYTES

WIDTH, HEIGHT = 13, 7
SHAPE = (HEIGHT, WIDTH, 3)
PICTURE = PillowImage.fromarray(
    np.stack(np.broadcast_arrays(*np.ogrid[0:HEIGHT, 0:WIDTH], 0), axis=-1).astype(np.uint8) * 18
)
"""Red grows downwards, green to the right, so that each orientation of it is another image."""
WHITE = [255, 255, 255]


def encode(picture=PICTURE, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def chunk(kind, content=b"", crc=None):
    crc = zlib.crc32(kind + content) if crc is None else crc
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def png(rows, width=1, height=1, bits=8, colours=0, *, before=b"", after=b"", header=None):
    """A PNG of rows without filters."""
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0) if header is None else header
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + before + chunk(b"IDAT", pixels) + after + chunk(b"IEND")


def bmp(width=2, height=2, bits=24, compression=0, content=b"\x10\x20\x30" * 2 + b"\0\0", rows=2, header=40):
    info = struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + info + content * rows


def gif(screen=(2, 2), frame=(0, 0, 2, 2), before=b"", flags=0x80, data=b"\x02\x03\x84\x51\x00\x00\x3b"):
    """Two black pixels and two white ones, or what `data` contains."""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, flags, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + before + b"\x2c" + struct.pack("<HHHHB", *frame, 0) + data


def webp(width, height):
    """Only the header of an extended file."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + b"VP8X" + struct.pack("<II", 10, 0x10) + sides
    return b"RIFF" + struct.pack("<I", len(body)) + body


def exif(orientation, order="<", kind=3, count=1, entries=1, at=8):
    value = struct.pack(f"{order}HHIHH", 0x0112, kind, count, orientation, 0)
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}IH", at, entries) + value + bytes(4)


def with_exif(data, content):
    """A JPEG with EXIF data."""
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(content) + 8) + b"Exif\0\0" + content + data[2:]


JPEG = encode(kind="JPEG", quality=95, subsampling=0)
PNG, GIF, WEBP, BMP = encode(), encode(kind="GIF"), encode(kind="WEBP", lossless=True), encode(kind="BMP")
FORMATS = {"BMP": BMP, "GIF": GIF, "JPEG": JPEG, "PNG": PNG, "WEBP": WEBP}


def refused(make, *arguments):
    """The error's message, which is one line of bounded length."""
    with pytest.raises(InvalidRequest) as caught:
        make(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    assert ": " in message  # what is wrong, and what to do
    return message


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(kind):
    found = Image(FORMATS[kind])
    assert (found.format, found.width, found.height) == (kind, WIDTH, HEIGHT)
    pixels = found.pixels()
    assert pixels.dtype == np.uint8
    assert pixels.shape == SHAPE
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    error = abs(pixels.astype(int) - np.asarray(PICTURE))
    assert error.max() <= (8 if kind == "JPEG" else 0)


def test_an_image_is_a_value():
    first, second = Image(PNG, "a.png"), Image(bytes(bytearray(PNG)), "b.png")
    assert first == second
    assert len({first, second, Image(GIF)}) == 2
    assert first.hash == hashlib.sha256(PNG).digest()
    for other in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert other == first
        assert (other.name, other.width, other.hash) == ("a.png", 13, first.hash)
    assert repr(first) == "<Image a.png: PNG, 13 × 7 pixels>"
    assert repr(Image(PNG)) == "<Image PNG, 13 × 7 pixels>"
    assert len(repr(Image(PNG, "x\n" * 1000))) < 200
    with pytest.raises(AttributeError):
        first.width = 1


@pytest.mark.parametrize("data", ["a.png", None, 1, bytearray(PNG), memoryview(PNG), [1]])
def test_data_is_bytes(data):
    assert "Image.open" in refused(Image, data)


# Pixels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", "<>")
def test_orientation(orientation, order):
    """The same as of Pillow, of whose EXIF parser nothing is used."""
    content = exif(orientation, order)
    grey = PICTURE.convert("L")
    files = [
        with_exif(JPEG, content),
        encode(exif=b"Exif\0\0" + content),
        PNG[:-12] + chunk(b"eXIf", content) + PNG[-12:],
        encode(kind="WEBP", lossless=True, exif=content),
        with_exif(encode(grey, "JPEG"), content),
    ]
    for data in files:
        found = Image(data)
        wanted = ImageOps.exif_transpose(PillowImage.open(io.BytesIO(data))).convert("RGB")
        assert (found.width, found.height) == wanted.size
        assert np.array_equal(found.pixels(), np.asarray(wanted))
    assert Image(files[0]).width == (HEIGHT if orientation >= 5 else WIDTH)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"II",
        b"II*\0\xff\xff\xff\xff",
        b"no EXIF at all",
        exif(0),
        exif(9),
        exif(65535),
        exif(6, kind=2),
        exif(6, count=5),
        exif(6, at=7),
        exif(6, entries=60000)[:10],
        exif(1, entries=65535)[:12],
        random.Random(1).randbytes(60000),
    ],
)
def test_broken_orientations_are_ignored(content):
    for data in (with_exif(JPEG, content), PNG[:-12] + chunk(b"eXIf", content) + PNG[-12:]):
        found = Image(data)
        assert (found.width, found.height) == (WIDTH, HEIGHT)
        assert found.pixels().shape == SHAPE


def single(data):
    pixels = Image(data).pixels()
    return pixels.reshape(-1, 3).tolist()


@pytest.mark.parametrize("value", [0, 1, 128, 129, 256, 32767, 32768, 65407, 65535])
def test_sixteen_bits_of_grey_become_eight(value):
    assert single(png([struct.pack(">H", value)], bits=16)) == [[(value * 255 + 32767) // 65535] * 3]


def test_sixteen_bits_of_other_colours():
    assert single(png([struct.pack(">3H", 65535, 256, 0)], bits=16, colours=2)) == [[255, 1, 0]]
    assert single(png([struct.pack(">4H", 65535, 0, 0, 65535)], bits=16, colours=6)) == [[255, 0, 0]]
    assert single(png([struct.pack(">2H", 0x8000, 0)], bits=16, colours=4)) == [WHITE]


@pytest.mark.parametrize(("bits", "row", "levels"), [(1, 0x40, 2), (2, 0x1B, 4), (4, 0x1F, 16)])
def test_few_bits_of_grey(bits, row, levels):
    per_byte = 8 // bits
    values = [row >> 8 - bits * (i + 1) & levels - 1 for i in range(per_byte)]
    wanted = [[value * 255 // (levels - 1)] * 3 for value in values]
    assert single(png([bytes([row])], per_byte, bits=bits)) == wanted
    transparent = chunk(b"tRNS", struct.pack(">H", values[0]))
    with_it = [WHITE if value == values[0] else each for value, each in zip(values, wanted, strict=True)]
    assert single(png([bytes([row])], per_byte, bits=bits, before=transparent)) == with_it


def test_transparency_becomes_white():
    half = PillowImage.new("RGBA", (1, 1), (255, 0, 0, 128))
    wanted = [[255, 127, 127]]
    assert single(encode(half)) == single(encode(half, "WEBP", lossless=True)) == wanted
    assert single(encode(PillowImage.new("LA", (1, 1), (0, 0)))) == [WHITE]
    assert single(encode(PillowImage.new("LA", (1, 1), (7, 255)))) == [[7, 7, 7]]
    palette = PillowImage.new("P", (1, 1), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    assert single(encode(palette)) == [[9, 8, 7]]
    assert (
        single(encode(palette, transparency=1)) == single(encode(palette, "GIF", transparency=1)) == [WHITE]
    )
    assert single(encode(palette, transparency=bytes([255, 128]))) == [[132, 131, 131]]
    key = chunk(b"tRNS", struct.pack(">3H", 1, 2, 3))
    assert single(png([b"\1\2\3\1\2\4"], 2, colours=2, before=key)) == [WHITE, [1, 2, 4]]
    key = chunk(b"tRNS", struct.pack(">3H", 256, 512, 768))
    row = struct.pack(">6H", 256, 512, 768, 256, 512, 1024)
    assert single(png([row], 2, bits=16, colours=2, before=key)) == [WHITE, [1, 2, 4]]
    key = chunk(b"tRNS", struct.pack(">H", 300))
    assert single(png([struct.pack(">2H", 300, 301)], 2, bits=16, before=key)) == [WHITE, [1, 1, 1]]


def test_cmyk():
    plain = Image(encode(PillowImage.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)).pixels()
    assert (abs(plain.astype(int) - [255, 0, 0]) < 4).all()  # Adobe's marker: inverted


def test_ycck_is_that_of_pillow():
    inks = PillowImage.new("CMYK", (8, 8), (10, 200, 100, 20))
    data = encode(inks, "JPEG", quality=100)
    assert data.count(b"Adobe") == 1
    at = data.index(b"Adobe") + 11
    data = data[:at] + b"\2" + data[at + 1 :]  # the transform: YCCK
    wanted = PillowImage.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(Image(data).pixels(), np.asarray(wanted))
    assert not np.array_equal(wanted, inks.convert("RGB"))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_animations_the_first_frame(kind):
    red, blue = (PillowImage.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    data = encode(
        red, kind, save_all=True, append_images=[blue], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert PillowImage.open(io.BytesIO(data)).n_frames == 2
    assert (Image(data).pixels() == [255, 0, 0]).all()


def test_bands_give_the_same_pixels():
    palette = PICTURE.convert("P", palette=PillowImage.Palette.ADAPTIVE)
    files = [
        PNG,
        JPEG,
        encode(palette, transparency=3),
        encode(PICTURE.convert("LA")),
        encode(palette, "GIF"),
    ]
    whole = [Image(data).pixels() for data in files]
    for n in (1, WIDTH, 3 * WIDTH):
        for data, wanted in zip(files, whole, strict=True):
            assert np.array_equal(decoding.decode(container.read(data), n), wanted)


def test_what_surrounds_the_pixels_does_not_matter():
    """Colour profiles, texts that grow, and animations that are wrong, of which Pillow warns, or fails."""
    bomb = b"key\0\0" + zlib.compress(bytes(80 << 20))
    extras = (chunk(b"zTXt", bomb), chunk(b"iCCP", bomb), chunk(b"acTL", bytes(8)), chunk(b"acTL", b""))
    extras += (chunk(b"tEXt", b"x"), chunk(b"eXIf", b"junk"), chunk(b"gAMA", b""), chunk(b"prVt", b"", crc=5))
    for extra in extras:
        data = PNG[:33] + extra + PNG[33:]
        assert np.array_equal(Image(data).pixels(), np.asarray(PICTURE))
        assert np.array_equal(Image(PNG[:-12] + extra + PNG[-12:]).pixels(), np.asarray(PICTURE))
    plain = Image(JPEG).pixels()
    for marker, content in itertools.product(
        (0xE1, 0xE2, 0xED, 0xFE), (b"", b"ICC_PROFILE\0", b"MPF\0", b"8BIM")
    ):
        data = JPEG[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content + JPEG[2:]
        assert np.array_equal(Image(data).pixels(), plain)
    for data in (JPEG + JPEG, JPEG + b"\xff\xda" * 1000, JPEG + bytes(100)):  # as of motion photos
        assert np.array_equal(Image(data).pixels(), plain)
    assert np.array_equal(Image(PNG + b"more").pixels(), np.asarray(PICTURE))


# What is refused

SCAN = encode(PICTURE, "JPEG", progressive=True)
SCAN = SCAN[SCAN.rindex(b"\xff\xda") : -2]
MANY_SCANS = encode(PICTURE, "JPEG", progressive=True)[:-2] + SCAN * 100 + b"\xff\xd9"
HUGE = {
    "PNG": png([], 20_000, 20_000, colours=6),
    "PNG of one line": png([], 2**31 - 1, 1),
    "PNG of 4 G columns": png([], 2**32 - 1, 2**32 - 1),
    "JPEG": JPEG.replace(struct.pack(">HH", HEIGHT, WIDTH), b"\xff\xff\xff\xff", 1),
    "GIF": gif(screen=(65535, 65535)),
    "GIF's frame": gif(frame=(0, 0, 65535, 65535)),
    "GIF's place": gif(frame=(65535, 65535, 1, 1)),
    "GIF that is disposed of": gif(frame=(0, 0, 65535, 20_000), before=b"\x21\xf9\x04\x0d\0\0\0\0"),
    "WEBP": webp(1 << 24, 1 << 24),
    "WEBP of 268 megapixels": webp(16383, 16383),
    "BMP": bmp(30_000, 30_000),
    "BMP from the top": bmp(30_000, -30_000),
    "limit": png([], MAX_PIXELS // 8 + 1, 8),
}
CHUNKS = chunk(b"teXt") * (container.MAX_PARTS + 1)
DAMAGED = {
    "only a signature of PNG": PNG[:8],
    "no end of PNG": PNG[:-12],
    "PNG without pixels": PNG[:33] + chunk(b"IEND"),
    "PNG whose pixels are no zlib": PNG[:33] + chunk(b"IDAT", b"junk" * 9) + chunk(b"IEND"),
    "PNG with a wrong sum": PNG[:33] + chunk(b"IDAT", b"junk", crc=1) + chunk(b"IEND"),
    "PNG with a changed palette": encode(PICTURE.convert("P")).replace(b"PLTE\0", b"PLTE\1", 1),
    "PNG without a header": PNG[:8] + PNG[33:],
    "PNG of no width": png([], 0, 1),
    "PNG of no height": png([], 1, 0),
    "PNG of 3 bits": png([b"\0"], bits=3),
    "PNG of colours 5": png([b"\0"], colours=5),
    "PNG with a short header": png([b"\0"], header=b"\0\0\0\1\0\0\0\1\10\0"),
    "PNG with a shorter header": png([b"\0"], header=b"\0\0\0\1"),
    "PNG with an endless chunk": PNG[:33] + b"\xff\xff\xff\xffIDAT",
    "PNG with many chunks": PNG[:33] + CHUNKS + PNG[33:],
    "PNG without its palette": png([b"\5"], colours=3),
    "PNG with a short transparency": png([b"\5" * 6], bits=16, colours=2, before=chunk(b"tRNS", b"\0")),
    "beginning of JPEG": JPEG[:3],
    "JPEG without pixels": JPEG[: JPEG.index(b"\xff\xda")] + b"\xff\xd9",
    "JPEG without tables": JPEG[:20] + JPEG[JPEG.index(b"\xff\xc0") :],
    "JPEG cut in its header": JPEG[:100],
    "JPEG cut in its pixels": JPEG[:-30],
    "JPEG without an end": JPEG[:-2],
    "JPEG of no height": JPEG.replace(struct.pack(">HH", HEIGHT, WIDTH), bytes(4), 1),
    "JPEG with two sizes": JPEG.replace(b"\xff\xda", b"\xff\xc0\0\x0b\x08\0\1\0\1\1\1\x11\0\xff\xda", 1),
    "JPEG of 12 bits": JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c", 1),
    "JPEG with many scans": MANY_SCANS,
    "JPEG with many markers": JPEG[:2] + b"\xff\xfe\0\2" * (container.MAX_PARTS + 1) + JPEG[2:],
    "JPEG of 0xFF": JPEG[:3] + b"\xff" * 5_000_000,
    "beginning of GIF": GIF[:6],
    "GIF without frames": gif()[:19] + b"\x3b",
    "GIF cut in its frame": GIF[:-10],
    "GIF with a cut extension": gif()[:19] + b"\x21\xfe\x05ab",
    "GIF with a long comment": gif(before=b"\x21\xfe" + b"\1x" * 200_000 + b"\0"),
    "GIF with many extensions": gif(before=b"\x21\xfe\0" * 200_000),
    "GIF of junk": gif()[:19] + b"\5" * 200_000,
    "GIF of no size": gif(screen=(0, 0), frame=(0, 0, 0, 0)),
    "GIF with wrong codes": gif(data=b"\x0d\xff" + b"\xff" * 255 + b"\0"),
    "header of WEBP": webp(5, 5),
    "WEBP cut in its header": WEBP[:22],
    "WEBP cut in its pixels": WEBP[:-8],
    "WEBP of junk": WEBP[:26] + b"junk" * 9,
    "BMP cut in its header": BMP[:30],
    "BMP cut in its pixels": BMP[:-3],
    "BMP of no width": bmp(0),
    "BMP of a negative width": bmp(-2),
    "BMP of the lowest height": bmp(1, -(2**31)),
    "BMP of 7 bits": bmp(bits=7),
    "BMP with an odd header": bmp(header=41),
    "BMP that is compressed": bmp(bits=8, compression=1, content=bytes(1024) + b"\2\0\0\0", rows=2),
    "BMP of PNG": bmp(compression=5),
    "BMP with strange masks": bmp(bits=32, compression=3, content=b"\1\2\3\4" * 4),
}
OTHERS = {
    "TIFF": b"II*\0" + bytes(100),
    "TIFF images": b"MM\0*" + bytes(100),
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(50),
    "HEIC images": b"\0\0\0\x18ftypmif1" + bytes(50),
    "AVIF": b"\0\0\0\x18ftypavif" + bytes(50),
    "videos": b"\0\0\0\x18ftypisom" + bytes(50),
    "JPEG XL": b"\xff\x0a" + bytes(50),
    "icons": b"\0\0\1\0" + bytes(50),
    "Photoshop": b"8BPS" + bytes(50),
    "PDF": b"%PDF-1.7\n",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "SVG is": b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- made by hand -->\n<svg/>",
    "web page": b"<!DOCTYPE html><html></html>",
    "not a JPEG, PNG": b"some text",
    "not a JPEG": b"\0" * 1000,
    "or BMP": b"BM" + b"text" * 20,
    "not": b"RIFF\0\0\0\0WAVEfmt ",
    "not a JPEG, PNG, GIF": b"<!--" * 2000 + b"<svg>",
}


@pytest.mark.parametrize("which", HUGE)
def test_huge_images_are_refused_before_they_are_decoded(which):
    Image(PNG)  # imports
    tracemalloc.start()
    try:
        message = refused(Image, HUGE[which], "photo")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert message.startswith("photo: the image has ")
    assert "limit of 64 megapixels" in message


@pytest.mark.parametrize("which", DAMAGED)
def test_damaged_images_are_refused(which):
    started = time.process_time()
    message = refused(Image, DAMAGED[which], "folder/photo\n.png")
    assert message.startswith("folder/photo\N{REPLACEMENT CHARACTER}.png: ")
    assert time.process_time() - started < 2.0  # it takes 0.1 s where it takes long


@pytest.mark.parametrize("which", OTHERS)
def test_other_files_are_refused(which):
    message = refused(Image, OTHERS[which])
    assert which in message
    assert "convert the file to PNG or JPEG" in message or "download" in message


def test_hostile_files_are_many():
    assert len(HUGE) + len(DAMAGED) + len(OTHERS) >= 80


def test_an_empty_file(tmp_path):
    assert "the image is empty" in refused(Image, b"")
    (tmp_path / "a.png").touch()
    assert "a.png: the image is empty" in refused(Image.open, tmp_path / "a.png")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_cut_is_refused_or_gives_the_whole_image(kind):
    data = FORMATS[kind]
    whole = Image(data).pixels()
    for n in range(len(data)):
        try:
            pixels = Image(data[:n]).pixels()
        except InvalidRequest:
            continue
        assert n > len(data) - 24, n  # behind the pixels
        assert np.array_equal(pixels, whole)


FILES = [
    *FORMATS.values(),
    with_exif(JPEG, exif(6)),
    encode(PICTURE.convert("P"), transparency=1),
    encode(PICTURE.convert("LA")),
    png([struct.pack(">13H", *range(13))] * 7, WIDTH, HEIGHT, 16, before=chunk(b"tRNS", b"\0\5")),
    encode(PICTURE.convert("CMYK"), "JPEG"),
    encode(PICTURE, "JPEG", progressive=True),
    encode(PICTURE, "WEBP"),
    encode(PICTURE, "WEBP", exif=exif(8)),
    encode(PICTURE.convert("L"), "BMP"),
    encode(
        PICTURE, "GIF", save_all=True, append_images=[PICTURE.transpose(PillowImage.Transpose.ROTATE_180)]
    ),
]


@settings(max_examples=400)
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
    st.booleans(),
    st.binary(max_size=4),
)
def test_changed_files_are_refused_or_decoded(data, changes, cut, is_cut, added):
    changed = bytearray(data)
    for at, value in changes:
        changed[int(at * len(data))] = value
    if is_cut:
        place = int(cut * len(data))
        changed[place : place + 3] = added
    changed = bytes(changed)
    if changed.startswith(b"\x89PNG"):  # the sums are checked: make them right
        changed = with_sums(changed)
    try:
        decode_if_small(changed)
    except InvalidRequest as error:
        message = str(error)
    else:
        message = ""
    assert not message or message.isprintable()


def decode_if_small(data):
    """Decode, unless the changed size is allowed, but so large that the test would take long."""
    read = container.read(data)
    if not 1_000_000 < read.width * read.height <= MAX_PIXELS:
        found = Image(data)
        assert found.pixels().shape == (found.height, found.width, 3)


def with_sums(data):
    parts, at = [data[:8]], 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            break
        parts.append(chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return b"".join([*parts, data[at:]])


def test_any_exception_of_pillow_is_one_line(monkeypatch):
    found = Image(PNG, "a.png")
    kinds = (
        struct.error,
        zlib.error,
        OverflowError,
        SyntaxError,
        ValueError,
        OSError,
        RecursionError,
        KeyError,
    )
    for kind in kinds:
        for where in ("load", "crop"):
            with monkeypatch.context() as patch:
                patch.setattr(PngImageFile, where, raising(kind("several\nlines " * 90)))
                assert "cannot be decoded (" in refused(found.pixels)
                if where == "load":
                    assert "cannot be decoded (" in refused(Image, PNG, "a.png")
    for where in ("load", "crop"):
        with monkeypatch.context() as patch:
            patch.setattr(PngImageFile, where, raising(MemoryError()))
            assert "not enough memory" in refused(found.pixels)


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_only_what_was_checked_is_decoded():
    """Pillow must not find a size that is not the one that was compared with the limit."""
    found = container.read(PNG)
    assert "contradict" in refused(decoding.check, found._replace(width=WIDTH - 1))


def test_one_image_is_decoded_at_a_time(monkeypatch):
    """For the sake of memory."""
    running, most = [], []

    def load(file, original=PngImageFile.load):
        running.append(file)
        most.append(len(running))
        time.sleep(0.005)
        loaded = original(file)
        running.pop()
        return loaded

    monkeypatch.setattr(PngImageFile, "load", load)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda _: Image(PNG).pixels(), range(8)))) == 8
    assert len(most) >= 16  # Pillow's crop loads, too
    assert set(most) == {1}


def test_pillow_is_unchanged_and_does_not_warn(recwarn):
    """Its limit of pixels and its warnings are global: other parts of a program rely on them."""
    Image(png([bytes(12_000 // 8)] * 5_000, 12_000, 5_000, bits=1))  # 60 megapixels
    refused(Image, png([], 12_000, 8_000, bits=1))  # 96 megapixels: Pillow warns of more than 89
    assert PillowImage.MAX_IMAGE_PIXELS == 1024 * 1024 * 1024 // 4 // 3
    assert not recwarn.list


# Files and texts


def test_open(tmp_path):
    path = tmp_path / "photo.txt"
    path.write_bytes(JPEG)
    for given_path in (path, str(path)):
        found = Image.open(given_path)
        assert (found.format, found.name, found.data) == ("JPEG", str(path), JPEG)
    for wrong in (tmp_path, tmp_path / "missing.png", "/dev/zero", "nul\0.png", "/dev/null"):
        assert str(wrong).split("\0")[0] in refused(Image.open, wrong)
    with (tmp_path / "large.png").open("wb") as file:
        file.write(PNG)
        file.truncate(MAX_BYTES + 1)
    assert "large.png: the image has more than 32 MiB" in refused(Image.open, tmp_path / "large.png")


def test_the_largest_file_is_allowed():
    data = PNG + bytes(MAX_BYTES - len(PNG))
    assert Image(data).width == WIDTH
    assert "more than 32 MiB" in refused(Image, data + b"\0")


FILE = PNG + bytes(-len(PNG) % 3) + b"\xfb\xef\xbe\xff\xff\xff\xff"
TEXT = base64.b64encode(FILE).decode()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.rstrip("="),
        TEXT.replace("+", "-").replace("/", "_"),
        "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)),
        f"  {TEXT}\n",
        TEXT.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        TEXT.replace("+", "%2b").replace("/", "%2f").replace("=", "%3d") + "%0A",
        TEXT + "=",
    ],
)
def test_base64(text):
    assert TEXT.endswith("++++/////w==")
    assert Image.of_base64(text, "a").data == FILE
    for header in ("image/png", "image/jpeg", "", "text/plain", "image/png;charset=utf-8;name=a.png"):
        for form in ("data:{};base64,", "DATA:{};BASE64,", " data:{} ; base64 ,"):
            found = Image.of_data_uri(form.format(header) + text, "a")
            assert (found.data, found.name) == (FILE, "a")


NO_BASE64 = ["", "=", "====", "!", "A", "AAAAA", TEXT + "!", TEXT[:9] + "=" + TEXT[9:], TEXT + "ü", "\ud800"]
NO_IMAGE = ["%", "%%%", "%41", "\0", "data:image/png;base64,AAAA", "/photos/a.png", "AAAA", "iVBORw0KGgo"]


@pytest.mark.parametrize("text", NO_BASE64 + NO_IMAGE)
def test_wrong_base64(text):
    refused(Image.of_base64, text)
    refused(Image.of_data_uri, f"data:image/png;base64,{text}")


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "",
            ",",
            "data:",
            "data:,",
            "data:image/png",
            "data:image/png,abc",
            "data:image/svg+xml,%3Csvg/%3E",
            TEXT,
        ),
        *(
            "https://example.org/a.png",
            "file:///etc/passwd",
            "data:base64,AAAA",
            "data:;base64",
            "a" * 10_000 + ",",
        ),
        *(f"data:{'x' * 5000};base64,{TEXT}", f"image/png;base64,{TEXT}", "data:image/png;base65," + TEXT),
    ],
)
def test_wrong_data_uris(uri):
    message = refused(Image.of_data_uri, uri, "messages[0]")
    assert message.startswith("messages[0]: the image is no data URI in base64: ")


@pytest.mark.parametrize(
    "text",
    [
        "A" * (MAX_BYTES * 4 // 3 + 8),
        "%" * (2 * MAX_BYTES + 2),
        " " * (2 * MAX_BYTES + 2),
        "A" * (3 * MAX_BYTES),
    ],
    ids=["letters", "percent signs", "spaces", "many letters"],
)
def test_long_base64_is_refused_before_it_is_decoded(text, monkeypatch):
    monkeypatch.setattr(base64, "b64decode", raising(AssertionError("decoded")))
    assert "more than 32 MiB" in refused(Image.of_base64, text)


def test_percent_signs_need_no_memory():
    text = "%2" * (MAX_BYTES // 2)
    tracemalloc.start()
    try:
        refused(Image.of_base64, text)
        assert tracemalloc.get_traced_memory()[1] < 6 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_pillow_is_imported_with_the_first_image():
    script = (
        "import sys\n"
        "from spec_local.images.image import Image\n"
        "assert not {'PIL', 'numpy'} & set(sys.modules)\n"
        "assert issubclass(Image, object)\n"
        f"Image({PNG!r})\n"
        "assert 'PIL.PngImagePlugin' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in KiB on Linux only")
def test_the_largest_images_need_one_gigabyte():
    """Of each format, in a process of its own: the constant's comment says so."""
    script = (
        "import resource, sys\n"
        "from spec_local.images.image import Image\n"
        "Image(bytes.fromhex(sys.argv[1])).pixels()\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "data = sys.stdin.buffer.read()\n"
        "before = peak()\n"
        "assert Image(data).pixels().shape == (8000, 8000, 3)\n"
        "print(peak() - before)\n"
    )
    picture = PillowImage.new("RGB", (8000, 8000), (9, 8, 7))
    for kind, options in (
        ("PNG", {}),
        ("JPEG", {"progressive": True, "subsampling": 0}),
        ("WEBP", {"method": 0}),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", script, PNG.hex()],
            input=encode(picture, kind, **options),
            capture_output=True,
        )
        assert not ran.returncode, ran.stderr
        assert int(ran.stdout) < 1_000_000, kind
