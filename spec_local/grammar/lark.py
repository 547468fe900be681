"""Rules in llguidance's dialect of Lark, from text, JSON schemas and control tokens."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_local.errors import InvalidRequest
from spec_local.grammar import json_schema
from spec_local.grammar.subschemas import Subschemas, moved


@dataclass(frozen=True, slots=True)
class RuleSet:
    """A grammar.

    Attributes:
        rules: in Lark; `control_rules` completes them.
        control: names of its control tokens.
        has_json: its only objects, arrays and strings are those of JSON.
    """

    rules: str
    control: tuple[str, ...] = ()
    has_json: bool = False


def quoted(text: str) -> str:
    """Text as an expression."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def control_rules(names: Sequence[str], tokens: Sequence[int | None]) -> str:
    """The rules that `Rules` leaves to the vocabulary.

    Args:
        names: of control tokens. tokens: their ids; None: the vocabulary has no such token, so that the name
            is text.
    """
    lines = ["", "ANYTHING: /(?s:.*)/"]
    for i, (name, token) in enumerate(zip(names, tokens, strict=True)):
        if token is None:
            lines += [f"control{i}: {quoted(name)}", f"upto{i}[suffix={quoted(name)}]: /(?s:.*)/"]
        else:
            lines += [f"control{i}: <[{token}]>", f"upto{i}: ANYTHING control{i}"]
    return "\n".join(lines)


class Rules:
    """Collects rules.

    Args:
        control: names of control tokens, which no other text contains.
    """

    def __init__(self, control: Sequence[str] = ()) -> None:
        self._control = control
        self._lines: list[str] = []

    def set(self, start: str, *, has_json: bool) -> RuleSet:
        """The grammar with this expression as its start."""
        return RuleSet("\n".join([f"start: {start}", *self._lines]), tuple(self._control), has_json)

    def rule(self, expression: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"rule{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {expression}")
        return name

    def literal(self, text: str) -> str:
        """A text that may contain control tokens."""
        names = "|".join(map(re.escape, sorted(self._control, key=len, reverse=True)))
        parts = re.split(f"({names})", text) if names else [text]
        found = [
            f"control{self._control.index(part)}" if part in self._control else quoted(part)
            for part in parts
            if part
        ]
        return " ".join(found) or '""'

    def up_to(self, end: str) -> str:
        """Any text up to the first occurrence of another one, and this one."""
        return self.rule("/(?s:.*)/", f"[suffix={quoted(end)}]")

    def control_up_to(self, end: str) -> str:
        """The same for a control token."""
        return f"upto{self._control.index(end)}"

    def json(self, root: Mapping[str, Any], one: Any) -> str:
        """JSON under a part of a schema, which may refer to the definitions of its root."""
        if one is not root and '"$ref"' in json.dumps(one):
            one = moved(one, "#/$defs/root") | {"$defs": {"root": moved(root, "#/$defs/root")}}
        return self.rule(f"%json {json_schema.strict(json.dumps(one))}")

    def listed(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Expressions in their order; those with False may be left out."""
        after = before = '""'
        for i, (part, is_required) in reversed([*enumerate(parts)]):
            # `after`: what may follow if something came before; `before`: if nothing did.
            following = f"{part} {after}"
            if i == 0:
                return f"({following}{'' if is_required else f' | {before}'})"
            more = f"{quoted(separator)} {following}"
            after, before = (
                self.rule(more if is_required else f"{more} | {after}"),
                self.rule(following if is_required else f"{following} | {before}"),
            )
        return '""'

    def properties(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        """Names, schemas, and whether they are required, of the properties of an object."""
        schema = self.resolved(schema, schema)
        required = schema.get("required", ())
        for name, one in (schema.get("properties") or {}).items():
            yield name, one if isinstance(one, Mapping) else {}, name in required

    def resolved(self, root: Mapping[str, Any], schema: Any) -> Mapping[str, Any]:
        """The schema to which a reference leads."""
        try:
            found = Subschemas(root).resolve(schema, "the schema")
        except InvalidRequest:
            found = {}
        return found if isinstance(found, Mapping) else {}
