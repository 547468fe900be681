"""From tokens to text as it streams: characters cut by token borders, and stop strings.

Bytes that are not UTF-8 come out as lone surrogates (PEP 383), so that whoever writes the text with
``surrogateescape`` writes exactly the bytes that the model said.
"""

import codecs
from collections.abc import Callable, Sequence

from spec_local.errors import InvalidRequest


class TextStream:
    """Decodes pieces incrementally, and holds back what may yet become a stop string.

    Args:
        piece: a token's bytes.
        stops: strings that end the text and are not part of it.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stops = [s for s in stops if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""
        self.stopped = False
        """A stop string was met; nothing comes after it."""
        self.stopping_word = ""
        """Which one."""

    def feed(self, token: int) -> str:
        """The text that this token makes certain; "" while a character or a stop string is incomplete."""
        return self._release(self._decoder.decode(self._piece(token)))

    def finish(self) -> str:
        """What is still held back when no more tokens come."""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:  # nothing to hold back for
            return text
        self._held += text
        # The one that is complete first counts, however the text is cut into pieces.
        met = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if met:
            _, at, self.stopping_word = min(met)
            text, self._held, self.stopped = self._held[:at], "", True
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def bytes_of(text: str) -> bytes:
    """The bytes of a text in which lone surrogates stand for those that are not UTF-8.

    Raises:
        InvalidRequest: it holds surrogates that stand for no byte.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is no Unicode (a lone surrogate at character {error.start}): remove it"
        ) from None


def printable(text: str) -> str:
    """The text with U+FFFD where it is not UTF-8, for JSON and other places that want real characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
