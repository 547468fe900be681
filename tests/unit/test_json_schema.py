"""What a JSON schema may ask for; that llama.cpp reads the grammars so is in tests/llama."""

import contextlib
import datetime
import enum
import json
import re
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from spec_local.errors import InvalidRequest
from spec_local.grammar.json_schema import to_gbnf
from spec_local.settings import GenerationSettings

REFUSED = {
    "no JSON": ("{", "is not JSON"),
    "not a number of JSON": ('{"const": NaN}', "NaN"),
    "no object": ("3", "is 3: give an object"),
    "no type": ('{"maximum": 3}', "no type"),
    "unknown type": ('{"type": "text"}', 'type "text"'),
    "multiple": ('{"type": "integer", "minimum": 3, "multipleOf": 2}', '"multipleOf"'),
    "bound of a text": ('{"type": "string", "minimum": 3}', '"minimum"'),
    "bound of one type only": ('{"type": ["null", "string"], "minimum": 3}', '"minimum"'),
    "bound that is none": ('{"type": "integer", "minimum": 1e999}', "minimum of the JSON schema is no number of up to 20 digits"),
    "bounds turned round": ('{"items": {"type": "integer", "minimum": 3, "maximum": 2}}', "no integer keeps to all bounds of items of"),
    "pattern": ('{"type": "string", "pattern": "a+"}', '"pattern"'),
    "deep down": ('{"type": "array", "items": {"properties": {"a": {"type": "number", "multipleOf": 1}}}}', 'property "a" of items'),
    "length of a date": ('{"type": "string", "format": "date", "maxLength": 3}', '"maxLength"'),
    "remote": ('{"$ref": "https://example.com/a.json"}', "into the schema itself"),
    "file": ('{"$ref": "other.json#/a"}', "into the schema itself"),
    "dangling": ('{"$ref": "#/$defs/a"}', "is not there"),
    "dangling list": ('{"anyOf": [true], "x": 1}', '"x"'),
    "several": ('{"allOf": [{"type": "object"}, {"type": "object"}]}', "merge them"),
    "unique": ('{"type": "array", "uniqueItems": true}', '"uniqueItems"'),
    "long": ('{"type": "string", "maxLength": 1000000000}', "give 0 to 2000"),
    "turned round": ('{"type": "string", "maxLength": 2, "minLength": 3}', "less than"),
    "tuple": ('{"type": "array", "prefixItems": [true], "minItems": 2}', "minItems"),
    "required": ('{"type": "object", "properties": {"a": true}, "required": ["b"]}', 'requires "b"'),
    "names that differ": ('{"type": "object", "minProperties": 2}', "that names differ"),
    "too few": ('{"type": "object", "minProperties": 1, "additionalProperties": false}', "allows none"),
    "so many properties": ('{"properties": {"a": true}, "maxProperties": 1}', '"maxProperties"'),
    "names of numbers": ('{"type": "object", "propertyNames": {"type": "integer"}}', "give a string, an enum or a const"),
    "names of any": ('{"type": "object", "propertyNames": {"anyOf": [{"type": "null"}]}}', "give a string, an enum"),
    "names of a loop": ('{"type": "object", "propertyNames": {"$ref": "#/propertyNames"}}', "give a string, an enum"),
    "names of a pattern": ('{"type": "object", "propertyNames": {"pattern": "a"}}', '"pattern"'),
    "names elsewhere": ('{"type": "object", "propertyNames": {"$ref": "a.json"}}', "into the schema itself"),
    "no types": ('{"type": []}', "give a list"),
    "type in a list": ('{"type": ["integer", {}]}', "give object, array"),
    "type that is none": ('{"enum": [1], "type": {}}', "of its type"),
    "no choices": ('{"enum": []}', "give a list"),
    "no choice fits": ('{"type": "string", "enum": [1, true]}', "of its type"),
    "false": ('{"type": "array", "items": false}', "is false"),
    "deep": ('{"items":' * 5000 + "true" + "}" * 5000, "deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_grammar_cannot_promise_is_refused_in_one_line(schema, why):
    with pytest.raises(InvalidRequest, match=re.escape(why)) as caught:
        to_gbnf(schema)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidRequest):  # before any model is loaded
        GenerationSettings(json_schema=schema)


def test_a_grammar_and_a_schema_are_one_too_many():
    with pytest.raises(InvalidRequest, match="give one of them"):
        GenerationSettings(grammar='root ::= "a"', json_schema="{}")
    assert GenerationSettings(grammar="g").gbnf == "g"
    assert GenerationSettings(json_schema="{}").gbnf == to_gbnf("{}")
    assert GenerationSettings().gbnf is None


def test_a_schema_of_nested_options_stays_as_large_as_it_is():
    schema = {"type": "integer"}
    for _ in range(30):
        schema = {"type": "object", "properties": {"a": schema}}
    assert len(to_gbnf(json.dumps(schema))) < 10_000
    many = {"properties": {"a": {"enum": list(range(1000))}}}
    assert to_gbnf(json.dumps(many)).count('"999"') == 1


WORDS = st.sampled_from(
    """type properties required items prefixItems minItems maxItems enum const anyOf oneOf allOf $ref $defs format a
    minLength maxLength additionalProperties propertyNames minProperties maxProperties minimum exclusiveMaximum object array string number integer boolean null # #/$defs/a date title
    """.split()  # noqa: SIM905
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_whatever_is_given_ends_in_a_grammar_or_is_refused(schema):
    with contextlib.suppress(InvalidRequest):
        assert to_gbnf(json.dumps(schema)).startswith("root ::= ")


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


HELD: dict[str, Any] = {
    "bounds": Annotated[int, Field(ge=0, le=100)],
    "exclusive": Annotated[int, Field(gt=0, lt=10)],
    "signs": tuple[pydantic.PositiveInt, pydantic.NonNegativeInt, pydantic.NegativeInt, pydantic.NonPositiveInt],
    "share": Annotated[float, Field(ge=0, le=1)],
    "positive": pydantic.PositiveFloat,
    "list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "text": Annotated[str, Field(min_length=1, max_length=5)],
    "literal": Literal["a", 1, None],
    "optional": Annotated[int, Field(ge=1)] | None,
    "enum": Colour,
    "times": tuple[datetime.date, datetime.time, datetime.datetime, datetime.timedelta],
    "formats": tuple[uuid.UUID, pydantic.AnyUrl, pydantic.SecretStr, bytes, pydantic.Json],
    "union": int | str | list[Cat],
    "told apart": Annotated[Cat | Dog, Field(discriminator="kind")],
    "map": dict[str, Annotated[int, Field(ge=0)]],
    "short map": Annotated[dict[str, Cat], Field(min_length=1, max_length=3)],
    "keys of an enum": dict[Colour, int],
    "keys of some length": dict[Annotated[str, Field(min_length=1)], bool],
    "keys of a date": dict[datetime.date, Literal["x"]],
    "anything": dict[str, Any],
    "recursive": Node,
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD.values(), ids=HELD.keys())
def test_what_pydantic_writes_is_held(kind):
    for mode in ("validation", "serialization"):
        schema = pydantic.TypeAdapter(kind).json_schema(mode=mode)
        to_gbnf(json.dumps(schema))


NOT_HELD: dict[str, Any] = {
    '"multipleOf"': Annotated[int, Field(multiple_of=5)],
    '"pattern"': Annotated[str, Field(pattern="^a+$")],
    '"uniqueItems"': set[int],
    '"patternProperties"': dict[Annotated[str, Field(pattern="a")], int],
    "minProperties": Annotated[dict[str, int], Field(min_length=2)],
}  # fmt: skip


@pytest.mark.parametrize(("keyword", "kind"), NOT_HELD.items(), ids=NOT_HELD.keys())
def test_what_pydantic_writes_and_a_grammar_cannot_hold_is_named_with_its_place(keyword, kind):
    model = pydantic.create_model("Model", a=(int, ...), b=(kind, ...))
    with pytest.raises(InvalidRequest, match=f'property "b" of the JSON schema has .*{keyword}'):
        to_gbnf(json.dumps(model.model_json_schema()))
