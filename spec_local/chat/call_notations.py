"""Calls whose arguments are not JSON: in tags, in Gemma's notation and as Python. Reading them, and grammars.

A grammar of a notation is the expression in Lark for the arguments of one tool, whose rules it adds.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_local.chat.call_reading import (
    MALFORMED,
    MAX_HEADER,
    NAME,
    SPACE,
    Read,
    call_of,
    skip_space,
    tool_named,
)
from spec_local.chat.messages import INVALID, Tool, json_value
from spec_local.grammar.lark import Rules, quoted

Notation = Callable[[Rules, Mapping[str, Any]], str]
"""The expression for the arguments under a JSON schema of an object."""
_GEMMA_QUOTE, _GEMMA_END = '<|"|>', "<tool_call|>"
_FLOATS = {"minimum": -(2**53), "maximum": 2**53}  # otherwise, exponents could be too large for a float
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_PYTHON_NAMES = {"true": True, "false": False, "null": None}


class Tags(NamedTuple):
    """The format of calls in tags.

    Attributes:
        head: the name of the tool. parameter: the name of a parameter, before its value, and perhaps, as
        ``is_text``, whether the value is text or JSON. value_end: what follows the value; it looks ahead,
        as a value can contain tags, too. begin, end: what the next parameter begins with, and what the
        call ends with. written: the text around the name of a parameter and its value; ``IS_TEXT`` in it is
        ``true`` or ``false``.
    """

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    value_end: re.Pattern[str]
    begin: str
    end: str
    written: tuple[str, str, str]

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> Read | None:
        """Read a call that begins at an index; None: it is not complete."""
        head = self.head.match(text, at)
        if not head:
            is_begun = len(text) - at < MAX_HEADER and "\n" not in text[at:].strip(SPACE)
            return None if is_begun else MALFORMED
        properties = _properties(tool_named(head["name"], tools))
        arguments: dict[str, object] = {}
        at = skip_space(text, head.end())
        while not text.startswith(self.end, at):
            parameter = self.parameter.match(text, at)
            if not parameter:
                rest = text[at:]
                is_begun = rest.startswith(self.begin) or any(
                    t.startswith(rest) for t in (self.begin, self.end)
                )
                return None if is_begun else MALFORMED
            value = self.value_end.search(text, parameter.end())
            if not value:
                return None
            name, is_text = parameter["name"].strip(), parameter.groupdict().get("is_text")
            written = text[parameter.end() : value.start()]
            schema = None if is_text else properties.get(name)
            arguments[name] = written if is_text == "true" else _value(written, schema)
            at = value.end()
        call = call_of(head["name"], arguments)
        return Read([call], at + len(self.end)) if call else MALFORMED

    def grammar(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        """A `Notation`. A text ends where the first closing tag does."""
        before, between, after = self.written
        parts = []
        for name, one, is_required in rules.properties(schema):
            is_text = True
            if (constants := _constants(one)) is not None and all(isinstance(c, str) for c in constants):
                value = " | ".join(quoted(f"{constant}{after}") for constant in constants)
            elif _is_text(one):
                value = rules.up_to(after)
            else:
                is_text, value = False, f"{rules.json(schema, one)} {quoted(after)}"
            head = before + name + between.replace("IS_TEXT", str(is_text).lower())
            parts.append(f"({quoted(head)} ({value})){'' if is_required else '?'}")
        return " ".join(parts) or '""'


def read_gemma(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a call in Gemma 4's notation: JSON with names without quotes, and strings in marks."""
    strings = text[end:].split(_GEMMA_QUOTE)
    written, length = "", 0
    for i, part in enumerate(strings):
        if i % 2:
            written += json.dumps(part, ensure_ascii=False)
        elif (stop := part.find(_GEMMA_END)) >= 0:
            written += _GEMMA_KEY.sub(r'\1"\2":', part[:stop])
            name, brace, arguments = written.partition("{")
            is_name = re.fullmatch(NAME, name.strip())
            call = call_of(name.strip(), json_value(brace + arguments)) if is_name else None
            return Read([call], end + length + stop) if call else MALFORMED
        else:
            written += _GEMMA_KEY.sub(r'\1"\2":', part)
        length += len(part) + len(_GEMMA_QUOTE)
    return None


