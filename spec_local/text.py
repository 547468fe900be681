"""Incremental detokenization: characters split across tokens, and stop strings.

Bytes that are not UTF-8 become lone surrogates (PEP 383), so that writing the text with
``surrogateescape`` restores exactly the bytes that the model generated.
"""

import codecs
import re
from collections.abc import Callable, Sequence

from spec_local.errors import InvalidRequest


class TextStream:
    """Decodes tokens incrementally, and holds back text that may be the start of a stop string.

    Args:
        piece: returns the bytes of a token.
        stops: strings that end the text and are not part of it.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stops = [s for s in stops if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""
        self.stopped = False
        """Return whether a stop string was found; if so, no more text follows."""
        self.stopping_word = ""
        """The stop string that was found."""

    def feed(self, token: int) -> str:
        """The text that is complete after this token; empty inside a character or a possible stop string."""
        return self._release(self._decoder.decode(self._piece(token)))

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        # The stop string that ends first is used, regardless of how the text is split into tokens.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopping_word = min(found)
            text, self._held, self.stopped = self._held[:at], "", True
            return text
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


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
