"""Text and its bytes. Bytes that are not UTF-8 are lone surrogates (PEP 383)."""

import codecs
import re

from spec_local.errors import InvalidRequest


def begun_character(data: bytes) -> bytes:
    """The bytes at the end that are the beginning of a UTF-8 character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def overlap(text: str, wanted: str) -> int:
    """Length of the longest suffix of a text that is a prefix of the wanted one."""
    return next((n for n in range(min(len(text), len(wanted)), 0, -1) if text.endswith(wanted[:n])), 0)


def bytes_of(text: str) -> bytes:
    """The bytes of a text in which lone surrogates stand for bytes that are not UTF-8.

    Raises:
        InvalidRequest: a surrogate does not stand for a byte.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode (lone surrogate at character {error.start}): remove it"
        ) from None


_HALF_CHARACTER = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""A surrogate that stands for no byte."""


def with_whole_characters(text: str) -> str:
    """The text with U+FFFD in place of surrogates that `bytes_of` refuses, such as half of a cut pair."""
    return _HALF_CHARACTER.sub("\ufffd", text)


def printable(text: str) -> str:
    """The text with U+FFFD in place of bytes that are not UTF-8, for JSON and the terminal."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def counted(n: int, one: str, many: str = "", *, separator: str = "") -> str:
    """Return a number and what it counts: "1 token", "2 tokens".

    Args:
        many: the plural; by default with an s.
        separator: of thousands.
    """
    return f"{n:{separator}} {one if n == 1 else many or one + 's'}"
