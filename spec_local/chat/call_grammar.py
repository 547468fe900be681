"""The grammar of an answer that must be calls of tools, or calls or JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec_local.chat.call_formats import JSON_CALL, PARTS, CallFormat
from spec_local.grammar.lark import Rules, RuleSet
from spec_local.grammar.subschemas import moved


def call_grammar(
    form: CallFormat, tools: Sequence[Mapping[str, Any]], *, answer: str | None = None, parallel: bool = True
) -> RuleSet:
    """The grammar of one or more calls.

    Args:
        form: of the calls.
        tools: that may be called.
        answer: a JSON schema; the answer may follow it in place of calls. None: there must be calls. With a
            schema, a call may lack its mark where small models leave it out.
        parallel: more than one call is allowed.

    Raises:
        InvalidRequest: a schema cannot be used.
    """
    rules = Rules(form.control)
    call = rules.rule(" | ".join(_call(rules, form, tool["function"]) for tool in tools))
    more = f" ({rules.literal(form.between)} {call})*" if parallel and form.between is not None else ""
    start = f"{rules.literal(form.before)} {call}{more} {rules.literal(form.after)}"
    if answer is not None:
        if form.bare and not form.is_json:
            bare = " | ".join(_json_call(rules, JSON_CALL, tool["function"]) for tool in tools)
            start += f" | {rules.rule(bare)}"
        start += f" | {rules.literal(form.answer)} {rules.json({}, json.loads(answer))}"
    return rules.set(start, has_json=form.notation is None)


def _call(rules: Rules, form: CallFormat, function: Mapping[str, Any]) -> str:
    schema = _arguments(function)
    if form.is_json:
        return _json_call(rules, form.written, function)
    expressions = []
    text, *parts = PARTS.split(form.written)  # text and names of parts alternate
    for part, after in zip(parts[::2], parts[1::2], strict=True):
        if part == "NAME":
            text += function["name"] + after
            continue
        expressions.append(rules.literal(text))
        if part == "NUMBER":
            expressions.append("/[0-9]{1,3}/")
        else:
            expressions.append(form.notation(rules, schema) if form.notation else rules.json(schema, schema))
        text = after
    return " ".join([*expressions, rules.literal(text)])


def _json_call(rules: Rules, written: str, function: Mapping[str, Any]) -> str:
    """A call that is JSON, as one schema: an answer in place of calls may begin in the same way."""
    call = json.loads(written.replace("ARGUMENTS", "{}"))
    (arguments,) = call.keys() - {"name"}
    properties = {
        "name": {"const": function["name"]},
        arguments: moved(_arguments(function), f"#/properties/{arguments}"),
    }
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return rules.json(schema, schema)


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the arguments, which are an object."""
    schema = dict(function["parameters"])
    is_open = schema.keys().isdisjoint({"type", "$ref", "anyOf", "oneOf", "allOf"})
    return schema | {"type": "object"} if is_open else schema
