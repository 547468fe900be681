"""From a JSON schema to a grammar: every text of the grammar is JSON, and valid under the schema.

What a grammar cannot hold an answer to is refused, never silently left out. Between two tokens of JSON there is one
space at most, or a line break and up to 20 spaces: so whitespace cannot go on for ever.

===========  ==============================================================================================================
objects      ``properties``, ``required``; the properties come in the order of the schema, without others (also where the
             schema allows more). Without properties: ``additionalProperties``, ``propertyNames``, ``maxProperties``, and
             ``minProperties`` of 1 at most, for a grammar cannot see to it that names differ.
arrays       ``items``, ``minItems``, ``maxItems``; or ``prefixItems``, all of them and no more.
strings      ``minLength``, ``maxLength``; ``format``: ``date``, ``time``, ``date-time``, ``uuid`` (others say nothing about
             validity, as the standard has it).
numbers      ``number`` and ``integer``, up to 16 digits before the point; ``minimum``, ``maximum``, ``exclusiveMinimum``,
             ``exclusiveMaximum``. An integer is never -0. A number with bounds has no exponent, and as many decimals as make 15
             digits of its longest bound: so many are apart also as floats.
any          ``enum``, ``const``, ``anyOf``, ``oneOf`` (read as ``anyOf``), ``allOf`` of one, ``type`` as a list,
             ``$ref`` into the schema itself, recursive or not. Nothing, or true: any JSON.
===========  ==============================================================================================================
"""

import functools
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from spec_local.errors import InvalidRequest
from spec_local.grammar import digits

_MOST_REPEATED = 2000  # as in llama.cpp
_NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions", "discriminator",
    "contentMediaType", "contentEncoding", "contentSchema",
}  # fmt: skip
_TYPES: dict[str, set[str]] = {  # and what may be asked of each
    "object": {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"format", "minLength", "maxLength"},
    "number": digits.BOUNDS,
    "integer": digits.BOUNDS,
    "boolean": set(),
    "null": set(),
}  # fmt: skip
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf")
_FORMATS = {"date": "date", "time": "time", "date-time": 'date "T" time', "uuid": "uuid"}
_RULES = r"""
ws ::= | " " | "\n" [ \t]{0,20}
value ::= object | array | string | number | boolean | null
object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
array ::= "[" ws (value ws ("," ws value ws)*)? "]"
string ::= "\"" char* "\""
char ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex | [dD] [0-7]) hex{2})
hex ::= [0-9a-fA-F]
whole ::= "0" | [1-9] [0-9]{0,15}
integer ::= "0" | "-"? [1-9] [0-9]{0,15}
number ::= "-"? whole ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
date ::= [0-9]{4} "-" ("02-" day | ("0" [469] | "11") "-" (day | "29" | "30") | ("0" [13578] | "1" [02]) "-" (day | "29" | "3" [01]))
day ::= "0" [1-9] | "1" [0-9] | "2" [0-8]
time ::= ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])
uuid ::= hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}
"""


@functools.lru_cache(maxsize=8)
def to_gbnf(schema: str) -> str:
    """The grammar of a schema, given as JSON.

    Raises:
        InvalidRequest: it is no JSON or no schema, or asks for what a grammar cannot promise.
    """
    try:
        return _Converter(json.loads(schema, parse_constant=_no_number)).gbnf()
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema is not JSON ({error}): mend it") from None
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply: give a flatter one") from None


