"""Predict the text that must follow: what a grammar leaves no choice about, and the white space within it.

Between two words of JSON, a grammar usually allows white space, so that strictly hardly any text is forced.
But models keep to one layout: white space is predicted from the text so far, and what comes after it is
forced again.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher

SPACE = b" \n\t\r"
_FREE = b"ae"
"""Where white space and these letters may follow, the text is free."""
_NAMED = b"\xff"
"""In llguidance, begins a token that a grammar names; it is no byte of text."""
_BYTES_PER_TOKEN = 8  # more than tokens of forced text have on average
_FORCED, _LAYOUT, _LAST = 0.99, 0.94, 0.9
"""Confidence of forced tokens, of those with predicted white space, and of a last one, which may merge with
what follows. Each is in a bin of its own of the acceptance model, which learns the actual rates."""


class Vocabulary(Protocol):
    """The part of a model's vocabulary that predicted text uses."""

    eos: int
    eot: int

    def piece(self, token: int) -> bytes: ...

    def continuation(self, text: str, *, parse_special: bool = True) -> list[int]: ...


class ForcedText:
    """Predicts forced text for one vocabulary.

    Args:
        byte_tokens: the token of each byte that has one.
        ends: tokens that end an answer, at least one.
    """

    def __init__(self, vocabulary: Vocabulary, byte_tokens: Mapping[int, int], ends: Sequence[int]) -> None:
        self._vocabulary, self._byte_tokens = vocabulary, byte_tokens
        usual = (vocabulary.eot, vocabulary.eos)
        self._end = next((token for token in usual if token in ends), ends[0])
        self._space = {byte for byte in SPACE if byte in byte_tokens}
        self._bytes = np.array(list(byte_tokens))
        self._tokens = np.array(list(byte_tokens.values()))

    def tokens(self, matcher: LLMatcher, before: bytes, n: int) -> list[tuple[int, float]]:
        """Up to n tokens that probably follow: see `spec_local.core.constraint.State.forced`.

        Args:
            matcher: the position in the grammar; changes.
            before: the text up to there, to predict white space from.
        """
        text, predicted = b"", list[bool]()
        while len(text) < n * _BYTES_PER_TOKEN:
            forced = matcher.compute_ff_bytes().partition(_NAMED)[0]
            part = forced or self._laid_out(matcher, before + text)
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
        """White space and the only other byte that may follow; empty if there are more, or no white space."""
        if not any(self._may_follow(matcher, byte) for byte in self._space):
            return b""
        if all(self._may_follow(matcher, byte) for byte in _FREE):  # quicker than a mask
            return b""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = self._bytes[(bits[self._tokens >> 3] >> (self._tokens & 7) & 1).astype(bool)]
        words = set(allowed.tolist()) - self._space
        if len(words) != 1 or matcher.is_accepting():
            return b""
        return layout(before, bytes(words))

    def _may_follow(self, matcher: LLMatcher, byte: int) -> bool:
        return (
            bool(matcher.validate_tokens([self._byte_tokens[byte]])) if byte in self._byte_tokens else False
        )


def layout(before: bytes, word: bytes) -> bytes:
    """Predict the white space between a text and a byte of JSON that follows; returns it with this byte.

    Empty if the white space so far is not as predicted.
    """
    text = before.rstrip(SPACE)
    last, so_far = text[-1:], before[len(text) :]
    if lines := re.match(rb"\s*[{[]\n([ \t]*)", before):
        space = _in_lines(text, last, word, lines[1] or b"  ")
    else:
        same = re.escape(last) + rb"([ \n\t\r]*)" + re.escape(word)
        earlier = re.findall(same, text)
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
