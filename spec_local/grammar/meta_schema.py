"""Whether a JSON schema is valid itself, also where it has keywords that cannot be enforced."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from spec_local.errors import InvalidRequest
from spec_local.grammar.json_schema import short
from spec_local.grammar.matcher import is_pattern
from spec_local.grammar.subschemas import LISTED, NAMED, SINGLE, TYPES, step

_ONE = {
    *(SINGLE - {"items"}),
    *("not", "if", "then", "else", "contains", "unevaluatedItems", "unevaluatedProperties"),
}
_NAMED = {*NAMED, "dependentSchemas"}
_MAX_SCHEMAS = 10_000
_PARTS = re.compile(
    r"""
    \\(?P<escape> [pP]\{[^{}]*\} | k<[^<>]*> | u\{[0-9a-fA-F]+\} | c[a-zA-Z] | [0-9]+ | . )
    | \[\^?(?P<set> (?: \\. | [^\]\\] )* )\]
    | (?P<open> \[ )
    | \(\?<(?P<behind> [=!] )
    | \(\?<(?P<name> [^<>]+ )>
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[pPu]\{[^{}]*\}|c[a-zA-Z]|.)|.", re.DOTALL)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_VALUES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "required": (_is_strings, "a list of names"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef"), (lambda v: isinstance(v, str), "a text")),
    **dict.fromkeys(
        ("minContains", "maxContains", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
         "maxProperties"),
        (_is_count, "0 or more"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")
    ),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a positive number"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_strings, value.values())),
        "a list of names for each name",
    ),
}  # fmt: skip


def check(root: Any) -> None:
    """Check the values of all keywords, and the syntax of all patterns.

    Raises:
        InvalidRequest: one is wrong; the error names it.
    """
    schemas, n = [(root, "#")], 0
    while schemas:
        schema, at = schemas.pop()
        if isinstance(schema, bool):
            continue
        if (n := n + 1) > _MAX_SCHEMAS:
            raise InvalidRequest(f"the JSON schema has more than {_MAX_SCHEMAS} parts: give a smaller one")
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{at} is {short(schema)}: give a schema")
        for key, value in schema.items():
            is_right, expected = _VALUES.get(key, (lambda value: True, ""))
            if not is_right(value):
                raise InvalidRequest(f"{key} at {at} is {short(value)}: give {expected}")
            schemas += _inside(key, value, at)
            patterns = [value] if key == "pattern" else value if key == "patternProperties" else ()
            for pattern in patterns:
                if reason := _why_invalid(pattern):
                    raise InvalidRequest(
                        f"the pattern {pattern[:40]!a} at {at} is not a regular expression ({reason[:80]}): "
                        "correct it"
                    )


def _inside(key: str, value: Any, at: str) -> Iterator[tuple[Any, str]]:
    """The schemas in the value of a keyword, with their JSON pointers."""
    if key in _ONE or (key == "items" and not isinstance(value, list)):
        yield value, f"{at}/{key}"
    elif key in LISTED or key == "items":
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"{key} at {at} is {short(value)}: give a list of schemas")
        yield from ((one, f"{at}/{key}/{i}") for i, one in enumerate(value))
    elif key in _NAMED or key == "dependencies":
        if not isinstance(value, dict):
            raise InvalidRequest(f"{key} at {at} is {short(value)}: give a schema for each name")
        for name, one in value.items():
            if key != "dependencies" or not _is_strings(one):
                yield one, f"{at}/{key}/{step(name)}"


def _why_invalid(pattern: str) -> str | None:
    """Why a pattern is no regular expression (of ECMA-262), supported or not; None: it is one.

    What Python writes in another way is replaced first; Python then checks the rest, without matching.
    """
    if is_pattern(pattern):
        return None
    names = {match["name"] for match in _PARTS.finditer(pattern)}
    try:
        re.compile(_PARTS.sub(lambda part: _in_python(part, names), pattern))
    except re.error as error:
        return error.msg
    except OverflowError:  # a number of repetitions, which JavaScript does not limit
        return None
    except RecursionError:
        return "it is nested too deeply"
    return None


def _in_python(part: re.Match[str], names: set[str | None]) -> str:
    if part["behind"]:
        return f"(?{part['behind']}"  # Python has only those of one length
    if part["name"]:
        return "("
    if part["open"]:
        raise re.error("unterminated character set")
    if (members := part["set"]) is not None:
        _check_ranges(members)
        return "x"
    escape = part["escape"]
    if escape[0] == "k" and escape[2:-1] not in names:
        raise re.error(f"there is no group {escape[2:-1][:20]!a}")
    if escape[0] in "pP" and not is_pattern(part[0]):
        raise re.error(f"there is no property {part[0][:20]}")
    return "x" if len(escape) > 1 or escape.isdigit() else part[0]


def _check_ranges(members: str) -> None:
    found = _MEMBER.findall(members)
    for first, dash, last in zip(found, found[1:], found[2:], strict=False):
        if dash == "-" and len(first) == len(last) == 1 and first > last:
            raise re.error(f"bad character range {first}-{last}")