class _Converter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # of rules, by $ref
        self._rules: list[str] = []

    def gbnf(self) -> str:
        root = self._any(self._root, "the JSON schema")
        return f"root ::= {root}\n" + "".join(self._rules) + _RULES.lstrip()

    def _any(self, schema: Any, where: str) -> str:
        """An expression of the grammar; `where` names the part of the schema."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{where} is {_short(schema)}: give an object")
        keys = schema.keys() - _NOTES
        if not keys:
            return "value"
        for choice in ("const", "enum"):
            if choice in keys:
                self._only(keys, {choice, "type"}, where)
                return self._values(schema, choice, where)
        for choice in _COMBINED:
            if choice in keys:
                self._only(keys, {choice}, where)
                return self._combined(choice, schema[choice], where)
        kind = schema.get(
            "type", "object" if "properties" in schema else "array" if "items" in schema else None
        )
        if isinstance(kind, list):
            self._only(keys, {"type"}.union(*map(_keywords, kind)), where)
            kinds = self._list(kind, f"type of {where}")
            return self._one_of([{"type": k} | _part(schema, keys & _keywords(k)) for k in kinds], where)
        if kind not in tuple(_TYPES):
            raise InvalidRequest(
                f"{where} has {'no type' if kind is None else f'type {_short(kind)}'}: give {', '.join(_TYPES)}"
            )
        self._only(keys, {"type"} | _keywords(kind), where)
        return str(getattr(self, f"_{kind}", self._plain)(schema, keys, where))

    def _plain(self, schema: Any, keys: set[str], where: str) -> str:
        return str(schema["type"])

    def _number(self, schema: Any, keys: set[str], where: str) -> str:
        bounds = _part(schema, keys & digits.BOUNDS)
        return digits.within(schema["type"], bounds, where) if bounds else str(schema["type"])

    _integer = _number

    def _string(self, schema: Any, keys: set[str], where: str) -> str:
        rule = _FORMATS.get(str(schema.get("format")))
        if rule:
            self._only(keys, {"type", "format"}, where)
            return rf'"\"" {rule} "\""'
        if not keys & {"minLength", "maxLength"}:
            return "string"
        return rf'"\"" char{_times(*self._bounds(schema, "Length", where))} "\""'

    def _array(self, schema: Any, keys: set[str], where: str) -> str:
        low, high = self._bounds(schema, "Items", where)
        if "prefixItems" in keys:
            parts = self._list(schema["prefixItems"], f"prefixItems of {where}")
            if len(parts) < low or (high is not None and len(parts) > high):
                raise InvalidRequest(
                    f"{where} has {len(parts)} prefixItems, which its minItems or maxItems forbid: mend it"
                )
            items = [self._any(part, f"prefixItems {i} of {where}") for i, part in enumerate(parts)]
            return '"[" ws ' + ' "," ws '.join(f"({item}) ws" for item in items) + ' "]"'
        item = self._any(schema.get("items", True), f"items of {where}")
        return f'"[" ws {self._listed(item, low, high)} "]"'

    def _object(self, schema: Any, keys: set[str], where: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise InvalidRequest(f"the properties of {where} are no object: give name and schema of each")
        names = list(properties)
        unknown = [n for n in self._list(required, f"required of {where}", least=0) if n not in names]
        if unknown:
            raise InvalidRequest(
                f"{where} requires {_short(unknown[0])}, which is none of its properties: add it there"
            )
        if not properties:
            return self._map(schema, where)
        self._only(keys, {"type", "properties", "required", "additionalProperties"}, where)
        pairs = [
            f'{_literal(name)} ws ":" ws ({self._any(part, f"property {_short(name)} of {where}")}) ws'
            for name, part in properties.items()
        ]
        return f'"{{" ws {self._in_order(pairs, [name in required for name in properties])} "}}"'

    def _map(self, schema: Any, where: str) -> str:
        low, high = self._bounds(schema, "Properties", where)
        if low > 1:
            raise InvalidRequest(
                f"{where} has {_short(low)} minProperties, but a grammar cannot see to it that names differ: give 1 at most"
            )
        values = schema.get("additionalProperties", "properties" not in schema)
        if values is False:
            if low:
                raise InvalidRequest(f"{where} has minProperties, but allows none: mend it")
            return '"{" ws "}"'
        key = self._key(schema.get("propertyNames", True), f"propertyNames of {where}")
        value = self._any(values, f"additionalProperties of {where}")
        pairs = self._listed(f'{key} ws ":" ws ({value})', low, high)
        return f'"{{" ws {pairs} "}}"'

    def _key(self, schema: Any, where: str) -> str:
        if schema is True:
            return "string"
        if isinstance(schema, dict) and "$ref" in schema:
            self._only(schema.keys() - _NOTES, {"$ref"}, where)
            schema = self._target(schema["$ref"], where)
        # Without a type, what is said of strings would be read as of anything, and what is no string is no name.
        if (
            not isinstance(schema, dict)
            or schema.get("type", "string") != "string"
            or schema.keys() & {*_COMBINED}
        ):
            raise InvalidRequest(f"the {where} are {_short(schema)}: give a string, an enum or a const")
        return self._any(schema | {"type": "string"}, where)

    def _listed(self, item: str, low: int, high: int | None) -> str:
        """Low to high of an item, with commas between."""
        if high == 0:
            return ""
        item = self._rule(f"({item}) ws")
        more = f'("," ws {item}){_times(max(low - 1, 0), None if high is None else high - 1)}'
        return f"{item} {more}" if low else f"({item} {more})?"

    def _in_order(self, pairs: Sequence[str], required: Sequence[bool]) -> str:
        """Pairs of an object in their order, those that are not required present or not."""
        # Two rules a pair: what may come from there on, as the first pair and after another one.
        first, later = '""', '""'
        for pair, needed in zip(reversed(pairs), reversed(required), strict=True):
            here = f"{self._rule(pair)} {later}"
            first = self._rule(here if needed else f"({here} | {first})")
            later = self._rule(f'"," ws {here}' if needed else f'("," ws {here} | {later})')
        return first

    def _combined(self, how: str, parts: Any, where: str) -> str:
        if how == "$ref":
            return self._reference(parts, where)
        parts = self._list(parts, f"{how} of {where}")
        if how == "allOf" and len(parts) > 1:
            raise InvalidRequest(
                f"{where} has an allOf of several parts, which a grammar cannot hold to: merge them"
            )
        return self._one_of(parts, where)

    def _one_of(self, parts: Sequence[Any], where: str) -> str:
        return (
            "(" + " | ".join(self._any(part, f"choice {i} of {where}") for i, part in enumerate(parts)) + ")"
        )

    def _values(self, schema: Any, choice: str, where: str) -> str:
        values = [schema["const"]] if choice == "const" else self._list(schema["enum"], f"enum of {where}")
        kinds = schema.get("type", list(_TYPES))
        fitting = [
            v for v in values if any(_is(v, k) for k in (kinds if isinstance(kinds, list) else [kinds]))
        ]
        if not fitting:
            raise InvalidRequest(f"no value of the {choice} of {where} is of its type: mend it")
        return "(" + " | ".join(map(_literal, fitting)) + ")"

    def _reference(self, ref: Any, where: str) -> str:
        target = self._target(ref, where)
        if ref not in self._names:
            self._names[ref] = name = f"ref-{len(self._names)}"
            self._rules.append(f"{name} ::= {self._any(target, str(ref))}\n")
        return self._names[ref]

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
                raise InvalidRequest(
                    f"{where} refers to {ref}, which is not there: mend the reference"
                ) from None
        return found

    def _rule(self, expression: str) -> str:
        """A name for an expression that stands in several places."""
        name = f"part-{len(self._rules)}"
        self._rules.append(f"{name} ::= {expression}\n")
        return name

    def _bounds(self, schema: Any, of: str, where: str) -> tuple[int, int | None]:
        low, high = schema.get(f"min{of}", 0), schema.get(f"max{of}")
        for bound in (low, 0 if high is None else high):
            if type(bound) is not int or not 0 <= bound <= _MOST_REPEATED:
                raise InvalidRequest(
                    f"min{of} or max{of} of {where} is {_short(bound)}: give 0 to {_MOST_REPEATED}"
                )
        if high is not None and high < low:
            raise InvalidRequest(f"max{of} of {where} is less than min{of}: mend it")
        return low, high

    def _list(self, value: Any, where: str, least: int = 1) -> list[Any]:
        if not isinstance(value, list) or len(value) < least:
            raise InvalidRequest(f"the {where} is {_short(value)}: give a list")
        return value

    def _only(self, keys: set[str], known: set[str], where: str) -> None:
        other = sorted(keys - known)
        if other:
            raise InvalidRequest(
                f"{where} has {_short(other[0])}, which a grammar cannot hold an answer to here: take it out and check it afterwards"
            )


def _part(schema: Any, keys: set[str]) -> Any:
    return {key: schema[key] for key in keys}


def _keywords(kind: Any) -> set[str]:
    return _TYPES.get(kind, set()) if isinstance(kind, str) else set()


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _literal(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return bool(kind == "boolean")
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "null": type(None),
    }  # fmt: skip
    return isinstance(kind, str) and isinstance(value, kinds.get(kind, ()))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
