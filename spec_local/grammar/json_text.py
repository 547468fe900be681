"""Checks that a grammar cannot make in JSON: distinct names in an object, and numbers that fit into a float.

Strict parsers reject other texts; the rest read infinities, or keep one value of a repeated name. Names have
one spelling here, without ``\\u``, so that a name cannot pass for another one in the grammar either.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec_local.core.constraint import State

_MAX_EXPONENT_DIGITS = 3  # those of the largest float, 1.8e308
_LONG = 300  # bytes of a number that could exceed the largest float without an exponent
_NUMBER = frozenset(b"+-.0123456789eE")


class JsonText(NamedTuple):
    """A position in a JSON text: what `after` needs to know about the text before it.

    open: names used in the innermost object (None: it is an array), and the same for the one around it.
    inside: what the position is inside of: "name", "string", "number" or "" for anything else.
    text: the name or number so far.
    escaped: the last byte was a backslash that escapes the next one.
    expects_name: the next string is a name.
    is_json: outside of all objects and arrays, too; otherwise that is other text, without quotes.
    """

    open: "tuple[frozenset[bytes] | None, object] | None" = None
    inside: str = ""
    text: bytes = b""
    escaped: bool = False
    expects_name: bool = False
    is_json: bool = True

    @property
    def used(self) -> frozenset[bytes]:
        """The names of the innermost object so far."""
        return (self.open[0] if self.open else None) or frozenset()

    @property
    def may_become_a_used_name(self) -> bool:
        in_name = self.inside == "name" and any(name.startswith(self.text) for name in self.used)
        return in_name or (self.expects_name and bool(self.used))

    def after(self, piece: bytes) -> "JsonText | None":
        """The position after more bytes of valid JSON; None: they repeat a name or overflow a number."""
        open_, inside, text, escaped, expects_name, is_json = self
        for i, byte in enumerate(piece):
            if inside in ("name", "string"):
                if escaped:
                    escaped = False
                    if byte == 0x75 and inside == "name":  # u
                        return None
                elif byte == 0x22:
                    if inside == "name":
                        used = (open_[0] if open_ else None) or frozenset()
                        if text in used:
                            return None
                        open_ = (used | {text}, open_[1] if open_ else None)
                    inside, text = "", b""
                    continue
                else:
                    escaped = byte == 0x5C
                if inside == "name":
                    text += piece[i : i + 1]
                continue
            is_digit = byte in _NUMBER and (inside == "number" or byte in b"-0123456789")
            if is_digit and (is_json or open_):
                inside, text = "number", text + piece[i : i + 1]
                if not _fits(text):
                    return None
                continue
            inside, text = "", b""
            if byte == 0x22:
                inside = "name" if expects_name else "string"
                expects_name = False
            elif byte in b"{[":
                open_ = (frozenset() if byte == 0x7B else None, open_)
                expects_name = byte == 0x7B
            elif byte in b"}]":
                open_ = open_[1] if open_ else None  # type: ignore[assignment]
                expects_name = False
            elif byte == 0x2C:
                expects_name = bool(open_) and open_[0] is not None  # type: ignore[index]
        return JsonText(open_, inside, text, escaped, expects_name, is_json)


def _fits(number: bytes) -> bool:
    mantissa, exponent, digits = number.lower().partition(b"e")
    if len(digits.lstrip(b"+-")) > _MAX_EXPONENT_DIGITS:
        return False
    if (len(mantissa) < _LONG and not exponent) or number[-1] not in b"0123456789":
        return True
    return math.isfinite(float(number))


class JsonPieces:
    """The pieces of a vocabulary, by what `JsonText.after` could refuse."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        everything = np.arange(len(pieces))
        marked = self._matching(rb'.*[",\\]', everything)  # the only ones that most patterns below can match
        self._closing: dict[bytes, list[int]] = defaultdict(list)  # by the bytes before the first quote
        for token in self._matching(rb'.*"', marked).tolist():
            self._closing[pieces[token].partition(b'"')[0]].append(token)
        self._complex = self._matching(rb'.*(?:".*"|\\u)', marked)
        self._quotes = self._matching(rb'[ \n\t]*"', marked)
        self._commas = self._matching(rb".*,", marked)
        self._quoted_commas = self._matching(rb'.*".*,', marked)
        digits = self._matching(rb".*[0-9]", everything)
        self._exponent = self._matching(rb'[^"]*[eE][-+]?[0-9]', digits)
        self._digits = self._matching(rb"[0-9eE.]", everything)
        self._u = self._matching(rb"u", everything)
        self._space = self._matching(rb"[ \n\t]+\Z", everything)

    def _matching(self, pattern: bytes, tokens: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some tokens whose piece begins with what a pattern matches."""
        start = re.compile(pattern, re.DOTALL)
        return np.array([t for t in tokens.tolist() if start.match(self.pieces[t])], np.intp)

    @functools.cached_property
    def _by_piece(self) -> dict[bytes, list[int]]:
        tokens = defaultdict(list)
        for token, piece in enumerate(self.pieces):
            tokens[piece].append(token)
        return tokens

    def clear(self, allowed: NDArray[np.bool_], at: JsonText) -> None:
        """Clear the tokens that `at.after` refuses in a mask of tokens."""
        if at.inside == "name":
            for name in at.used:
                if name.startswith(at.text):
                    allowed[self._closing[name[len(at.text) :]]] = False
            if at.escaped:
                allowed[self._u] = False
        check = [self._complex]
        if at.inside != "string":
            check.append(self._exponent)
        if at.inside == "number" and (len(at.text) >= _LONG - 50 or b"e" in at.text.lower()):
            check.append(self._digits)
        for tokens in check:
            for token in tokens[allowed[tokens]].tolist():
                allowed[token] = at.after(self.pieces[token]) is not None

    def toward_used_names(self, allowed: NDArray[np.bool_], at: JsonText) -> list[int]:
        """Allowed tokens, except white space, after which the next name could only be a used one."""
        if at.inside == "name":
            rests = {name[len(at.text) :] for name in at.used if name.startswith(at.text)}
            starts = {rest[:end] for rest in rests for end in range(1, len(rest) + 1)}
            return [t for start in starts for t in self._by_piece.get(start, ()) if allowed[t]]
        if not at.used:
            return []
        tokens = self._quoted_commas if at.inside == "string" else self._commas
        tokens = self._quotes if at.expects_name else tokens
        found = [(token, at.after(self.pieces[token])) for token in tokens[allowed[tokens]].tolist()]
        return [token for token, text in found if text and text.may_become_a_used_name]

    def clear_space(self, allowed: NDArray[np.bool_]) -> None:
        allowed[self._space] = False


class JsonState:
    """A position in a grammar of JSON, which `JsonText` restricts further.

    Args:
        grammar: the position in the grammar.
        limited_names: an object may run out of names, so tokens that lead there are not allowed.
    """

    def __init__(self, grammar: State, text: JsonText, pieces: JsonPieces, *, limited_names: bool) -> None:
        self._grammar, self._text, self._pieces = grammar, text, pieces
        self._limited_names = limited_names
        self._allowed: NDArray[np.bool_] | None = None

    def allows(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        if self._allowed is None and not self._limited_names:
            found = self._grammar.allows(tokens)
            for i in np.flatnonzero(found):
                found[i] = self._text.after(self._pieces.pieces[tokens[i]]) is not None
            return found
        return self.allowed()[tokens]

    def allowed(self) -> NDArray[np.bool_]:
        if self._allowed is None:
            allowed = self._fitting()
            if self._limited_names:
                found: dict[JsonText, bool] = {}  # spaces before a name make no difference
                for token in self._pieces.toward_used_names(allowed, self._text):
                    following = self._after(token)
                    if following and following._text not in found:
                        found[following._text] = following._has_a_name()
                    allowed[token] = following is not None and found[following._text]
            self._allowed = allowed
        return self._allowed

    def after(self, token: int) -> "JsonState | None":
        allowed = not self._limited_names or self.allows(np.array([token]))[0]
        return self._after(token) if allowed else None

    def n_allowed(self, tokens: Sequence[int]) -> int:
        text, n_allowed = self._text, self._grammar.n_allowed(tokens)
        for n, token in enumerate(tokens[:n_allowed]):
            following = text.after(self._pieces.pieces[token])
            if following is None:
                return n
            text = following
        return n_allowed

    def forced(self, n: int) -> Sequence[tuple[int, float]]:
        return self._grammar.forced(n)

    def _after(self, token: int) -> "JsonState | None":
        grammar = self._grammar.after(token)
        text = self._text.after(self._pieces.pieces[token]) if grammar else None
        if grammar is None or text is None:
            return None
        return JsonState(grammar, text, self._pieces, limited_names=self._limited_names)

    def _fitting(self) -> NDArray[np.bool_]:
        allowed = self._grammar.allowed().copy()
        self._pieces.clear(allowed, self._text)
        return allowed

    def _has_a_name(self) -> bool:
        """Return whether the next name, or the rest of this one, can be one that is not used yet."""
        allowed = self._fitting()
        if self._text.expects_name:
            self._pieces.clear_space(allowed)
        toward = self._pieces.toward_used_names(allowed, self._text)
        if np.count_nonzero(allowed) > len(toward):
            return True
        return any(following._has_a_name() for token in toward if (following := self._after(token)))
