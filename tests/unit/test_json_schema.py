"""JSON schemas as constraints: which answers they accept, and which schemas are refused."""

import contextlib
import datetime
import enum
import json
import operator
import random
import re
import time
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import Field

from spec_local.errors import InvalidRequest
from spec_local.grammar.matcher import Grammar, check_json_schema
from spec_local.settings import GenerationSettings
from tests.byte_vocabulary import VOCABULARY, accepts, after, sample


def grammar(schema):
    return Grammar.from_json_schema(VOCABULARY, json.dumps(schema))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 'q"\n']}, "minItems": 1, "maxItems": 2},
    },
    "required": ["age"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": ["number", "null"]}, "below": {"items": {"$ref": "#/$defs/node"}}},
            "required": ["v", "below"],
        }
    },
}
SCHEMAS = {
    "any": (True,
        ["{}", "[1, -2.5e+3, true, null]", '"é🙂\\n\\u00e9"', '{ "a":\n   {"b": []}}'],
        ["", "[", "01", "+1", ".5", '"\n"', '"\\ud800"', "nul", "1 ", "[1,]", '{"a"}', '{"a":  1}']),
    "object": (PERSON,
        ['{"age":1}', '{"name": "abc", "age": -3, "tags": ["a", "q\\"\\n"]}', '{"age": 0, "tags":["a"]}'],
        ["{}", '{"name":"a"}', '{"age":"1"}', '{"age":1.5}', '{"name":"","age":1}',
         '{"name":"abcd","age":1}', '{"age":1,"name":"a"}', '{"age":1,"tags":[]}', '{"age":1,"tags":["b"]}',
         '{"age":1,"tags":["a","a","a"]}', '{"age":1,"x":1}', '{"age":1,}', '{"name":"a" "age":1}']),
    "recursive": (TREE,
        ['{"v":1,"below":[]}', '{"v":null,"below":[{"v":2.5,"below":[]},{"v":3,"below":[]}]}'],
        ['{"v":1}', '{"v":1,"below":[1]}', '{"v":"x","below":[]}']),
    "all optional": ({"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}},
        ["{}", '{"a":null}', '{"b":true}', '{"a":null,"b":false}'],
        ['{"b":true,"a":null}', '{,"b":true}', "[]"]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}},
        ["{}", '{"x":1, "y":2}'], ['{"x":"1"}']),
    "closed": ({"type": "object", "additionalProperties": False}, ["{}"], ['{"x":1}']),
    "tuple": ({"type": "array", "prefixItems": [{"type": "number"}, {"const": {"u": "m"}}]},
        ['[1.5, {"u": "m"}]'], ["[1.5]", '[1.5, {"u": "k"}]', '[1.5, {"u": "m"}, 1]']),
    "none": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "enum of a type": ({"type": "integer", "enum": [1, "1", True, None, 2]},
        ["1", "2"], ['"1"', "true", "null"]),
    "range": ({"type": "integer", "minimum": -12, "exclusiveMaximum": 105},
        ["-12", "-9", "0", "7", "42", "99", "100", "104"],
        ["-13", "00", "105", "200", "1000", "1.0", "1e1", "-", ""]),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [str(-(2**53)), "-1", "0", str(2**53)],
        [str(-(2**53) - 1), str(2**53 + 1), str(2**63), "1" + "0" * 20]),
    "share": ({"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        ["0", "0.0", "0.5", "0." + "9" * 9], ["1", "1.0", "-0.5", "0.", "0." + "9" * 10, "5e-1"]),
    "positive": ({"type": ["number", "null"], "exclusiveMinimum": 0.25},
        ["null", "0.250001", "0.3", "1", "9" * 16], ["0.25", "0.250", "0.2", "0", "-1"]),
    "zero": ({"type": "integer"}, ["0", "10", "-1"], ["01", "-01", str(2**53 + 1)]),
    "keys": ({"type": "object", "propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["a", "b"]}},
     "maxProperties": 2, "minProperties": 1, "additionalProperties": {"type": "integer", "minimum": 5}},
        ['{"a":5}', '{"a":5, "b":61}'],
        ["{}", '{"c":5}', '{"a":4}', '{"a":5,"b":5,"a":5}', "{5:5}"]),
    "names of properties": ({"properties": {"a": {"const": 1}, "bc": {"const": 2}}, "required": ["a"],
     "propertyNames": {"maxLength": 1}},
        ['{"a":1}'], ["{}", '{"a":1,"bc":2}', '{"a":1,"d":2}', '{"a":2}']),
    "names of all properties": ({"properties": {"a": {"const": 1}, "bc": {"const": 2}},
     "propertyNames": {"maxLength": 1}, "additionalProperties": {}},
        ["{}", '{"a":1}', '{"a":1,"d":[2]}', '{"d":2}'],
        ['{"bc":2}', '{"bc":3}', '{"a":2}', '{"a":1,"de":2}', '{"d":1,"d":2}']),
    "listed names of properties": ({"properties": {"a": {"const": 1}, "b": {"const": 2}},
     "propertyNames": {"enum": ["a", "c"]}, "additionalProperties": {"const": 3}},
        ["{}", '{"a":1}', '{"a":1,"c":3}', '{"c":3}'], ['{"b":2}', '{"b":3}', '{"a":3}', '{"a":1,"c":1}']),
    "date": ({"type": "string", "format": "date"},
        ['"2024-12-31"', '"2023-02-28"', '"2023-04-30"', '"2023-10-01"'],
        ['"2023-02-29"', '"2023-04-31"', '"2023-13-01"', '"2023-00-10"', '"2023-01-00"', '"23-01-01"',
         "2023-01-01"]),
    "date-time": ({"type": "string", "format": "date-time"},
        ['"2024-12-31T23:59:59Z"', '"2024-01-01T00:00:00.5+02:00"'],
        ['"2024-12-31"', '"2024-12-31T24:00:00Z"', '"2024-12-31T23:59:59"']),
    "uuid": ({"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    "email": ({"type": "string", "format": "email"}, ['"ann@example.com"'], ['"whatever"', "1"]),
    "annotation": ({"type": "string", "format": "password"}, ['"whatever"'], ["1"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
        ['"AB-12"'], ['"AB-"', '"xAB-12"', '"AB-1x"']),
    "pattern anywhere": ({"pattern": "a+b", "maxLength": 4}, ['"ab"', '"xaab"'], ['"ba"', '"xaabx"', "1"]),
    "multiple": ({"type": "integer", "multipleOf": 5, "minimum": 0},
        ["0", "5", "15", "100"], ["-5", "4", "12"]),
    "cents": ({"type": "number", "multipleOf": 0.01}, ["0", "1.25", "-3.1"], ["1.255"]),
    "merged": ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
     {"$ref": "#/$defs/b"}], "$defs": {"b": {"properties": {"b": {"type": "null"}},
     "additionalProperties": True, "required": ["b"]}}},
        ['{"a":1,"b":null}'],
        ['{"a":1}', '{"a":1,"b":2}']),
    "names": ({"type": "object", "patternProperties": {"^x_": {"type": "integer"}}},
        ['{"x_a":1}', "{}"], ['{"y":1}', '{"x_a":"1"}']),
    "at least": ({"properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 1},
        ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'], ["{}"]),
    "escaped pointer": ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, ["null"], ["1"]),
    "names of rules": ({"properties": {"root": {"type": "null"}, "ref-0": {"type": "null"},
     "a b": {"type": "null"}, "a-b": {"type": "boolean"}, '"\\': {"type": "null"}}, "required": ["a-b"]},
        ['{"root":null,"ref-0":null,"a b":null,"a-b":true,"\\"\\\\":null}'],
        ['{"a-b":null}', "{}"]),
    "finite numbers": ({"items": {"type": "number"}},
        ["[1.7e308, -1E+308, 1e-320]", f"[{'9' * 308}]", "[-0, -0.0e00, 12.50]"],
        ["[1.8e308]", "[1e309]", "[-12e308]", "[1e0001]", f"[{'9' * 309}]", f"[{'9' * 309}.5]"]),
    "different names": ({},
        ['{"a":1, "b":{"a":1}, "c":[{"a":1},{"a":2}]}', '{"":0, "\\\\":1, "\\"":2, "a\\n":"a"}'],
        ['{"a":1, "a":1}', '{"a":1, "b":{}, "a":1}', '{"\\u0061":1}', '[{"":[], "b":"}", "":[]}]']),
    "other names": ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
        ['{"a":1, "b":true}', '{"b":true, "c":false}'],
        ['{"a":true}', '{"\\u0061":true}', '{"b":true, "b":true}']),
    "few names": ({"patternProperties": {"^[ab]c?$": {"type": "null"}}},
        ['{"a":null,"ac":null,"bc":null,"b":null}'],
        ['{"a":null,"a":null}', '{"a":null,"ac":null,"bc":null,"b":null,"b":null}']),
    "told apart": ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
     "a": {"properties": {"k": {"const": "a"}, "x": {"type": "null"}}, "required": ["x"]},
     "b": {"properties": {"k": {"enum": ["b", "c"]}, "x": {"type": "null"}}}}},
        ['{"k":"a","x":null}', '{"k":"c"}'], ['{"x":null}', "{}", '{"k":"b","x":1}']),
    "numbers told apart": ({"oneOf": [{"const": 1}, {"enum": [2, True, "1"]}, {"type": "array"}]},
        ["1", "2", "true", '"1"', "[1]"], ["3", "null"]),
    "years": ({"format": "date"}, ['"0001-01-01"', '"2000-12-31"'], ['"0000-01-01"']),
    "one of": ({"oneOf": [{"type": "string"}, {"allOf": [{"type": "null"}]}]}, ['"a"', "null"], ["1"]),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_answers_that_are_valid_under_a_schema_are_accepted_and_no_others(schema, valid, invalid):
    accepting = grammar(schema)
    for text in valid:
        json.loads(text)
    assert [text for text in valid + invalid if accepts(accepting, text)] == valid


