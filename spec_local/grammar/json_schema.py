"""JSON schemas, made stricter for llguidance: every answer is valid under the original schema.

llguidance implements most of JSON Schema; other keywords are rejected, never silently ignored. So that small
models end their answers and common parsers accept them, some rules are stricter than the standard:

===========  ================================================================================================
whitespace   between two JSON tokens, at most one space, or a line break and up to 20 spaces
objects      only the properties in the schema, unless ``additionalProperties`` allows others; no name twice
arrays       all ``prefixItems`` and no more items, unless ``items`` allows them
integers     within ±2**53, which all JSON parsers represent exactly
numbers      within the range of floats; with bounds or ``multipleOf``: up to 9 decimals and no exponent, so
             that parsed floats stay within exclusive bounds
strings      ``format``: ``date``, ``time``, ``date-time`` without leap days and leap seconds; formats that
             the standard does not define are annotations
``oneOf``    only of schemas that obviously exclude each other, and of objects that a property tells apart,
             which is then required
===========  ================================================================================================

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

import functools
import json
import math
import re
from collections import defaultdict
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from llguidance import LLMatcher

from spec_local.errors import InvalidRequest
from spec_local.grammar.subschemas import LISTED, NAMED, Subschemas, check_references
from spec_local.system.deep_stack import call_with_stack

_OPTIONS = {
    "whitespace_pattern": r"[ ]|\n[ \t]{0,20}",
    "coerce_one_of": True,
    "json_allow_general_unicode_escapes": True,
}
_NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$comment", "discriminator", "contentMediaType", "contentEncoding", "contentSchema",
    "$id", "id", "$anchor", "nullable",
}  # fmt: skip
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LIMITS = _BOUNDS | {"multipleOf"}
_BY_TYPE = {  # keywords that imply the type where a schema leaves it out
    "object": {
        "properties", "required", "additionalProperties", "patternProperties",
        "propertyNames", "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "string": {"format", "pattern", "minLength", "maxLength"},
    "number": _LIMITS,
}  # fmt: skip
_COMBINED = {"$ref", "anyOf", "oneOf", "allOf"}
_KNOWN = {"type", "enum", "const"} | _COMBINED | NAMED.union(*_BY_TYPE.values())
_DATE = (  # without the year 0000
    r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:02-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[-+](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_HEX = "[0-9a-fA-F]"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_NAME_FORMATS = _FORMATS | {"uuid": f"^{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$"}
_KNOWN_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # to llguidance
_UNCHECKED_FORMATS = {  # of the standard
    "idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template", "json-pointer",
    "relative-json-pointer", "regex",
}  # fmt: skip
_COUNTS = {f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties")}
_MAX_BYTES = 1 << 20
_MAX_PARTS = 2000  # llguidance needs time and memory that grow with the square
_PARTS = "schemas, lists and names in required"
_MAX_CONSTANTS = 20_000
_MAX_PATTERNS = 50  # llguidance compares each pattern with each other one
_MAX_PATTERN_LENGTH = 20_000
_MAX_OPTIONAL = 100  # properties next to minProperties or maxProperties: one alternative for each
_MAX_INTEGER = 2**53
_DIGITS = 15  # a float distinguishes all decimal numbers with this many digits
_MAX_DECIMALS = 9  # of numbers with bounds: a common multiple of 10**-10 and 1 does not fit into 32 bits
_MAX_REMAINDERS = 100_000  # llguidance has a state for each
_MAX_FACTOR = 2**32 - 1  # llguidance computes common multiples with 32 bits


def to_lark(schema: str) -> str:
    """Return a Lark grammar for the JSON that is valid under a schema, which is given as JSON.

    Raises:
        InvalidRequest: see `strict`.
    """
    return f"start: %json {strict(schema)}"


class Unsupported(InvalidRequest):
    """A keyword that cannot be enforced.

    Attributes:
        schema: that has the keyword. keyword: its name. instead: a weaker keyword with the same value.
    """

    def __init__(self, message: str, schema: dict[str, Any], keyword: str, instead: str = "") -> None:
        super().__init__(message)
        self.schema, self.keyword, self.instead = schema, keyword, instead


@functools.lru_cache(maxsize=64)
def strict(schema: str) -> str:
    """Return the stricter schema for llguidance, as JSON.

    Raises:
        InvalidRequest: it is not JSON, not a schema, or has a keyword that is not supported.
    """
    try:
        if len(schema.encode()) > _MAX_BYTES:
            raise InvalidRequest(f"the JSON schema has more than {_MAX_BYTES} bytes: give a smaller one")
        loaded = json.loads(schema, parse_constant=_not_json)
        json.dumps(loaded, ensure_ascii=False).encode()
        return json.dumps(strict_schema(loaded) | {"x-guidance": _OPTIONS})
    except InvalidRequest:
        raise
    except UnicodeEncodeError:
        raise InvalidRequest("the JSON schema has half of a surrogate pair (\\ud800 …): correct it") from None
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not JSON ({error}): correct it") from None
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply: give a flatter one") from None


def strict_schema(schema: Any) -> dict[str, Any]:
    """The stricter schema, without llguidance's options.

    Raises:
        Unsupported: it has a keyword that cannot be enforced; the error names the one found first.
        InvalidRequest: it is not a schema, or cannot be used.
    """
    return _Strict(schema).schema()


class _Strict:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._subschemas = Subschemas(root)
        self._found: list[tuple[dict[str, Any], str]] = []  # strict schemas, and their names
        self._one_of: list[tuple[dict[str, Any], list[Any], str]] = []  # schemas, and their strict choices
        self._combines = False  # two schemas apply to one value
        self._sizes: dict[str, int] = defaultdict(int)

    def schema(self) -> dict[str, Any]:
        strict = self._schema({} if self._root is True else self._root, "the JSON schema")
        if strict is False:
            raise InvalidRequest("the JSON schema is false, so no answer is valid: give another one")
        for original, choices, where in self._one_of:
            self._require_distinction(original, choices, where)
        self._check_multiples()
        check_references(strict, self._found)
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
            raise InvalidRequest(f"{where} is {short(schema)}: give an object")
        if "$id" in schema and schema is not self._root and '"$ref"' in json.dumps(schema):
            raise Unsupported(
                f"references in {where} begin at its $id: give schemas without $id", schema, "$id"
            )
        keys = {key for key in schema.keys() - _NOTES if not key.startswith("x-")}
        if unknown := sorted(keys - _KNOWN):
            raise _unsupported(schema, unknown[0], where)
        self._count(_PARTS, 1, _MAX_PARTS)
        for key in keys & _COUNTS:
            count = schema[key]
            if type(count) not in (int, float) or count < 0 or not _is_finite(count) or count != int(count):
                raise InvalidRequest(f"{key} of {where} is {short(count)}: give 0 or more")
        for key in keys & _LIMITS:
            self._number(schema, key, where)
        parts = part or (bool(keys & _COMBINED) and len(keys - {"$defs", "definitions"}) > 1)
        self._combines |= parts or keys >= {"properties", "patternProperties"}
        strict = {key: self._value(schema, key, where, parts) for key in schema if key in keys}
        if isinstance(strict.get("items"), list):  # before 2020-12
            strict["prefixItems"] = strict.pop("items")
            strict |= {"items": strict["additionalItems"]} if "additionalItems" in strict else {}
        strict.pop("additionalItems", None)
        if not keys & {"type", "enum", "const"}:
            types = [name for name, keywords in _BY_TYPE.items() if keywords & keys]
            strict |= {"type": types[0]} if types else {}
        types = strict.get("type", [])
        types = types if isinstance(types, list) else [types]
        self._objects(schema, strict, where, closed=not parts)
        if "prefixItems" in strict:
            n = len(strict["prefixItems"])
            strict = {"items": False, "minItems": min(n, strict.get("maxItems", n))} | strict
        if "number" in types or "integer" in types:
            _limit_numbers(strict, "number" in types, where)
        if "format" in strict:
            self._format(schema, strict, where)
        self._found.append((strict, where))
        return strict

    def _value(self, schema: dict[str, Any], key: str, where: str, parts: bool) -> Any:
        value = schema[key]
        if key in NAMED:
            if not isinstance(value, dict):
                raise InvalidRequest(f"{key} of {where} is {short(value)}: give a schema for each name")
            kind = "property" if key == "properties" else key
            if key == "patternProperties":
                for pattern in value:
                    _check_end(pattern, where)
                self._count("patterns in patternProperties", len(value), _MAX_PATTERNS)
                self._count("characters in patterns", sum(map(len, value)), _MAX_PATTERN_LENGTH)
            if key == "properties":
                for name in value:
                    _check_name(name, where)
            return {
                name: self._schema(one, f"{kind} {short(name)} of {where}") for name, one in value.items()
            }
        if key in LISTED or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                raise InvalidRequest(f"{key} of {where} is {short(value)}: give a list of schemas")
            parts = key not in ("prefixItems", "items") and (parts or (key == "allOf" and len(value) > 1))
            found = [self._schema(one, f"{key} {i} of {where}", part=parts) for i, one in enumerate(value)]
            if key == "oneOf":
                self._one_of.append((schema, found, where))
            return found
        if key in ("items", "additionalItems", "additionalProperties"):
            return self._schema(value, f"{key} of {where}")
        if key in _COUNTS:
            return int(value)
        if key in ("enum", "required") and not isinstance(value, list):
            raise InvalidRequest(f"{key} of {where} is {short(value)}: give a list")
        if key == "required":
            self._count(_PARTS, len(value), _MAX_PARTS)
            for name in value:
                _check_name(name, where)
        if key in ("enum", "const"):
            self._constant(value, f"{key} of {where}")
        if key == "pattern":
            if not isinstance(value, str):
                raise InvalidRequest(f"pattern of {where} is {short(value)}: give a regular expression")
            _check_end(value, where)
            self._count("characters in patterns", len(value), _MAX_PATTERN_LENGTH)
        if key == "$ref":
            return self._subschemas.pointer(value, where)
        return value

    def _objects(self, schema: dict[str, Any], strict: dict[str, Any], where: str, *, closed: bool) -> None:
        if "propertyNames" in strict:
            names = self._subschemas.resolve(strict.pop("propertyNames"), f"propertyNames of {where}")
            if not _is_any_name(names):
                self._limit_names(schema, strict, names, where, closed=closed)
        if closed and strict.keys() & {"properties", "patternProperties"}:
            if strict.keys().isdisjoint({"additionalProperties", "patternProperties"}):
                known = strict["properties"]
                others = [name for name in strict.get("required", ()) if name not in known]
                strict["properties"] = known | dict.fromkeys(others, True)
            strict.setdefault("additionalProperties", False)
        optional = strict.get("properties", {}).keys() - strict.get("required", ())
        if strict.keys() & {"minProperties", "maxProperties"} and len(optional) > _MAX_OPTIONAL:
            raise InvalidRequest(
                f"{where} has minProperties or maxProperties, and more than {_MAX_OPTIONAL} optional "
                "properties: remove minProperties and maxProperties"
            )
        if strict.get("patternProperties") and strict.get("minProperties", 0) > 1:
            raise InvalidRequest(
                f"{where} limits names and has minProperties above 1, but there may be too few names: "
                "give at most 1"
            )

    def _limit_names(
        self, schema: dict[str, Any], strict: dict[str, Any], names: Any, where: str, *, closed: bool
    ) -> None:
        """Enforce `propertyNames`: other properties have its names, or match their pattern."""
        if "patternProperties" in strict:
            raise _unsupported(schema, "propertyNames", f'{where}, in addition to "patternProperties",')
        pattern = self._pattern(names, schema, f"propertyNames of {where}")
        known = {
            name: one if pattern is not None and _matches(pattern, name) else False
            for name, one in strict.get("properties", {}).items()
        }
        others = strict.get("additionalProperties", not (known and closed))
        strict["additionalProperties"] = False
        listed = _listed_names(names) if isinstance(names, dict) else None
        if others is False:
            strict["properties"] = known
        elif listed is not None and (known or strict.get("required")):
            for name in listed:
                _check_name(name, where)
            strict["properties"] = known | {name: others for name in listed if name not in known}
        elif not known or others in (True, {}):
            strict["patternProperties"] = {} if pattern is None else {pattern: others}
            strict |= {"properties": known} if known else {}
            self._combines |= bool(known)
        else:  # the known names that match the pattern would need to fit both
            raise _unsupported(
                schema, "propertyNames", f'{where}, in addition to "properties" and "additionalProperties",'
            )

    def _pattern(self, names: Any, schema: dict[str, Any], where: str) -> str | None:
        """Return a regular expression for the names that `propertyNames` allows; None: there are none."""
        names = self._subschemas.resolve(names, where)
        if names is False:
            return None
        if _is_any_name(names):
            return ""
        rule = {k: v for k, v in names.items() if k not in _NOTES} if isinstance(names, dict) else {}
        for key in ("anyOf", "oneOf"):
            if rule.keys() - {"type"} == {key} and isinstance(rule[key], list):
                found = [self._pattern(one, schema, where) for one in rule[key]]
                return "|".join(f"(?:{one})" for one in found if one is not None) or None
        if (listed := _listed_names(rule)) is not None:
            return f"^(?:{'|'.join(map(re.escape, listed))})$" if listed else None
        wrong = Unsupported(
            f"{where} is {short(names)}: give a string, an enum or a const", schema, "propertyNames"
        )
        if rule.pop("type", "string") != "string":
            raise wrong
        if len(rule) == 1 and ("pattern" in rule or str(rule.get("format")) in _NAME_FORMATS):
            return str(rule.get("pattern") or _NAME_FORMATS[rule["format"]])
        if not rule or rule.keys() - {"minLength", "maxLength"}:
            raise wrong
        least, most = (int(rule[key]) if key in rule else "" for key in ("minLength", "maxLength"))
        return f"^(?s:.){{{least or 0},{most}}}$"

    def _number(self, schema: dict[str, Any], key: str, where: str) -> None:
        limit = schema[key]
        if type(limit) not in (int, float) or not _is_finite(limit) or (key == "multipleOf" and limit <= 0):
            expected = "a positive number" if key == "multipleOf" else "a number"
            raise InvalidRequest(f"{key} of {where} is {short(limit)}: give {expected}")
        if key == "multipleOf":
            factor = Decimal(str(limit)).normalize()
            decimals = max(0, -int(factor.as_tuple().exponent))
            if decimals > _MAX_DECIMALS:
                raise Unsupported(
                    f"multipleOf of {where} is {limit}: give at most {_MAX_DECIMALS} decimals",
                    schema,
                    "multipleOf",
                )
            self._count("remainders of multipleOf", int(factor.scaleb(decimals)), _MAX_REMAINDERS)

    def _format(self, schema: dict[str, Any], strict: dict[str, Any], where: str) -> None:
        name = strict["format"]
        if not isinstance(name, str):
            raise InvalidRequest(f"format of {where} is {short(name)}: give a string")
        if name in _UNCHECKED_FORMATS:
            raise Unsupported(
                f'{where} has the format "{name}", which is not supported: '
                "remove it and validate the output yourself",
                schema,
                "format",
            )
        if name in _FORMATS:
            if "pattern" in strict:
                part = {"type": "string", "pattern": _FORMATS[name]}
                strict["allOf"] = [*strict.get("allOf", ()), part]
                self._found.append((part, where))
            else:
                strict["pattern"] = _FORMATS[name]
        if name not in _KNOWN_FORMATS:
            del strict["format"]

    def _constant(self, value: Any, where: str) -> None:
        self._count("constants", 1, _MAX_CONSTANTS)
        if isinstance(value, dict):
            for name in value:
                _check_name(name, where)
        if isinstance(value, (dict, list)):
            self._count(_PARTS, 1, _MAX_PARTS)
            for one in value.values() if isinstance(value, dict) else value:
                self._constant(one, where)
        elif isinstance(value, (int, float)) and not (_is_finite(value) and abs(value) <= _MAX_INTEGER):
            raise InvalidRequest(f"{where} has the number {short(value)}: give one within ±2**53")

    def _count(self, of: str, n: int, most: int) -> None:
        """Bound the time that a schema takes, by the number of parts of one kind."""
        self._sizes[of] += n
        if self._sizes[of] > most:
            raise InvalidRequest(f"the JSON schema has more than {most} {of}: give a smaller one")

    def _require_distinction(self, one_of: dict[str, Any], choices: list[Any], where: str) -> None:
        """Let no value be valid under two choices of a `oneOf`, by requiring what tells objects apart."""
        resolved = [self._subschemas.resolve(choice, where) for choice in one_of["oneOf"]]
        required: list[dict[str, None]] = [{} for _ in choices]
        for j, second in enumerate(resolved):
            for i, first in enumerate(resolved[:j]):
                if self._subschemas.exclude(first, second):
                    continue
                name = self._subschemas.distinguishing_name(first, second)
                if name is None:
                    raise Unsupported(
                        f"choices {i} and {j} in oneOf of {where} may both be valid: give anyOf, "
                        "or a property with a different const in each",
                        one_of,
                        "oneOf",
                        instead="anyOf",
                    )
                required[i][name] = required[j][name] = None
        for i, names in enumerate(required):
            if names:
                schema = resolved[i] | {"required": [*resolved[i].get("required", ()), *names]}
                choices[i] = self._schema(schema, f"oneOf {i} of {where}")

    def _check_multiples(self) -> None:
        """Reject factors of which llguidance would compute a wrong common multiple."""
        factors = {Decimal(str(s["multipleOf"])).normalize() for s, _ in self._found if "multipleOf" in s}
        decimals = max((-int(factor.as_tuple().exponent) for factor in factors), default=0)
        product = math.prod(int(factor.scaleb(max(decimals, 0))) for factor in factors)
        if self._combines and product > _MAX_FACTOR:
            raise InvalidRequest(
                "the JSON schema combines schemas (allOf, or $ref or anyOf with other keywords), and the "
                "factors in multipleOf, or the bounds, have too many digits for that: remove multipleOf"
            )


def _limit_numbers(strict: dict[str, Any], decimal: bool, where: str) -> None:
    limit = _MAX_INTEGER
    if "multipleOf" in strict:
        decimals = max(0, -int(Decimal(str(strict["multipleOf"])).normalize().as_tuple().exponent))
        limit = min(limit, 10 ** (_DIGITS - decimals))
    if not decimal or "multipleOf" in strict:
        for key, end, stricter in (("minimum", -limit, max), ("maximum", limit, min)):
            strict[key] = stricter(strict.get(key, end), end)
    elif strict.keys() & _BOUNDS:
        before_point = max(len(str(int(abs(strict[key])))) for key in strict.keys() & _BOUNDS)
        strict["multipleOf"] = float(f"1e-{max(0, min(_MAX_DECIMALS, _DIGITS - before_point))}")
    if decimal and "multipleOf" in strict:
        _include_bounds(strict, Decimal(str(strict["multipleOf"])))


def _include_bounds(strict: dict[str, Any], factor: Decimal) -> None:
    """Replace exclusive bounds by the nearest multiples of a factor that they allow.

    llguidance allows an exclusive bound itself if it is an integer and the other bound less than 1 away.
    """
    for key, step, stricter in (("minimum", 1, max), ("maximum", -1, min)):
        bound = strict.pop("exclusive" + key.capitalize(), None)
        if bound is not None:
            exact = Decimal(str(bound)) / factor
            nearest = exact.to_integral_value(ROUND_FLOOR if step > 0 else ROUND_CEILING) + step
            included = float(nearest * factor)
            strict[key] = stricter(strict.get(key, included), included)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond the floats
        return False


def _check_name(name: Any, where: str) -> None:
    """Reject names that `spec_local.grammar.json_text` does not allow."""
    if not isinstance(name, str) or "\\u" in json.dumps(name, ensure_ascii=False).replace("\\\\", ""):
        raise InvalidRequest(f"{where} has the name {short(name)}: give a string without control characters")


def _check_end(pattern: str, where: str) -> None:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance ignores it
        raise InvalidRequest(f"a pattern of {where} ends with a backslash: correct it")


def _is_any_name(names: Any) -> bool:
    """Return whether `propertyNames` allows all names."""
    return names is True or (
        isinstance(names, dict)
        and names.keys() - _NOTES <= {"type"}
        and names.get("type", "string") == "string"
    )


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a client's pattern, for which Python's `re` can take years."""
    both = {"allOf": [{"type": "string", "pattern": pattern}, {"const": name}]}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(both))
    return not call_with_stack(64 << 20, lambda: LLMatcher.validate_grammar(grammar))


def _listed_names(names: dict[str, Any]) -> list[str] | None:
    """The names in an enum or a const for names; None: there is none."""
    if names.keys() - _NOTES - {"type", "enum", "const"} or names.get("type", "string") != "string":
        return None
    listed = [names["const"]] if "const" in names else names.get("enum")
    return listed if isinstance(listed, list) and all(isinstance(name, str) for name in listed) else None


def _unsupported(schema: dict[str, Any], keyword: str, where: str) -> Unsupported:
    return Unsupported(
        f"{where} has {short(keyword)}, which is not supported: remove it and validate the output yourself",
        schema,
        keyword,
    )


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def short(value: Any) -> str:
    """A value as JSON, for errors."""
    text = json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
