"""Schemas as the libraries of clients write them: all are used, and what is not enforced is said."""

import json
import random
import time
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.errors import InvalidRequest
from spec_local.grammar.matcher import Grammar, check_json_schema
from spec_local.grammar.usable_schema import usable
from tests.byte_vocabulary import VOCABULARY, accepts, sample

LINES = (Path(__file__).parents[1] / "data/client_schemas.jsonl").read_text("utf-8").splitlines()
SCHEMAS = [json.loads(line) for line in LINES]


@pytest.mark.parametrize("case", SCHEMAS, ids=[f"{i} {case['by']}" for i, case in enumerate(SCHEMAS)])
def test_schemas_of_clients(case):
    schema, warns = case["schema"], case.get("warns", False)
    known = usable(json.dumps(schema), "field")
    assert bool(known.warnings) == warns
    assert all(warning.startswith("field: ") for warning in known.warnings)
    if not warns:
        check_json_schema(json.dumps(schema))
    accepting = Grammar.from_json_schema(VOCABULARY, known.schema)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    assert validator.is_valid(case["valid"])
    assert not validator.is_valid(case["invalid"])
    assert accepts(accepting, json.dumps(case["valid"], ensure_ascii=False))
    assert not accepts(accepting, json.dumps(case["invalid"], ensure_ascii=False))
    for seed in range(3):
        text = sample(accepting, random.Random(seed))
        if text is not None and not warns:
            validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "kept", "warnings"),
    [
        ({"uniqueItems": True, "items": {"not": {}}}, {"items": {}},
         ["uniqueItems at # is not supported", "not at #/items is not supported"]),
        ({"pattern": "^(?=a)", "format": "email"}, {"format": "email"}, ["the pattern '^(?=a)' at # is not"]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]},
         {"anyOf": [{"type": "number"}, {"type": "integer"}]}, ["oneOf at # is enforced as anyOf only"]),
        ({"properties": {"a/b": {"format": "regex"}}}, {"properties": {"a/b": {}}},
         ["format at #/properties/a~1b is not supported"]),
        ({"propertyNames": {"type": "integer"}}, {}, ["propertyNames at # is not supported"]),
        ({"patternProperties": {"(?!a)": {}, "b": {}}}, {"patternProperties": {"b": {}}},
         ["the pattern '(?!a)' at # is not supported: no name matches it"]),
        ({"patern": "a"}, {}, ["patern at # is not supported"]),
        ({"required": None, "properties": None, "enum": None, "items": {"anyOf": None}}, {"items": {}}, []),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
         {"exclusiveMinimum": 1, "maximum": 9}, []),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_left_out_with_a_warning(schema, kept, warnings):
    known = usable(json.dumps(schema), "response_format")
    assert json.loads(known.schema) == kept
    assert len(known.warnings) == len(warnings)
    for warning, part in zip(known.warnings, warnings, strict=True):
        assert warning.startswith(f"response_format: {part}")


@pytest.mark.parametrize(
    "schema", ["{", "3", '{"type": "text"}', '{"properties": {"a": 1}}', '{"$ref": "#/$defs/a"}', "false",
               '{"minLength": 3.5}', '{"properties": ' * 3000 + "1" + "}" * 3000,
               json.dumps({"properties": {str(i): {"not": {}} for i in range(150)}})],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_what_is_no_schema_is_refused_with_the_name_of_the_field(schema):
    with pytest.raises(InvalidRequest, match=r"^json_schema: ") as caught:
        usable(schema, "json_schema")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^(abc$", "unterminated"),
        ("a)(b", "unbalanced"),
        ("(?=a", "unterminated"),  # a look-ahead alone is not supported, but valid
        ("[z-a]", "range z-a"),
        ("[abc", "unterminated"),
        ("*a", "nothing to repeat"),
        ("a{3,1}(?=b)", "min repeat"),
        (r"\p{Foo}", "no property"),
        (r"\k<n>", "no group"),
        (r"a\h", "escape"),
        ("(" * 9000, "too deeply"),
    ],
)
@pytest.mark.parametrize("inside", ["#", "properties", "not", "patternProperties", "propertyNames"])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern, reason, inside):
    schema = {"type": "string", "pattern": pattern}
    if inside == "properties":
        schema = {"properties": {"a": schema}}
    elif inside == "patternProperties":
        schema = {inside: {pattern: {}}}
    elif inside != "#":
        schema = {inside: schema}
    with pytest.raises(InvalidRequest, match=rf"field: the pattern .* at #.* \(.*{reason}.*\): correct it"):
        usable(json.dumps(schema), "field")