COMPARE = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
NUMBER = st.integers(-1200, 1200) | st.integers(-(2**53), 2**53) | st.decimals(-100, 100, places=2).map(float)


@settings(max_examples=30)
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(st.sampled_from(list(COMPARE)), NUMBER, min_size=1),
    st.lists(
        st.tuples(st.sampled_from(range(4)), st.integers(-2, 2), st.integers(0, 12)), min_size=5, max_size=5
    ),
    NUMBER,
)
def test_numbers_stay_within_their_bounds(kind, bounds, beside, number):
    """Also when they are read as floats, and in the last decimal."""
    try:
        accepting = grammar({"type": kind} | bounds)
    except InvalidRequest:
        assume(False)  # there are none
    for which, steps, decimals in [*beside, (0, 0, 0)]:
        bound = [*bounds.values(), number][which % (len(bounds) + 1)]
        value = Decimal(str(bound)) + steps * Decimal(1).scaleb(-decimals)
        text = f"{value:f}"
        inside = all(
            COMPARE[key](value, Decimal(str(b))) and COMPARE[key](float(text), float(b))
            for key, b in bounds.items()
        )
        if kind == "integer" and value % 1 == 0 and "." not in text and abs(value) <= 2**53:
            assert accepts(accepting, text) == inside, text
        elif accepts(accepting, text):
            assert inside, text
            assert kind == "number"


