"""JSON schemas, made stricter for llguidance: every answer is valid under the original schema.

llguidance implements most of JSON Schema; other keywords are rejected, never silently ignored. So that small
models end their answers and common parsers accept them, some rules are stricter than the standard:

===========  ================================================================================================
whitespace   between two JSON tokens, at most one space, or a line break and up to 20 spaces
objects      only the properties in the schema, unless ``additionalProperties`` allows others
arrays       all ``prefixItems`` and no more items, unless ``items`` allows them
integers     within ±2**53, which all JSON parsers represent exactly
numbers      with bounds: up to 10 decimals and no exponent, so that parsed floats
             stay within exclusive bounds
strings      ``format``: ``date``, ``time``, ``date-time`` without leap days and leap seconds; formats that
             llguidance does not know are annotations, as in the standard
``oneOf``    read as ``anyOf``
===========  ================================================================================================

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

import functools
import json
import math
import re
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import unquote

from spec_local.errors import InvalidRequest

_OPTIONS = {
    "whitespace_pattern": r"[ ]|\n[ \t]{0,20}",
    "coerce_one_of": True,
    "json_allow_general_unicode_escapes": True,
}
_NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "discriminator", "contentMediaType", "contentEncoding", "contentSchema",
}  # fmt: skip
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_BY_TYPE = {  # keywords that imply the type where a schema leaves it out
    "object": {
        "properties", "required", "additionalProperties", "patternProperties",
        "propertyNames", "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"format", "pattern", "minLength", "maxLength"},
    "number": _BOUNDS | {"multipleOf"},
}  # fmt: skip
_COMBINED = {"$ref", "anyOf", "oneOf", "allOf"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # hold schemas by name
_KNOWN = {"type", "enum", "const"} | _COMBINED | _NAMED.union(*_BY_TYPE.values())
_DATE = (
    r"[0-9]{4}-(?:02-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[-+](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_KNOWN_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # to llguidance
_COUNTS = {f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties")}
_MAX_INTEGER = 2**53
_DIGITS = 15  # a float distinguishes all decimal numbers with this many digits
_MAX_DECIMALS = 10  # llguidance supports no finer multipleOf


@functools.lru_cache(maxsize=8)
def to_lark(schema: str) -> str:
    """Return a Lark grammar for the JSON that is valid under a schema, which is given as JSON.

    Raises:
        InvalidRequest: it is not JSON, not a schema, or has a keyword that is not supported.
    """
    try:
        strict = _Strict(json.loads(schema, parse_constant=_not_json)).schema()
        return f"start: %json {json.dumps(strict | {'x-guidance': _OPTIONS})}"
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not JSON ({error}): correct it") from None
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply: give a flatter one") from None


class _Strict:
    def __init__(self, root: Any) -> None:
        self._root = root

    def schema(self) -> dict[str, Any]:
        strict = self._schema({} if self._root is True else self._root, "the JSON schema")
        if strict is False:
            raise InvalidRequest("the JSON schema is false, so no answer is valid: give another one")
        return dict(strict)

    def _schema(self, schema: Any, where: str, *, part: bool = False) -> Any:
        """Return a schema that accepts no more than the original.

        Args:
            where: name of the schema in error messages.
            part: another schema applies to the same object, which may therefore have more properties.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{where} is {_short(schema)}: give an object")
        keys = schema.keys() - _NOTES
        _support(keys, _KNOWN, where)
        for key in keys & _COUNTS:
            if type(schema[key]) is not int or schema[key] < 0:
                raise InvalidRequest(f"{key} of {where} is {_short(schema[key])}: give 0 or more")
        parts = part or (bool(keys & _COMBINED) and len(keys - {"$defs", "definitions"}) > 1)
        strict = {key: self._value(key, schema[key], where, parts) for key in schema if key in keys}
        if not keys & {"type", "enum", "const"}:
            types = [name for name, keywords in _BY_TYPE.items() if keywords & keys]
            strict |= {"type": types[0]} if types else {}
        types = strict.get("type", [])
        types = types if isinstance(types, list) else [types]
        self._objects(strict, where, closed=not parts)
        if "prefixItems" in strict:
            n = len(strict["prefixItems"])
            strict = {"items": False, "minItems": min(n, strict.get("maxItems", n))} | strict
        if "number" in types or "integer" in types:
            _limit_numbers(strict, "number" in types, where)
        if "format" in strict:
            _limit_format(strict, where)
        return strict

    def _value(self, key: str, value: Any, where: str, parts: bool) -> Any:
        if key in _NAMED:
            if not isinstance(value, dict):
                raise InvalidRequest(f"{key} of {where} is {_short(value)}: give a schema for each name")
            kind = "property" if key == "properties" else key
            return {
                name: self._schema(one, f"{kind} {_short(name)} of {where}") for name, one in value.items()
            }
        if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if not isinstance(value, list) or not value:
                raise InvalidRequest(f"{key} of {where} is {_short(value)}: give a list of schemas")
            parts = key != "prefixItems" and (parts or (key == "allOf" and len(value) > 1))
            return [self._schema(one, f"{key} {i} of {where}", part=parts) for i, one in enumerate(value)]
        if key in ("items", "additionalProperties"):
            return self._schema(value, f"{key} of {where}")
        if key == "enum" and not isinstance(value, list):
            raise InvalidRequest(f"enum of {where} is {_short(value)}: give a list")
        if key == "$ref":
            self._target(value, where)
        return value

    def _objects(self, strict: dict[str, Any], where: str, *, closed: bool) -> None:
        if "propertyNames" in strict:
            _support(
                strict.keys() & _NAMED, {"$defs", "definitions"}, f'{where}, in addition to "propertyNames",'
            )
            pattern = self._pattern(strict.pop("propertyNames"), f"propertyNames of {where}")
            strict["patternProperties"] = {pattern: strict.get("additionalProperties", True)}
            strict["additionalProperties"] = False
        if closed and strict.keys() & {"properties", "patternProperties"}:
            strict.setdefault("additionalProperties", False)
        free = strict.get("patternProperties") or strict.get("additionalProperties", True) is not False
        if free and strict.get("minProperties", 0) not in (0, 1):
            raise InvalidRequest(
                f"{where} has minProperties above 1, but a name could repeat: give at most 1, or properties"
            )

    def _pattern(self, schema: Any, where: str) -> str:
        """Return a regular expression for the names that `propertyNames` allows."""
        for _ in range(100):  # references may form a cycle
            if isinstance(schema, dict) and schema.keys() - _NOTES == {"$ref"}:
                schema = self._target(schema["$ref"], where)
        if schema is True:
            return ""
        rule = {k: v for k, v in schema.items() if k not in _NOTES} if isinstance(schema, dict) else {}
        kind = rule.pop("type", "string")
        names = [rule["const"]] if "const" in rule else rule.get("enum", [])
        if kind != "string" or not rule or type(names) is not list or any(type(n) is not str for n in names):
            raise InvalidRequest(f"{where} is {_short(schema)}: give a string, an enum or a const")
        if "enum" in rule or "const" in rule:
            _support(rule.keys(), {"enum", "const"}, where)
            return f"^(?:{'|'.join(map(re.escape, names))})$"
        if len(rule) == 1 and ("pattern" in rule or str(rule.get("format")) in _FORMATS):
            return str(rule.get("pattern") or _FORMATS[rule["format"]])
        _support(rule.keys(), {"minLength", "maxLength"}, where)
        return f"^(?s:.){{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"

    def _target(self, ref: Any, where: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise InvalidRequest(
                f"{where} refers to {_short(ref)}: give a reference into the schema itself (#/...)"
            )
        found = self._root
        for step in unquote(ref).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise InvalidRequest(f"{where} refers to {ref}, which does not exist: correct it") from None
        return found


def _limit_numbers(strict: dict[str, Any], decimal: bool, where: str) -> None:
    for key in strict.keys() & _BOUNDS:
        if type(strict[key]) not in (int, float) or not math.isfinite(strict[key]):
            raise InvalidRequest(f"{key} of {where} is {_short(strict[key])}: give a number")
    if not decimal:
        for key, limit, stricter in (("minimum", -_MAX_INTEGER, max), ("maximum", _MAX_INTEGER, min)):
            strict[key] = stricter(strict.get(key, limit), limit)
    elif strict.keys() & _BOUNDS and "multipleOf" not in strict:
        before_point = max(len(str(int(abs(strict[key])))) for key in strict.keys() & _BOUNDS)
        strict["multipleOf"] = float(f"1e-{max(0, min(_MAX_DECIMALS, _DIGITS - before_point))}")


def _limit_format(strict: dict[str, Any], where: str) -> None:
    name = strict["format"]
    if not isinstance(name, str):
        raise InvalidRequest(f"format of {where} is {_short(name)}: give a string")
    if name in _FORMATS:
        if "pattern" in strict:
            raise InvalidRequest(f"{where} has a format and a pattern: give one of them")
        strict["pattern"] = _FORMATS[name]
    if name not in _KNOWN_FORMATS:
        del strict["format"]


def _support(keys: AbstractSet[str], known: AbstractSet[str], where: str) -> None:
    other = sorted(keys - known)
    if other:
        raise InvalidRequest(
            f"{where} has {_short(other[0])}, which is not supported: "
            "remove it and validate the output yourself"
        )


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
