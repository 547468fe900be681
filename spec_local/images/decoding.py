"""Decode an image file to RGB with Pillow, one image at a time and with bounded memory.

llama.cpp decodes images with stb_image. Pillow decodes more of what people have: WebP, CMYK, and photos that
lie on their side (EXIF orientation). Its decoders, such as libjpeg-turbo and libwebp, are fuzzed and
maintained, and the size is known before anything is decoded. Videos are not images: no ffmpeg is run.

Pillow's classes for the formats are used directly. `PIL.Image.open` warns of large images by a limit that is
global, and imports the plug-ins of forty formats; warnings cannot be suppressed in one thread only.
"""

import threading
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from spec_local.errors import InvalidRequest
from spec_local.images.container import Container, damaged

_CLASSES: dict[str, type[ImageFile]] = {
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
}

_BAND_PIXELS = 1 << 20
"""Pixels that are converted to RGB together, so that copies of the whole image are not needed."""

_ONE_AT_A_TIME = threading.Lock()
"""Held while an image is decoded: memory for the largest is needed once, not in each thread of a server."""


def check(container: Container) -> None:
    """Decode an image and keep nothing.

    Raises:
        InvalidRequest: it is damaged, or of an unsupported variant of its format.
    """
    with _ONE_AT_A_TIME:
        _load(container)


def decode(container: Container, band_pixels: int = _BAND_PIXELS) -> NDArray[np.uint8]:
    """The pixels of an image: RGB, upright, on white where it is transparent; (height, width, 3).

    Args:
        band_pixels: how many are converted to RGB together.

    Raises:
        InvalidRequest: as `check`.
    """
    with _ONE_AT_A_TIME:
        image = _load(container)
        rows = max(1, band_pixels // image.width)
        try:
            pixels = np.empty((image.height, image.width, 3), np.uint8)
            for top in range(0, image.height, rows):
                bottom = min(top + rows, image.height)
                pixels[top:bottom] = _rgb(image.crop((0, top, image.width, bottom)))
            del image
            return _upright(pixels, container.orientation)
        except Exception as error:
            raise _failure(error) from None


def _load(container: Container) -> PillowImage.Image:
    try:
        image = _CLASSES[container.format](BytesIO(container.file))
        if image.size != (container.width, container.height):  # what was checked is not what would be decoded
            raise damaged("its sizes contradict each other")
        image.load()
    except Exception as error:  # of any kind: struct.error, zlib.error, SyntaxError, OverflowError …
        raise _failure(error) from None
    return image


def _failure(error: Exception) -> InvalidRequest:
    if isinstance(error, InvalidRequest):
        return error
    if isinstance(error, MemoryError):
        return InvalidRequest("there is not enough memory to decode the image: make it smaller")
    why = " ".join(str(error).split())[:100] or type(error).__name__
    return InvalidRequest(
        f"the image cannot be decoded ({why}): download it again, or convert it to PNG or JPEG"
    )


def _rgb(image: PillowImage.Image) -> NDArray[np.uint8]:
    """A part of an image, of any mode that the decoders give, as RGB on white."""
    transparent = image.info.get("transparency")
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        grey = np.asarray(image).astype(np.uint32)
        white = grey == transparent if isinstance(transparent, int) else False
        levels = np.where(white, 255, (grey * 255 + 32767) // 65535).astype(np.uint8)
        return np.repeat(levels[..., None], 3, axis=2)
    if transparent is not None and image.mode in ("1", "L", "P", "RGB"):
        image = image.convert("RGBA")
    if image.mode in ("LA", "PA", "RGBA"):
        image = image.convert("RGBA")
        ground = PillowImage.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        image = ground
    return np.asarray(image.convert("RGB"))


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Apply an orientation of EXIF: from 5 on, rows are columns."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