def test_whitespace_is_limited():
    anything = grammar({})
    for text in ("{" + " " * 2, "{\n" + " " * 21, "{\n\n", " {"):
        assert after(anything, text) is None
    assert after(anything, "{\n" + " " * 20) is not None


REFUSED = {
    "not JSON": ("{", "is not JSON"),
    "NaN": ('{"const": NaN}', "NaN"),
    "not an object": ("3", "is 3: give an object"),
    "unknown type": ('{"type": "text"}', "Invalid type: text"),
    "infinite bound": ('{"type": "integer", "minimum": 1e999}',
        "minimum of the JSON schema is Infinity: give a number"),
    "nested keyword": ('{"items": {"properties": {"a": {"uniqueItems": true}}}}', 'property "a" of items'),
    "remote": ('{"$ref": "https://example.com/a.json"}', "into the schema itself"),
    "dangling": ('{"$ref": "#/$defs/a"}', "does not exist"),
    "false": ("false", "no answer is valid"),
    "nested schema not an object": ('{"items": 3}', "items of the JSON schema is 3: give an object"),
    "no properties": ('{"properties": []}', "give a schema for each name"),
    "misspelt": ('{"type": "string", "patern": "a"}', '"patern"'),
    "look-around": ('{"type": "string", "pattern": "^(?=a).b"}', "look-around"),
    "beyond integers": ('{"type": "integer", "minimum": 1e17}', "cannot be used"),
    "bound not a number": ('{"type": "number", "maximum": "3"}',
        'maximum of the JSON schema is "3": give a number'),
    "no integer between": ('{"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}',
        "cannot be used"),
    "names of patterns": ('{"patternProperties": {"a": true}, "propertyNames": {"enum": ["a"]}}',
        'in addition to "patternProperties", has "propertyNames", which is not supported'),
    "names of other properties": (
        '{"properties": {"a": {}}, "propertyNames": {"minLength": 1}, "additionalProperties": {"const": 1}}',
        'in addition to "properties" and "additionalProperties", has "propertyNames"'),
    "text as count": ('{"prefixItems": [true], "maxItems": "1"}', 'is "1": give 0 or more'),
    "names not a list": ('{"propertyNames": {"enum": 3}}', "give a string, an enum or a const"),
    "format not a string": ('{"format": ["date"]}', "format of the JSON schema"),
    "reversed bounds": ('{"type": "string", "maxLength": 2, "minLength": 3}',
        "minLength (3) is greater than maxLength (2)"),
    "required": ('{"properties": {"a": true}, "required": ["b"], "additionalProperties": false}',
        "required property 'b'"),
    "too few names": ('{"patternProperties": {"^[ab]$": true}, "minProperties": 3}', "too few names"),
    "names without properties": ('{"type": "object", "minProperties": 1, "additionalProperties": false}',
        "minProperties (1) is greater"),
    "names of numbers": ('{"type": "object", "propertyNames": {"type": "integer"}}',
        "give a string, an enum or a const"),
    "no types": ('{"type": []}', "Unsatisfiable"),
    "type in a list": ('{"type": ["integer", {}]}', "type must be a string"),
    "no choice fits": ('{"type": "string", "enum": [1, true]}', "incompatible types"),
    "infinite constant": ('{"const": 1e400}', "const of the JSON schema has the number Infinity: give one"),
    "large constant": ('{"const": 9007199254740993}', "has the number 9007199254740993"),
    "half a pair": (r'{"const": "\ud800"}', "half of a surrogate pair"),
    "control character": (r'{"properties": {"\u0001": true}}', "without control characters"),
    "required not a list": ('{"required": "a"}', "required of the JSON schema"),
    "unchecked format": ('{"format": "regex"}', 'the format "regex", which is not supported'),
    "fine multiples": ('{"type": "number", "multipleOf": 1e-12}', "give at most 9 decimals"),
    "no multiples": ('{"type": "integer", "multipleOf": 0}', "give a positive number"),
    "common multiple": ('{"allOf": [{"type": "number", "multipleOf": 7}, {"type": "number", "minimum": 0}]}',
        "too many digits"),
    "one of several": ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
        "choices 0 and 1 in oneOf of the JSON schema may both be valid"),
    "one of equal": ('{"oneOf": [{"const": [1, {"a": 2}]}, {"const": [1.0, {"a": 2.0}]}]}', "both be valid"),
    "nested base": ('{"items": {"$id": "x", "items": {"$ref": "#"}}}', "begin at its $id"),
    "half a count": ('{"minLength": 3.5}', "minLength of the JSON schema is 3.5: give 0 or more"),
    "deep": ('{"items":' * 5000 + "true" + "}" * 5000, "deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_unusable_schema_is_rejected_with_a_one_line_error(schema, reason):
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        check_json_schema(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidRequest):  # before any model is loaded
        GenerationSettings(json_schema=schema)


def test_a_grammar_and_a_schema_exclude_each_other():
    with pytest.raises(InvalidRequest, match="give one of them"):
        GenerationSettings(grammar='root ::= "a"', json_schema="{}")
    assert GenerationSettings(grammar="g").constrained
    assert GenerationSettings(json_schema="{}").constrained
    assert not GenerationSettings().constrained


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Node(pydantic.BaseModel):
    value: int
    below: list["Node"] = []


SUPPORTED: dict[str, Any] = {  # what schemas of pydantic have beyond single keywords
    "signs": tuple[pydantic.PositiveInt, pydantic.NonNegativeInt, pydantic.NegativeInt,
        pydantic.NonPositiveInt],
    "optional": Annotated[int, Field(ge=1)] | None,
    "enum": Colour,
    "times": tuple[datetime.date, datetime.time, datetime.datetime],
    "formats": tuple[datetime.timedelta, uuid.UUID, pydantic.AnyUrl, pydantic.SecretStr, bytes,
        pydantic.Json],
    "union": int | str | list[Cat],
    "told apart": Annotated[Cat | Dog, Field(discriminator="kind")],
    "long map": Annotated[dict[str, int], Field(min_length=2)],
    "short map": Annotated[dict[str, Cat], Field(min_length=1, max_length=3)],
    "keys of an enum": dict[Colour, int],
    "keys of some length": dict[Annotated[str, Field(min_length=1)], bool],
    "keys of a date": dict[datetime.date, Literal["x"]],
    "recursive": Node,
    "keys of a pattern": dict[Annotated[str, Field(pattern="^a")], int],
}  # fmt: skip


WEAKER = {"formats", "told apart"}
"""Types whose schema allows more than pydantic does."""


@pytest.mark.parametrize(("name", "kind"), SUPPORTED.items(), ids=SUPPORTED.keys())
def test_answers_under_a_pydantic_schema_are_valid(name, kind):
    for mode in ("validation", "serialization"):
        adapter = pydantic.TypeAdapter(kind)
        accepting = grammar(adapter.json_schema(mode=mode))
        answers = [sample(accepting, random.Random(seed)) for seed in range(4)]
        assert any(answers)
        for answer in filter(None, answers):
            json.loads(answer)
            if name not in WEAKER:
                adapter.validate_json(answer)


REFERENCES = {
    "#/anyOf/-1": "does not exist", "#/anyOf/2": "does not exist", "#/anyOf/00": "does not exist",
    "#/anyOf/": "does not exist", "#/anyOf/1e0": "does not exist", "#/anyOf/٠": "does not exist",
    "#/anyOf/-": "does not exist", f"#/anyOf/{'9' * 5000}": "does not exist", "#/$defs/-1": "does not exist",
    "#/$defs/c": "does not exist", "#/$defs/~2": "not a JSON pointer", "#/$defs/a~": "not a JSON pointer",
    "#/$defs/%": "not a JSON pointer", "#/$defs/%ff": "does not exist", "#/": "does not exist",
    "#a": "into the schema itself", "": "into the schema itself",
    "http://127.0.0.1:9/a": "into the schema itself", "#/$defs": "not a schema", "#/anyOf": "not a schema",
    "#/title": "not a schema", "#/$defs/a/type": "not a schema", "#/$defs/a/enum/0": "does not exist",
    "#/$defs/a/type/0": "does not exist", "#/default": "not a schema",
    "#": "refers to itself", "#/anyOf/1": "refers to itself", "#/$defs/cycle": "refers to itself",
    "#/$defs/endless": "is infinite",
}  # fmt: skip


@pytest.mark.parametrize(("reference", "reason"), REFERENCES.items(), ids=[r[:20] for r in REFERENCES])
def test_a_reference_is_a_json_pointer_to_a_schema_that_ends(reference, reason):
    schema = {
        "title": "a",
        "default": {"type": "null"},
        "anyOf": [{"type": "null"}, {"$ref": reference}],
        "$defs": {
            "a": {"type": "string", "enum": ["x"]},
            "cycle": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/half"}]},
            "half": {"allOf": [{"$ref": "#/$defs/cycle"}]},
            "endless": {"properties": {"a": {"$ref": "#/$defs/list"}}, "required": ["a"]},
            "list": {"items": {"$ref": "#/$defs/endless"}, "minItems": 1, "type": "array"},
        },
    }
    if reference != "#/$defs/cycle":
        del schema["$defs"]["cycle"], schema["$defs"]["half"]
    if reference != "#/$defs/endless":
        del schema["$defs"]["endless"], schema["$defs"]["list"]
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_json_schema(json.dumps(schema))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


N = 11_000
NULLS = {f"p{i}": {"type": "null"} for i in range(N)}
LARGE = {
    "required": ({"properties": NULLS, "required": [*NULLS]}, "more than 2000 schemas"),
    "required only": ({"required": [*NULLS]}, "more than 2000 schemas"),
    "optional": ({"properties": NULLS}, "more than 2000 schemas"),
    "definitions": ({"$defs": NULLS}, "more than 2000 schemas"),
    "choices": ({"anyOf": [{"const": i} for i in range(N)]}, "more than 2000 schemas"),
    "parts": ({"allOf": [{"properties": {f"p{i}": True}} for i in range(N)]}, "more than 2000 schemas"),
    "lists": ({"enum": [[i] for i in range(N)]}, "more than 2000 schemas"),
    "constants": ({"enum": [*range(2 * N)]}, "more than 20000 constants"),
    "patterns": ({"patternProperties": {f"^x{i}$": True for i in range(200)}}, "more than 50 patterns"),
    "long pattern": ({"pattern": "^" + "a?" * N + "a" * N + "$"}, "more than 20000 characters in patterns"),
    "remainders": ({"prefixItems": [{"type": "integer", "multipleOf": 90_001}] * 5}, "100000 remainders"),
    "at least one": ({"properties": dict([*NULLS.items()][:300]), "minProperties": 1}, "than 100 optional"),
    "text": ({"title": "x" * 2_000_000}, "more than 1048576 bytes"),
    "items": ({"items": {"items": {"minItems": 10**9}, "maxItems": 10**9}, "minItems": 10**9}, None),
    "lengths": ({"type": "string", "pattern": "a", "minLength": 10**6, "maxLength": 10**9}, None),
    "doubled": ({"$ref": "#/$defs/d0", "$defs": {"d40": {"type": "null"}} | {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}}, None),
    "doubled choices": ({"oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}], "$defs": {"d40": True} | {
        f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}}, "may both be valid"),
    "many choices": ({"oneOf": [{"const": i} for i in range(1900)]}, "may both be valid"),
    "product": ({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(3)]}
        for i in range(20)]}, None),
    "fewer properties": ({"properties": dict([*NULLS.items()][:1000]), "additionalProperties": True}, None),
    "fewer patterns": ({"patternProperties": {f"^x{i}$": True for i in range(50)}}, None),
    "a long chain": ({"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(900)} | {"d900": True}}, None),
}  # fmt: skip
SECONDS = 10
"""Each takes less than one second on a machine with nothing else to do."""


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "reason"), LARGE.values(), ids=LARGE.keys())
def test_a_large_schema_is_used_or_refused_within_seconds(schema, reason):
    text = json.dumps(schema)
    start = time.process_time()
    if reason:
        with pytest.raises(InvalidRequest, match=reason):
            check_json_schema(text)
    else:
        with contextlib.suppress(InvalidRequest):
            state = Grammar.from_json_schema(VOCABULARY, text).start()
            for token in b'{"x1':
                state.allowed()
                state = state.after(token) or state
    assert time.process_time() - start < SECONDS
