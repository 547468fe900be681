"""Translate GBNF, the grammar notation of llama.cpp, to llguidance's dialect of Lark.

Terminals in Lark are greedy: with ``NAME: /[a-z]+/``, the rule ``NAME "z"`` matches nothing. GBNF has no
terminals. Each character therefore becomes a separate lexeme, and the Earley parser follows every possible
parse of a text. One difference remains: where both a set of tokens (``!<[5]>``) and text could follow,
llguidance follows only the set of tokens.

GBNF: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from spec_local.errors import InvalidRequest

_MAX_BYTES = 1 << 20
_MAX_WORDS = 5000
"""Alternatives and their items. llguidance's time can grow with their cube: at most some seconds here."""
_SPACE = r"(?: [ \t\r\n]+ | \#[^\r\n]* )"
_WORD = re.compile(
    rf"""
    (?P<space> {_SPACE} )
    | (?P<define> ::= )
    | (?P<name> [\w-]+ )
    | (?P<literal> "(?:\\.|[^"\\])*" )
    | (?P<set> \[(?:\\.|[^\]\\])*\] )
    | (?P<token> !?<[^>]*> )
    | (?P<repeat> [*+?] | \{{ {_SPACE}* \d+ {_SPACE}* (?: , {_SPACE}* (?: \d+ {_SPACE}* )? )? \}} )
    | (?P<sign> [.|()] )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_CHARACTER = re.compile(
    r'\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([nrt"\\\[\]-])|([^\\])', re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_NOTHING = rf"/[^\x{{0}}-\x{{{_LAST:x}}}]/"
"""A set without characters. llama.cpp also accepts those whose bounds are reversed or no characters."""


def to_lark(text: str, token_id: Callable[[str], int | None]) -> str:
    """Translate a grammar; the language that it accepts stays the same.

    Args:
        text: GBNF with a rule ``root``, of at most 1 MiB and 5000 words.
        token_id: returns the id of the token with a spelling, for ``<name>``.

    Raises:
        InvalidRequest: the text is not GBNF; the message gives the reason.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the grammar is not UTF-8: convert it first, for example with iconv") from None
    if size > _MAX_BYTES:
        raise InvalidRequest(f"the grammar has {size} bytes: give at most {_MAX_BYTES}")
    if not text.strip():
        raise InvalidRequest("the grammar is empty: give rules, the first of them root ::= ...")
    return _Converter(token_id).convert(text)


def refusal(reason: str) -> InvalidRequest:
    """The error for a grammar that cannot be used."""
    reason = escaped(" ".join(reason.split()))
    reason = reason if len(reason) < 120 else reason[:117] + "..."
    return InvalidRequest(f"the grammar cannot be used ({reason}): see llama.cpp's grammars/README.md")


def escaped(text: str) -> str:
    """Return a text with escapes instead of control characters and others that are not visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Converter:
    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._names: dict[str, str] = {}  # in Lark, by the name in GBNF
        self._rules: dict[str, list[list[str]]] = {}  # alternatives, by the name in Lark
        self._numbers = itertools.count()  # of groups
        self._optional: dict[str, tuple[str, list[str], int]] = {}  # see `_at_most`

    def convert(self, text: str) -> str:
        unfinished: list[list[list[str]]] = []  # alternatives of the current rule and of each open group
        words = [*_words(text), ("end", "")]
        position = 0
        while words[position][0] != "end":
            kind, word = words[position]
            if kind == "name" and words[position + 1][0] == "define":
                if len(unfinished) > 1:
                    raise refusal(f"expecting ')' before the rule {word}")
                unfinished = [[[]]]
                self._rules[self._name(word)] = unfinished[0]
                position += 2
                continue
            if not unfinished:
                raise refusal(f"expecting {'::= after' if kind == 'name' else 'a name at'} {word[:20]!r}")
            self._read(kind, word, unfinished)
            position += 1
        if len(unfinished) > 1:
            raise refusal("expecting ')', unexpected end of input")
        for name, in_lark in self._names.items():
            if in_lark not in self._rules:
                raise refusal(f"Undefined rule identifier '{name}'")
        if "root" not in self._names:
            raise refusal("there is no rule 'root'")
        each = [items for alternatives in self._rules.values() for items in alternatives]
        if sum(1 + len(items) for items in each) > _MAX_WORDS:
            raise InvalidRequest(f"the grammar has more than {_MAX_WORDS} words: give a smaller one")
        lines = [f"start: {self._names['root']}"]
        for name, alternatives in self._rules.items():
            lines.append(f"{name}: " + " | ".join(" ".join(items) or '""' for items in alternatives))
        return "\n".join(lines)

    def _read(self, kind: str, word: str, unfinished: list[list[list[str]]]) -> None:
        """Add a word to the last alternative; a group becomes a rule, as Lark limits nesting."""
        items = unfinished[-1][-1]
        if word == "|":
            unfinished[-1].append([])
        elif word == "(":
            unfinished.append([[]])
        elif word == ")":
            if len(unfinished) == 1:
                raise refusal("unexpected ')'")
            group = self._group(unfinished.pop())
            unfinished[-1][-1].append(group)
        elif kind == "repeat":
            if not items:
                raise refusal(f"expecting an item before {word}")
            if items[-1][-1] in "*+?}":
                items[-1] = self._group([[items[-1]]])
            word = re.sub(_SPACE, "", word, flags=re.VERBOSE)
            is_group = items[-1].startswith("group") and items[-1] in self._rules
            if word == "?" and is_group and len(self._rules[items[-1]]) == 1:
                items[-1] = self._at_most(items[-1])
            elif items[-1] != '""':
                items[-1] = '""' if word in ("{0}", "{0,0}") else items[-1] + word
        elif kind == "name":
            items.append(self._name(word))
        elif kind == "literal":
            lexemes = " ".join(_any_of([(code, code)]) for code, _ in _characters(word[1:-1]))
            items.append(f"({lexemes})" if lexemes else '""')
        elif kind == "set":
            items.append(_set(word[1:-1]))
        elif kind == "token":
            items.append(self._token(word))
        elif word == ".":
            items.append("/(?s:.)/")
        else:
            raise refusal(f"unexpected {word}")

    def _group(self, alternatives: list[list[str]]) -> str:
        group = f"group{next(self._numbers)}"
        self._rules[group] = alternatives
        return group

    def _at_most(self, group: str) -> str:
        """An optional group; ``(a (a (a)?)?)?``, as llama-cpp-python writes counts, becomes ``a{0,3}``."""
        (items,) = self._rules[group]
        inner, content, n = self._optional.get(items[-1] if items else "", ("", [], 0))
        if n and content == items[:-1]:
            del self._rules[group]
            n += 1
        else:
            inner, content, n = group, items, 1
        item = f"{inner}{{0,{n}}}"
        self._optional[item] = inner, content, n
        return item

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"rule{len(self._names)}")

    def _token(self, word: str) -> str:
        spelling = word.removeprefix("!")
        number = re.fullmatch(r"<\[(\d+)\]>", spelling)
        token = int(number[1]) if number else self._token_id(spelling)
        if token is None:
            raise refusal(f"invalid token {spelling}")
        return f"<[{'^' if word[0] == '!' else ''}{token}]>"


def _words(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        found = _WORD.match(text, position)
        if not found:
            rest = text[position : position + 20]
            raise refusal("unexpected end of input" if rest[0] in '"[' else f"unexpected {rest!r}")
        position = found.end()
        if found.lastgroup != "space":
            yield str(found.lastgroup), found[0]


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """The code points of a literal or a set, and whether each of them was escaped."""
    position = 0
    while position < len(text):
        found = _CHARACTER.match(text, position)
        if not found:
            raise refusal(f"unknown escape {text[position : position + 2]}")
        position = found.end()
        code = found[1] or found[2] or found[3]
        yield int(code, 16) if code else ord(_ESCAPES.get(found[4], found[4]) or found[5]), not found[5]


def _set(text: str) -> str:
    """Convert a set of characters to a regular expression; as in llama.cpp, one of none matches no text."""
    negated = text.startswith("^")
    characters = list(_characters(text[negated:]))
    ranges, position = [], 0
    while position < len(characters):
        first = last = characters[position][0]
        if characters[position + 1 : position + 2] == [(ord("-"), False)] and position + 2 < len(characters):
            last = characters[position + 2][0]
            position += 2
        ranges.append((first, last))
        position += 1
    return _any_of(ranges, negated) if ranges else '""'


def _any_of(ranges: Sequence[tuple[int, int]], negated: bool = False) -> str:
    """A regular expression for the characters in these ranges, or for all others."""
    low, high = _SURROGATES  # not characters
    clipped = [
        (high + 1 if low <= first <= high else first, low - 1 if low <= last <= high else min(last, _LAST))
        for first, last in ranges
    ]
    parts = [
        _quoted(first) + f"-{_quoted(last)}" * (first < last) for first, last in clipped if first <= last
    ]
    if not parts:
        return "/(?s:.)/" if negated else _NOTHING
    return f"/[{'^' if negated else ''}{''.join(parts)}]/"


def _quoted(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
