"""The part of a JSON schema that can be enforced, for programs that send whatever their libraries write."""

import functools
import json
from typing import Any, NamedTuple

from spec_local.errors import InvalidRequest
from spec_local.grammar import json_schema, meta_schema
from spec_local.grammar.matcher import check_json_schema, is_pattern
from spec_local.grammar.subschemas import each_schema

_MAX_DROPPED = 100
"""Keywords that are left out; for each of them, the schema is read again."""


_LISTS = ("required", "enum", "properties", "items", "anyOf", "oneOf", "allOf", "additionalProperties")


class Usable(NamedTuple):
    """A schema that can be used, as JSON. warnings: a sentence for each keyword that it does not enforce."""

    schema: str
    warnings: tuple[str, ...] = ()


@functools.lru_cache(maxsize=64)
def usable(schema: str, field: str) -> Usable:
    """Leave out of a schema, which is given as JSON, what cannot be enforced.

    Args:
        field: of the request, for errors and warnings.

    Raises:
        InvalidRequest: it is not JSON or not a schema.
    """
    try:
        check_json_schema(schema)
        return Usable(schema)
    except InvalidRequest:
        pass
    try:
        root = json.loads(schema)
        _modernize(root)
        meta_schema.check(root)
        return _without_unsupported(root, field)
    except (InvalidRequest, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: {error}") from None


def _modernize(root: Any) -> None:
    """Rewrite what is no schema of today, but has one meaning: null in place of a missing list, as Go's
    programs write it, and the exclusive bounds of draft 4, which OpenAPI 3.0 has, too."""
    for _, schema in each_schema(root):
        for name in _LISTS:
            if name in schema and schema[name] is None:
                del schema[name]
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
                schema[exclusive] = schema.pop(bound)


def _without_unsupported(root: Any, field: str) -> Usable:
    warnings = _drop_patterns(root)
    while True:
        try:
            json_schema.strict_schema(root)
            break
        except json_schema.Unsupported as error:
            if len(warnings) >= _MAX_DROPPED:
                raise
            at = next(pointer for pointer, one in each_schema(root) if one is error.schema)
            value = error.schema.pop(error.keyword)
            if error.instead and error.instead not in error.schema:
                error.schema[error.instead] = value
                warnings.append(f"{error.keyword} at {at} is enforced as {error.instead} only")
            else:
                warnings.append(f"{error.keyword[:40]} at {at} is not supported and not enforced")
    usable_schema = json.dumps(root)
    check_json_schema(usable_schema)
    return Usable(usable_schema, tuple(f"{field}: {each}" for each in warnings))


def _drop_patterns(root: Any) -> list[str]:
    """Remove the patterns that are not supported, up to a limit, and return the warnings."""
    warnings = list[str]()
    for at, schema in each_schema(root):
        if len(warnings) >= _MAX_DROPPED:
            break
        pattern, names = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str) and not is_pattern(pattern):
            del schema["pattern"]
            warnings.append(f"the pattern {pattern[:40]!a} at {at} is not supported and not enforced")
        for name in [*names] if isinstance(names, dict) else ():
            if not is_pattern(name):
                del schema["patternProperties"][name]
                warnings.append(f"the pattern {name[:40]!a} at {at} is not supported: no name matches it")
    return warnings
