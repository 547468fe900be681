"""References between the parts of a JSON schema, and whether parts of it exclude each other."""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from spec_local.errors import InvalidRequest

NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # hold schemas by name
LISTED = {"anyOf", "oneOf", "allOf", "prefixItems"}
SINGLE = {"items", "additionalItems", "additionalProperties", "propertyNames"}
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_MAX_COMPARISONS = 50_000
"""Comparisons of schemas and constants, about half a second, after which nothing excludes anything."""
_MAX_DEPTH = 50
TYPES = {"null", "boolean", "number", "integer", "string", "array", "object"}


class Subschemas:
    """The parts of a schema.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._comparisons = 0
        self._ids: dict[str, str] | None = None  # pointers to the schemas with an $id

    def pointer(self, reference: Any, where: str) -> str:
        """The JSON pointer to the target of a reference in the strict schema, where tuples have other names.

        Raises:
            InvalidRequest: see `target`.
        """
        return self._find(reference, where)[1]

    def target(self, reference: Any, where: str) -> Any:
        """Return the schema that a reference refers to: by a JSON pointer (RFC 6901), or the ``$id`` of it.

        Raises:
            InvalidRequest: the reference leads to no schema within the root.
        """
        return self._find(reference, where)[0]

    def _find(self, reference: Any, where: str) -> tuple[Any, str]:
        if isinstance(reference, str) and not reference.startswith("#"):
            if self._ids is None:
                self._ids = {
                    one["$id"]: pointer
                    for pointer, one in each_schema(self._root)
                    if isinstance(one.get("$id"), str)
                }
            reference = self._ids.get(reference, reference)
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise InvalidRequest(
                f"{where} refers to {reference!r:.60}: give a reference into the schema itself (#/...)"
            )
        wrong = InvalidRequest(f"{where} refers to {reference!r:.60}, which does not exist: correct it")
        pointer = re.fullmatch(r"#(?:[^%]|%[0-9A-Fa-f]{2})*", reference)
        if not pointer or re.search("~(?![01])", reference):
            raise InvalidRequest(
                f"{where} refers to {reference!r:.60}, which is not a JSON pointer: correct it"
            )
        try:
            steps = unquote_to_bytes(reference[1:]).decode().split("/")[1:]
        except UnicodeError:
            raise wrong from None
        found, kind, names = self._root, "schema", reference.split("/")
        for i, step in enumerate(steps, 1):
            step = step.replace("~1", "/").replace("~0", "~")
            if kind == "list" and isinstance(found, list):
                if not _INDEX.fullmatch(step) or int(step) >= len(found):
                    raise wrong
                found, kind = found[int(step)], "schema"
                continue
            if not isinstance(found, dict) or step not in found:
                raise wrong
            if kind == "schema":
                kinds = {"names": NAMED, "list": LISTED, "schema": SINGLE}
                kind = next((kind for kind, keywords in kinds.items() if step in keywords), "")
                if isinstance(found.get("items"), list) and step in ("items", "additionalItems"):
                    kind = "list" if step == "items" else "schema"
                    names[i] = "prefixItems" if step == "items" else "items"
            else:
                kind = "schema"
            found = found[step]
        if kind != "schema" or not isinstance(found, (dict, bool)):
            raise InvalidRequest(f"{where} refers to {reference!r:.60}, which is not a schema: correct it")
        return found, "/".join(names)

    def resolve(self, schema: Any, where: str) -> Any:
        """Follow the reference of a schema that has no other keyword than it, and annotations."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema or _constrains(schema):
                break
            schema = self.target(schema["$ref"], where)
        return schema

    def exclude(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Return whether no value is valid under both schemas; False if that is not obvious."""
        self._comparisons += 1
        if a is False or b is False:
            return True
        if depth > _MAX_DEPTH or self._comparisons > _MAX_COMPARISONS:
            return False
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            for choices in (one.get("anyOf"), one.get("oneOf")):
                if choices and all(self.exclude(choice, other, depth + 1) for choice in choices):
                    return True
            parts = [*one.get("allOf", ()), *([self.target(one["$ref"], "$ref")] if "$ref" in one else ())]
            if any(self.exclude(part, other, depth + 1) for part in parts):
                return True
            values = _values(one)
            self._comparisons += len(values or ())
            if values is not None and not {_type(value) for value in values} & _types(other):
                return True
        constants = [_values(one) for one in (a, b)]
        if constants[0] is not None and constants[1] is not None:
            return not {*map(_same, constants[0])} & {*map(_same, constants[1])}
        common = _types(a) & _types(b)
        if common != {"object"}:
            return not common
        required = {*a.get("required", ()), *b.get("required", ())}
        return any(self._names_exclude(a, b, name, depth) for name in required)

    def distinguishing_name(self, a: Any, b: Any) -> str | None:
        """A name with which no object is valid under both schemas; None also if other values could be."""
        for schema in (a, b):
            if not isinstance(schema, dict) or "properties" not in schema:
                return None
            if schema.keys() & {"type", "enum", "const"} and _types(schema) != {"object"}:
                return None
        names = a["properties"].keys() & b["properties"].keys()
        return next((name for name in sorted(names) if self._names_exclude(a, b, name, 0)), None)

    def _names_exclude(self, a: Any, b: Any, name: str, depth: int) -> bool:
        pair = [schema.get("properties", {}).get(name, True) for schema in (a, b)]
        return self.exclude(pair[0], pair[1], depth + 1)


def moved(schema: Any, root: str) -> Any:
    """The schema as a part of another one, in which its own root is at a JSON pointer."""
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: moved(one, root) for name, one in value.items()}
        elif isinstance(value, list) and key in LISTED | SINGLE:
            value = [moved(one, root) for one in value]
        elif key in SINGLE:
            value = moved(value, root)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            value = root + value[1:]
        found[key] = value
    return found


def each_schema(schema: Any, pointer: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema and all schemas in it, with their JSON pointers."""
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for key in [key for key in schema if key in NAMED | LISTED | SINGLE]:
        value, at = schema[key], f"{pointer}/{key}"
        if key in SINGLE and not isinstance(value, list):
            yield from each_schema(value, at)
        elif isinstance(value, dict | list):
            for name, one in value.items() if isinstance(value, dict) else enumerate(value):
                yield from each_schema(one, f"{at}/{step(str(name))}")


def step(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return quote(name.replace("~", "~0").replace("/", "~1"), errors="replace")


def check_references(root: dict[str, Any], named: list[tuple[dict[str, Any], str]]) -> None:
    """Check that a value under each schema can be complete.

    Args:
        root: the whole schema, of which each reference has a target.
        named: every schema in it that is an object, with its name in error messages.

    Raises:
        InvalidRequest: a schema applies itself to the same value, or all values under it are infinite.
    """
    subschemas = Subschemas(root)

    def applied(schema: dict[str, Any], where: str) -> list[Any]:
        """The schemas that a schema applies to the same value."""
        found = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
        return [*found, subschemas.target(schema["$ref"], where)] if "$ref" in schema else found

    done: dict[int, bool] = {}  # False: its search is not finished

    def visit(schema: Any, where: str) -> None:
        if not isinstance(schema, dict) or done.get(id(schema)):
            return
        if id(schema) in done:
            raise InvalidRequest(f"{where} refers to itself, without an array or object between: correct it")
        done[id(schema)] = False
        for one in applied(schema, where):
            visit(one, where)
        done[id(schema)] = True

    for schema, where in named:
        visit(schema, where)
    finite: set[int] = set()

    def is_finite(one: Any) -> bool:
        return isinstance(one, bool) or id(one) in finite

    def completes(schema: dict[str, Any], where: str) -> bool:
        for key in ("anyOf", "oneOf"):
            if key in schema and not any(map(is_finite, schema[key])):
                return False
        if not all(map(is_finite, schema.get("allOf", ()))):
            return False
        if "$ref" in schema and not is_finite(subschemas.target(schema["$ref"], where)):
            return False
        types = _types(schema)
        if _values(schema) is not None or types - {"array", "object"} or not types:
            return True
        required = [schema.get("properties", {}).get(n, True) for n in schema.get("required", ())]
        items = [*schema.get("prefixItems", ()), schema.get("items", True)][: schema.get("minItems", 0)]
        return ("object" in types and all(map(is_finite, required))) or (
            "array" in types and all(map(is_finite, items))
        )

    users: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for schema, where in named:
        inside = [one for key in NAMED & schema.keys() for one in schema[key].values()]
        inside += [one for key in LISTED & schema.keys() for one in schema[key]]
        inside += [schema[key] for key in SINGLE & schema.keys()]
        for one in [*inside, *applied(schema, where)]:
            users[id(one)].append((schema, where))
    unchecked = {id(schema): (schema, where) for schema, where in reversed(named)}
    while unchecked:
        _, (schema, where) = unchecked.popitem()  # the schemas inside another one come before it
        if completes(schema, where):
            finite.add(id(schema))
            unchecked |= {id(user[0]): user for user in users[id(schema)] if id(user[0]) not in finite}
    for schema, where in named:
        if id(schema) not in finite:
            raise InvalidRequest(f"every value of {where} is infinite, as it contains itself: correct it")


def _constrains(schema: dict[str, Any]) -> bool:
    others = schema.keys() - {"$ref", "title", "description", "default", "examples", "$comment", "deprecated"}
    return bool(others - {"$defs", "definitions"})


def _types(schema: dict[str, Any]) -> set[str]:
    values = _values(schema)
    if values is not None:
        return {_type(value) for value in values}
    given = schema.get("type", sorted(TYPES))
    types = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    return types | {"integer"} if "number" in types else types


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "integer" if value == int(value) else "number"
    return {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}[type(value)]


def _same(value: Any) -> Hashable:
    """A key that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((name, _same(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_same, value))
    return isinstance(value, bool), value
