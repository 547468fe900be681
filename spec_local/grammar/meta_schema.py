"""Whether a JSON schema is valid itself, also where it has keywords that cannot be enforced."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from spec_local.errors import InvalidRequest
from spec_local.grammar.json_schema import short
from spec_local.grammar.pattern_syntax import why_invalid
from spec_local.grammar.subschemas import LISTED, NAMED, SINGLE, TYPES, step

_ONE = {
    *(SINGLE - {"items"}),
    *("not", "if", "then", "else", "contains", "unevaluatedItems", "unevaluatedProperties"),
}
_NAMED = {*NAMED, "dependentSchemas"}
_MAX_SCHEMAS = 10_000


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
                if reason := why_invalid(pattern):
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
