"""Predict the text that must follow: what a grammar leaves no choice about, and the white space within it.

Between two words of JSON, a grammar usually allows white space, so that strictly hardly any text is forced.
But models keep to one layout: white space is predicted from the text so far, and what comes after it is
forced again.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llguidance import LLMatcher

SPACE = b" \n\t\r"
_NUMBERS = b"-019"
_WORDS = b'"{[,:}]tfn' + _NUMBERS
"""First bytes of the words of JSON, some of the digits included: several of them may follow where one may."""
_NAMED = b"\xff"
"""In llguidance, begins a token that a grammar names; it is no byte of text."""
_BYTES_PER_TOKEN = 8  # more than tokens of forced text have on average
_RECENT = 4096  # bytes that show the layout of a text in one line
_BEGINNING = re.compile(rb"[ \n\t\r]*[{[]([ \n\t\r]*)[^ \n\t\r]")
"""Of a text of JSON; group 1 is the white space after the first bracket."""
_FORCED, _LAYOUT, _LAST = 0.99, 0.94, 0.9
"""Confidence of forced tokens, of those with predicted white space, and of a last one, which may merge with
what follows. Each is in a bin of its own of the acceptance model, which learns the actual rates."""


class TextVocabulary(Protocol):
    """The part of a model's vocabulary that predicted text uses."""

    eos: int
    eot: int

    def piece(self, token: int) -> bytes: ...

    def continuation(self, text: str, *, parse_special: bool = True) -> list[int]: ...


@dataclass(slots=True)
class UsualLayout:
    """The layout of a model's answers. beginning: the white space after the first bracket of the last one."""

    beginning: bytes = b""


class ForcedText:
    """Predicts forced text for one vocabulary.

    Args:
        byte_tokens: the token of each byte that has one.
        ends: tokens that end an answer, at least one.
        usual: the layout of earlier answers; kept up to date.
    """

    def __init__(
        self,
        vocabulary: TextVocabulary,
        byte_tokens: Mapping[int, int],
        ends: Sequence[int],
        usual: UsualLayout,
    ) -> None:
        self._vocabulary, self._byte_tokens, self._usual = vocabulary, byte_tokens, usual
        self._end = next((token for token in (vocabulary.eot, vocabulary.eos) if token in ends), ends[0])

    def tokens(self, matcher: LLMatcher, before: bytes, n: int) -> list[tuple[int, float]]:
        """Up to n tokens that probably follow: see `spec_local.core.constraint.State.forced`.

        Args:
            matcher: the position in the grammar; changes.
            before: the text up to there, to predict white space from.
        """
        text, predicted, n_bytes = b"", list[bool](), n * _BYTES_PER_TOKEN
        if begun := _BEGINNING.match(before):
            self._usual.beginning = begun[1]
        while len(text) < n_bytes:
            forced = matcher.compute_ff_bytes().partition(_NAMED)[0]
            part = (forced or self._laid_out(matcher, before + text))[: n_bytes - len(text)]
            text += part
            predicted += [not forced] * len(part)
            tokens = [self._byte_tokens.get(byte, -1) for byte in part]
            if not part or min(tokens) < 0 or not matcher.consume_tokens(tokens):
                break
        is_complete = matcher.is_stopped() and not matcher.is_error()
        tokens = self._tokenized(text)
        if tokens and not is_complete and text[-1:].isalnum():
            tokens.pop()  # within a word, which probably continues
        found, start = list[tuple[int, float]](), 0
        for token in tokens:
            end = start + len(self._vocabulary.piece(token))
            found.append((token, _LAYOUT if any(predicted[start:end]) else _FORCED))
            start = end
        if is_complete:
            found.append((self._end, _FORCED))
        elif found:
            found[-1] = tokens[-1], _LAST
        return found[:n]

    def _tokenized(self, text: bytes) -> list[int]:
        if not text:
            return []
        return self._vocabulary.continuation(text.decode("utf-8", "surrogateescape"), parse_special=False)

    def _laid_out(self, matcher: LLMatcher, before: bytes) -> bytes:
        """White space, and the first byte of the only word of JSON that may follow.

        Without this byte if it is a number; empty if there are several words, or no white space may follow.
        """
        if matcher.is_accepting() or not any(self._may_follow(matcher, byte) for byte in SPACE):
            return b""
        found = (byte for byte in _WORDS if self._may_follow(matcher, byte))
        words = bytes(itertools.islice(found, 2))  # quicker than a mask of the vocabulary
        if words and not words.strip(_NUMBERS):
            return layout(before, words[:1], self._usual.beginning)[:-1]
        return layout(before, words, self._usual.beginning) if len(words) == 1 else b""

    def _may_follow(self, matcher: LLMatcher, byte: int) -> bool:
        return byte in self._byte_tokens and bool(matcher.validate_tokens([self._byte_tokens[byte]]))


def layout(before: bytes, word: bytes, beginning: bytes = b"") -> bytes:
    """Predict the white space between a text and a byte of JSON that follows; returns it with this byte.

    Empty if the white space so far is not as predicted.

    Args:
        beginning: probable white space after the first bracket, if the text does not go further.
    """
    text = before.rstrip(SPACE)
    last, so_far = text[-1:], before[len(text) :]
    if begun := _BEGINNING.match(before):
        beginning = begun[1]
    elif so_far[:1] == b"\n" and not beginning.startswith(so_far):
        beginning = b"\n  "
    if beginning[:1] == b"\n":
        space = _in_lines(text, last, word, beginning[1:])
    else:
        same = re.escape(last) + rb"([ \n\t\r]*)" + re.escape(word)
        earlier = re.findall(same, text[-_RECENT:])
        space = earlier[-1] if earlier else b" " if last in (b":", b",") else b""
    return space[len(so_far) :] + word if space.startswith(so_far) else b""


def _in_lines(text: bytes, last: bytes, word: bytes, indent: bytes) -> bytes:
    """White space where each member has a line of its own."""
    line = text[text.rfind(b"\n") + 1 :]
    begin = b"\n" + line[: len(line) - len(line.lstrip(SPACE))]
    is_open = sum(map(line.count, (b"{", b"["))) > sum(map(line.count, (b"}", b"]")))
    if last in b"{[":
        return b"" if word in b"}]" else begin + indent
    if word in b"}]":
        return b"" if is_open else begin.removesuffix(indent)
    if last == b",":
        return b" " if is_open else begin
    return b" " if last == b":" else b""
