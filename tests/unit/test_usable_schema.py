"""Schemas as the libraries of clients write them: all are used, and what is not enforced is said."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

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