def test_a_backslash_at_the_end_of_a_pattern_is_refused():
    """llguidance would leave it out."""
    for schema in ({"pattern": "a\\"}, {"patternProperties": {"\\": {}}}):
        with pytest.raises(InvalidRequest, match="ends with a backslash"):
            usable(json.dumps(schema), "field")
    assert not usable(json.dumps({"pattern": "a\\\\"}), "field").warnings


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?=.*[a-z])(?!.*[^]).{8,}$", r"(?<year>[0-9]+)-\k<year>", r"(?<=a+)b(?<!c|dd)", r"\bword\b", r"\cA",
        r"(a)\1", "a{,5", "[[](?=a)", r"[\]\\](?=\u{1F600})", r"(?=\p{L})", "a{99999999999}", "[^]",
    ],
)  # fmt: skip
def test_a_valid_pattern_that_is_not_supported_is_a_warning(pattern):
    assert usable(json.dumps({"pattern": pattern}), "field").warnings


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"uniqueItems": "yes"}, 'uniqueItems at # is "yes": give true or false'),
        ({"not": 5}, "#/not is 5: give a schema"),
        ({"not": {"type": "text"}}, 'type at #/not is "text": give one of array, '),
        ({"if": {"properties": []}}, r"properties at #/if is \[\]: give a schema for each name"),
        ({"contains": {"anyOf": []}}, r"anyOf at #/contains is \[\]: give a list of schemas"),
        ({"minContains": -1}, "minContains at # is -1: give 0 or more"),
        ({"dependentRequired": {"a": "b"}}, "give a list of names for each name"),
        ({"dependentSchemas": {"a/b": 1}}, "#/dependentSchemas/a~1b is 1: give a schema"),
        ({"dependencies": {"a": ["b"], "c": 1}}, "#/dependencies/c is 1: give a schema"),
        ({"$dynamicRef": 3}, r"\$dynamicRef at # is 3: give a text"),
        ({"not": {"pattern": 3}}, "pattern at #/not is 3: give a text"),
    ],
)
def test_what_cannot_be_enforced_is_valid_too(schema, message):
    with pytest.raises(InvalidRequest, match=f"^field: .*{message}"):
        usable(json.dumps(schema), "field")


_WORDS = st.sampled_from(
    ["a", "b", "#", "(", "^(abc$", "(?=a)", "string", "object", "#/$defs/a", "email", ""]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=2),
    max_leaves=4,
)
_KEYWORDS = [
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties"),
    *("propertyNames", "minProperties", "items", "prefixItems", "minItems", "uniqueItems", "contains"),
    *("minContains", "pattern", "format", "maxLength", "minimum", "multipleOf", "anyOf", "allOf", "oneOf"),
    *("not", "if", "then", "else", "$ref", "$defs", "dependentRequired", "dependentSchemas"),
    *("unevaluatedItems", "unevaluatedProperties"),
]
_SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(_KEYWORDS), _VALUES, max_size=3),
    lambda inner: st.dictionaries(
        st.sampled_from(_KEYWORDS),
        inner | st.lists(inner, min_size=1, max_size=2) | st.dictionaries(_WORDS, inner, max_size=2),
        max_size=3,
    ),
    max_leaves=4,
)


@settings(max_examples=100)
@given(_SCHEMAS)
def test_what_is_used_is_valid_and_enforced_or_named(schema):
    """No schema with a mistake is used, and no keyword is lost without a warning."""
    refusal = ""
    try:
        known = usable(json.dumps(schema), "field")
    except InvalidRequest as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("field: ")
        assert "\n" not in refusal
        return
    has_tuples = '"items": [' in json.dumps(schema)  # before 2020-12
    validator = jsonschema.Draft7Validator if has_tuples else jsonschema.Draft202012Validator
    validator.check_schema(schema)
    assert known.warnings or json.loads(known.schema) == schema


@settings(max_examples=100, deadline=2000)
@given(st.text("ab(){}[]|*+?^$.\\-,09<=!:kpPuxd", max_size=12))
def test_no_pattern_is_unconstrained_text_in_silence(pattern):
    try:
        known = usable(json.dumps({"pattern": pattern}), "field")
    except InvalidRequest:
        return
    assert known.warnings or json.loads(known.schema) == {"pattern": pattern}


def test_names_are_compared_with_patterns_in_linear_time():
    schema = {"propertyNames": {"pattern": "^(a+)+$"}, "properties": {"a" * 60 + "!": {}, "aa": {}}}
    begun = time.process_time()
    accepting = Grammar.from_json_schema(VOCABULARY, usable(json.dumps(schema), "field").schema)
    assert time.process_time() - begun < 2
    assert accepts(accepting, '{"aa":1}')
    assert not accepts(accepting, json.dumps({"a" * 60 + "!": 1}))
