"""Images and sounds that a user gives: files, standard input, and words of a message that name a file."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from spec_local.errors import InvalidRequest
from spec_local.images.media import MAX_BYTES, MAX_IMAGES, Media
from spec_local.images.media_file import MediaFile
from spec_local.system.files import expanded
from specdec_cli.given_files import STANDARD, read_given

Placed = list[tuple[int, Media]]
"""Images with their places in a text, as in `spec_local.chat.messages.Message`."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".wav", ".mp3", ".flac")
_UNSUPPORTED = (".heic", ".heif", ".avif", ".tif", ".tiff", ".ogg", ".m4a")  # whose error says what to do
_WORD = re.compile(
    r"""(?<![^\s(])(?P<at>@?)
    ( '(?P<single>([^']|'\\'')*)' | "(?P<double>[^"]*)" | (?P<bare>(\\.|[^\s\\'"(])(\\.|[^\s\\])*) )""",
    re.DOTALL | re.VERBOSE,
)
_PUNCTUATION = ".,;:!?)"


def given_images(paths: Sequence[Path]) -> list[Media]:
    """Read the files of the options --image and --audio; - is standard input.

    Raises:
        InvalidRequest: one cannot be read, or is no valid image; or there are too many.
    """
    if len(paths) > MAX_IMAGES:
        raise InvalidRequest(f"--image and --audio have {len(paths)} files: give at most {MAX_IMAGES}")
    if paths.count(STANDARD) > 1:
        raise InvalidRequest("--image - is given twice, but standard input has one file: remove one")
    return [_of_standard_input() if path == STANDARD else MediaFile.open(path) for path in paths]


def _of_standard_input() -> Media:
    if sys.stdin is not None and sys.stdin.isatty():
        raise InvalidRequest("--image - reads standard input, which is the terminal: pipe a file into it")
    return MediaFile.of(*read_given(STANDARD, MAX_BYTES))


def described(image: Media) -> str:
    """What is attached, in a few words: "image a.png, 640 × 480 pixels"."""
    return f"{image.noun} {os.path.basename(image.name)}, {image.size}"


def readable(content: str, images: Sequence[tuple[int, Media]]) -> str:
    """The content of a message with a few words in the place of each image."""
    text, end = "", 0
    for at, image in images:
        text += f"{content[end:at]}[{image.noun} {os.path.basename(image.name)}]"
        text += " " * content[at : at + 1].isalnum()
        end = at
    return text + content[end:]


def named_first(text: str) -> tuple[str, str]:
    """The path that a text begins with, quoted or escaped if need be, and the rest of the text.

    If the whole text is the path of a file, it may have spaces.
    """
    if os.path.exists(os.path.expanduser(text)):
        return text, ""
    word = _WORD.match(text)
    if not word or word["at"]:
        first, _, rest = text.partition(" ")
        return first, rest.strip()
    return _path(word), text[word.end() :].strip()


def begins_with_image(text: str) -> bool:
    """Return whether a message begins with the path of an image, such as that of a dropped file."""
    word = _WORD.match(text)
    return bool(_dropped(text.strip()) or (word and _dropped(_path(word))))


def read_message(text: str) -> tuple[str, Placed]:
    """The text of a message without the names of images, and the images in their places.

    Names are ``@FILE``, if there is such a file, and the absolute path or file URL of an existing image, as
    terminals write it for a dropped file: a word, perhaps quoted or with escaped spaces, or all of the text.

    Raises:
        InvalidRequest: a file is no valid image.
    """
    if path := _dropped(text.strip()):
        return "", [(0, MediaFile.open(path))]
    left, images, end = "", Placed(), 0
    for word in _WORD.finditer(text):
        named, is_marked = _path(word), bool(word["at"])
        bare = word["bare"] is not None
        for name in dict.fromkeys((named, named.rstrip(_PUNCTUATION) if bare else named)):
            if path := _marked(name) if is_marked else _dropped(name):
                left += text[end : word.start()]
                images.append((len(left), MediaFile.open(path)))
                end = word.end() - (len(named) - len(name))
                break
    return (left + text[end:], images) if images else (text, images)


def _path(word: re.Match[str]) -> str:
    """The path in a word, without quotes and escapes."""
    if word["single"] is not None:
        return word["single"].replace("'\\''", "'")
    if word["double"] is not None:
        return word["double"]
    return re.sub(r"\\(.)", r"\1", word["bare"])


def _marked(name: str) -> Path | None:
    """The file of ``@name``; None: there is none, and the word is text."""
    try:
        path = expanded(name)
        return path if name and path.is_file() else None
    except (InvalidRequest, OSError, ValueError):
        return None


def _dropped(name: str) -> Path | None:
    """The file of an absolute path or file URL; None: it is none of an image."""
    if name.startswith("file://"):
        url = urlsplit(name)
        name = unquote(url.path) if url.netloc in ("", "localhost") else ""
    if not name.lower().endswith((*SUFFIXES, *_UNSUPPORTED)) or not os.path.isabs(name):
        return None
    return _marked(name)
