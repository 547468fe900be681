"""The prompts of a benchmark, by category: built in or from a file."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

from spec_local.errors import InvalidRequest
from spec_local.system import json_file, toml_file
from spec_local.system.files import read_text

_MAX_SHOWN = 100  # characters of a wrong entry in an error
_MAX_BYTES = 1 << 26  # more than a benchmark can answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; category and name identify it."""

    category: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.category}/{self.name}"


_FIELDS = [field.name for field in fields(Prompt)]


def load(path: Path | None = None) -> list[Prompt]:
    """Load the prompts of a file, or the built-in ones.

    Args:
        path: ``.toml`` with ``[[prompt]]`` tables, ``.jsonl`` with one object per line (both of category,
            name and text), or any other text file with one prompt per line; None: the built-in prompts.

    Raises:
        InvalidRequest: the file cannot be read, or has no prompts or an invalid one; the message gives its
            position.
    """
    path = path or Path(str(files("spec_local.bench") / "prompts.toml"))
    source, text = str(path), read_text(path, _MAX_BYTES)
    found = {".toml": _toml, ".jsonl": _jsonl}.get(path.suffix.lower(), _lines)(text, source)
    if not found:
        raise InvalidRequest(f"{source} has no prompts: give {' or '.join(_FORMS)}")
    seen: set[str] = set()
    for prompt in found:
        if str(prompt) in seen:
            raise InvalidRequest(f"{source} has two prompts named {prompt}: rename one of them")
        seen.add(str(prompt))
    return found


_FORMS = ("[[prompt]] tables (.toml)", "objects (.jsonl)", "one prompt per line (.txt)")


def select(
    prompts: Sequence[Prompt], categories: Collection[str] = (), per_category: int | None = None
) -> list[Prompt]:
    """Select the first `per_category` prompts of each of these categories; by default, of all categories.

    Args:
        categories: each a name, or a part of one or more names.

    Raises:
        InvalidRequest: there is no such category; the message lists them.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    selected: set[str] = set()
    for category in categories:
        part = category.strip().lower()
        found = [name for name in known if name == category] or [
            name for name in known if part in name.lower()
        ]
        if not part or not found:
            raise InvalidRequest(f"there is no category {category!r}: give {', '.join(known)}")
        selected.update(found)
    return [
        prompt
        for category in known
        if not categories or category in selected
        for prompt in [p for p in prompts if p.category == category][:per_category]
    ]


def _toml(text: str, source: str) -> list[Prompt]:
    entries = toml_file.parse(text, source, "correct it", InvalidRequest)
    tables = entries.pop("prompt", [])
    if entries or not isinstance(tables, list):
        raise InvalidRequest(f"{source} has more than [[prompt]] tables: remove everything else")
    return [_prompt(table, f"{source}, prompt {i}") for i, table in enumerate(tables, 1)]


def _jsonl(text: str, source: str) -> list[Prompt]:
    return [
        _prompt(json_file.parse(line, source, "give one object per line", i), f"{source}, line {i}")
        for i, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def _lines(text: str, source: str) -> list[Prompt]:
    return [
        Prompt("lines", f"line-{i}", line.strip())
        for i, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]


def _prompt(entry: object, where: str) -> Prompt:
    wanted = ", ".join(_FIELDS)
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        has = ", ".join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise InvalidRequest(f"{where} has {' '.join(has.split())[:_MAX_SHOWN] or 'nothing'}: give {wanted}")
    for name in _FIELDS:
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise InvalidRequest(f"{where} has no {name}: give some text")
    return Prompt(**{name: entry[name].strip() for name in _FIELDS})
