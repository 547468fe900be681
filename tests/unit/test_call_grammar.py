"""Grammars of tool calls: every answer under one has the form of the model, and is read back."""

import json
import random

import jsonschema
import pytest

from spec_local.chat.call_formats import format_of
from spec_local.chat.call_grammar import call_grammar
from spec_local.chat.tool_calls import ToolCallParser
from spec_local.grammar.matcher import Grammar
from tests.byte_vocabulary import VOCABULARY, accepts, sample
from tests.unit.test_tool_calls import CALL, FORMS, MARKED, TOOLS, whole

ANSWER = {"type": "object", "properties": {"name": {"enum": ["weather", "x"]}}, "required": ["name"]}
RICH = {
    "type": "function",
    "function": {
        "name": "get_1e9999",
        "parameters": {
            "type": "object",
            "properties": {
                "default": {"$ref": "#/$defs/size"},
                "enum": {"type": "array", "items": {"$ref": "#/$defs/const"}, "maxItems": 2},
                "both": {"type": ["string", "null"], "maxLength": 3},
                "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "map": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": 'é"'}}},
                "anything": {},
                "n": {"type": "integer", "minimum": -1, "maximum": 12},
            },
            "required": ["enum", "n"],
            "$defs": {"size": {"enum": ["S", "M"]}, "const": {"enum": [1, "one"]}},
        },
    },
}
forms = pytest.mark.parametrize("form", FORMS)


def grammar(form, tools=TOOLS, **options):
    known = format_of(FORMS[form])
    tools = [
        {"function": {"parameters": {"type": "object", "properties": {}}} | tool["function"]}
        for tool in tools
    ]
    return Grammar.from_rules(VOCABULARY, call_grammar(known, tools, **options))


def marked(form):
    """The call as the grammar writes it: forms that may do without a mark do."""
    return MARKED[form].removeprefix("<|python_tag|>").removesuffix("<|/tool_call|>")


@forms
def test_calls_are_allowed_and_nothing_else(form):
    call, accepting = marked(form), grammar(form)
    assert accepts(accepting, call)
    for text in ("", "Paris", "{}", call[:-1], f"{call} ", f"x{call}", call.replace("weather", "rain")):
        assert not accepts(accepting, text), text
    assert not accepts(accepting, call.replace("Paris", "Paris").replace("city", "town"))
    only = grammar(form, TOOLS[1:])
    assert not accepts(only, call)


@forms
def test_calls_or_an_answer_under_a_schema(form):
    known = format_of(FORMS[form])
    accepting = grammar(form, answer=json.dumps(ANSWER))
    assert accepts(accepting, marked(form))
    assert accepts(accepting, known.answer + '{"name":"weather"}')
    assert accepts(accepting, known.answer + '{"name": "x"}')
    assert not accepts(accepting, known.answer + '{"name": "y"}')
    assert accepts(accepting, CALL) == (known.bare and not known.is_json)
    assert not accepts(accepting, known.answer + '{"name":"weather"}' + marked(form))


@forms
def test_several_calls_only_if_they_are_allowed(form):
    known = format_of(FORMS[form])
    if known.between is None:
        return
    first = marked(form)
    inner = first.removeprefix(known.before).removesuffix(known.after)
    both = known.before + inner + known.between + inner + known.after
    assert [name for name, _ in whole(form, both)[1]] == ["weather", "weather"]
    assert accepts(grammar(form), both)
    assert not accepts(grammar(form, parallel=False), both)
    assert accepts(grammar(form, parallel=False), first)


@forms
@pytest.mark.parametrize("parallel", [False, True])
def test_random_answers_are_calls_with_valid_arguments(form, parallel):
    accepting, known = grammar(form, [RICH, *TOOLS], parallel=parallel), format_of(FORMS[form])
    n_read = 0
    for seed in range(12):
        text = sample(accepting, random.Random(seed), most=300)
        if text is None:
            continue
        found = ToolCallParser(known, [RICH, *TOOLS]).finish(text)
        assert found.text == "", text
        assert found.calls
        for call in found.calls:
            n_read += 1
            arguments = json.loads(call.arguments)
            schema = {t["function"]["name"]: t["function"].get("parameters", {}) for t in [RICH, *TOOLS]}[
                call.name
            ]
            if known.notation:  # texts in tags may have any length, and be empty or constants
                assert arguments.keys() <= schema.get("properties", {}).keys()
                assert {*schema.get("required", ())} <= arguments.keys()
            else:
                jsonschema.validate(arguments, schema)
    assert n_read >= 3
