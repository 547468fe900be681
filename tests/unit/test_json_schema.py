"""What a JSON schema may ask for; that llama.cpp reads the grammars so is in tests/llama."""

import contextlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.errors import InvalidRequest
from spec_local.json_schema import to_gbnf
from spec_local.session import GenerationSettings

REFUSED = {
    "no JSON": ("{", "is not JSON"),
    "not a number of JSON": ('{"const": NaN}', "NaN"),
    "no object": ("3", "is 3: give an object"),
    "no type": ('{"maximum": 3}', "no type"),
    "unknown type": ('{"type": "text"}', 'type "text"'),
    "bound": ('{"type": "integer", "minimum": 3}', '"minimum"'),
    "pattern": ('{"type": "string", "pattern": "a+"}', '"pattern"'),
    "deep down": ('{"type": "array", "items": {"properties": {"a": {"type": "number", "maximum": 1}}}}', 'property "a" of items'),
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
    minLength maxLength additionalProperties object array string number integer boolean null # #/$defs/a date title
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