def gemma_grammar(rules: Rules, schema: Mapping[str, Any], one: Any = None, depth: int = 0) -> str:
    """A `Notation`; one: the part of the schema for a value in the arguments."""
    one = rules.resolved(schema, schema if one is None else one)
    mark = rules.literal(_GEMMA_QUOTE)
    constants, kind = _constants(one), one.get("type")
    text = f"{mark} {rules.control_up_to(_GEMMA_QUOTE)}"
    if constants is not None:
        found = [
            f"{mark} {quoted(each)} {mark}" if isinstance(each, str) else quoted(json.dumps(each))
            for each in constants
        ]
        return f"({' | '.join(found)})"
    if choices := one.get("anyOf") or one.get("oneOf"):
        return f"({' | '.join(gemma_grammar(rules, schema, each, depth) for each in choices)})"
    if isinstance(kind, list):
        return f"({' | '.join(gemma_grammar(rules, schema, one | {'type': each}, depth) for each in kind)})"
    if kind == "string" or depth > _MAX_DEPTH:
        return f"({text})"
    if kind == "array":
        item = gemma_grammar(rules, schema, one.get("items", {}) or {}, depth + 1)
        return f'("[" ({item} ("," {item})*)? "]")'
    if kind == "object" or "properties" in one:
        parts = [
            (f"{quoted(name)} {quoted(':')} {gemma_grammar(rules, schema, each, depth + 1)}", is_required)
            for name, each, is_required in rules.properties(one)
        ]
        return f"({quoted('{')} {rules.listed(parts, ',')} {quoted('}')})"
    if kind in ("integer", "number", "boolean", "null"):
        limits = _FLOATS if kind == "number" and not any(key.endswith("imum") for key in one) else {}
        return rules.json(schema, limits | {key: each for key, each in one.items() if key != "anyOf"})
    number = rules.json({}, {"type": "number", **_FLOATS})
    return f"({text} | {number} | {rules.json({}, {'type': ['boolean', 'null']})})"


def read_python(text: str, start: int, end: int, tools: Sequence[Tool]) -> Read | None:
    """Read a list of calls as Python writes them; constants of JSON are allowed, too."""
    at, calls = skip_space(text, end), []
    if text[at : at + 1] in ("", "["):
        at = skip_space(text, at + 1)
    while True:
        head = _PYTHON_HEAD.match(text, at)
        if not head:
            is_begun = len(text) - at < MAX_HEADER and re.fullmatch(rf"(?:{NAME})?\s*", text[at:])
            return None if is_begun else MALFORMED
        found = _python_values(text, head.end())
        if not isinstance(found, tuple):
            return found
        values, at = found
        call = call_of(head["name"], values)
        if not call:
            return MALFORMED
        calls.append(call)
        at = skip_space(text, at)
        if text[at : at + 1] != ",":
            break
        at = skip_space(text, at + 1)
    if at == len(text):
        return None
    return Read(calls, at + 1) if text[at] == "]" else MALFORMED


def python_grammar(rules: Rules, schema: Mapping[str, Any]) -> str:
    """A `Notation`."""
    parts = [
        (f"{quoted(name + '=')} {_python_value(rules, schema, one)}", is_required)
        for name, one, is_required in rules.properties(schema)
    ]
    return rules.listed(parts, ", ")


_PYTHON_HEAD = re.compile(rf"(?P<name>{NAME})\s*\(")
_MAX_DEPTH = 8
"""Of arguments in Gemma's notation for which a schema holds."""


def _python_value(rules: Rules, schema: Mapping[str, Any], one: Any) -> str:
    one = rules.resolved(schema, one)
    kind = one.get("type")
    if choices := one.get("anyOf"):
        return f"({' | '.join(_python_value(rules, schema, each) for each in choices)})"
    if isinstance(kind, list):
        return f"({' | '.join(_python_value(rules, schema, one | {'type': each}) for each in kind)})"
    if _constants(one) is None and kind in ("boolean", "null"):
        return '("True" | "False")' if kind == "boolean" else '"None"'
    return rules.json(schema, one)


def _python_values(text: str, at: int) -> tuple[dict[str, object], int] | Read | None:
    """The arguments up to the closing parenthesis, and the index after it."""
    values: dict[str, object] = {}
    depth, quote, skip, written = 0, "", -1, ""
    for i in range(at, len(text)):
        c = text[i]
        if quote:
            if i == skip:
                pass
            elif c == "\\":
                skip = i + 1
            elif c == quote:
                quote = ""
            written += "\\n" if c == "\n" and i != skip else c
            continue
        if not depth and c in ",)" and written.strip():
            name, equals, value = written.partition("=")
            found = _python_constant(value.strip())
            if not equals or not name.strip().isidentifier() or found is INVALID:
                return MALFORMED
            values[name.strip()] = found
            written = ""
        if c == ")" and not depth:
            return values, i + 1
        depth += (c in "([{") - (c in ")]}")
        quote = c if c in "\"'" else ""
        written += "" if c == "," and not depth else c
    return None


def _python_constant(text: str) -> object:
    try:
        return _constant_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return INVALID


def _constant_of(node: ast.expr) -> object:
    match node:
        case ast.Name(id=name) if name in _PYTHON_NAMES:
            return _PYTHON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant_of(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            names = [_constant_of(key) if key else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a name is no text")
            return dict(zip(names, map(_constant_of, values), strict=True))
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("this is no constant")


def _properties(tool: Mapping[str, object] | None) -> Mapping[str, object]:
    """The schemas of a tool's parameters by name."""
    parameters = tool.get("parameters") if tool else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> object:
    """The value of a parameter: text if its schema says so, otherwise JSON if it is."""
    text = text.removeprefix("\n").removesuffix("\n")
    if _is_text(schema):
        return text
    value = json_value({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    return text if value is INVALID else value


def _is_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kind, constants = schema.get("type"), schema.get("enum")
    if kind is None and isinstance(constants, Sequence):
        return all(isinstance(each, str) for each in constants)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _constants(schema: object) -> list[Any] | None:
    """The values of an enum or a const; None: there is none."""
    if not isinstance(schema, Mapping):
        return None
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) and found else None
