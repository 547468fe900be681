"""The prompts of a benchmark, by category: built in, from a file or from a folder of files."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from spec_local.errors import InvalidRequest
from spec_local.system import json_file, toml_file
from spec_local.system.files import read_text

_MAX_SHOWN = 100  # characters of a wrong entry in an error
_MAX_BYTES = 1 << 26  # more than a benchmark can answer
_SET = "question.jsonl"  # what a set of prompts is called in its own folder, by Spec-Bench and EAGLE
_NOT_FILLED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""The start of a text that SPEED-Bench may not contain, but its script downloads."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, or the first turn of a conversation; category and name identify it.

    later: the user's further messages, each after an answer of the model.
    """

    category: str
    name: str
    text: str
    later: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.category}/{self.name}"

    @property
    def n_turns(self) -> int:
        return 1 + len(self.later)

    def turn(self, n: int) -> "Prompt":
        """The n-th turn, from 1, as a prompt with a name of its own."""
        if n == 1:
            return self
        return Prompt(self.category, f"{self.name} turn {n}", self.later[n - 2], self.later[n - 1 :])


_FIELDS = ("category", "name", "text")


def load(path: Path | None = None) -> list[Prompt]:
    """Load the prompts of a file or folder, or the built-in ones.

    Args:
        path: ``.toml`` with ``[[prompt]]`` tables, ``.jsonl`` with one object per line (both of category,
            name and text, or as in Spec-Bench, EAGLE and SPEED-Bench: see `_conversation`), or any other
            text file with one prompt per line. A folder: its ``NAME/question.jsonl`` files, or else its
            ``NAME.jsonl`` files, each of which is the category NAME. None: the built-in prompts.

    Raises:
        InvalidRequest: a file cannot be read, or has an invalid prompt; the message gives its position. Or
            there are no prompts.
    """
    path = path or Path(str(files("spec_local.bench") / "prompts.toml"))
    if os.path.isdir(path):
        # The results of a set are reported as one figure, whatever categories are in it.
        paths = sorted(path.glob(f"*/{_SET}")) or sorted(path.glob("*.jsonl"))
        found = [replace(prompt, category=_set_name(each)) for each in paths for prompt in _read(each)]
    else:
        found = [replace(prompt, category=prompt.category or _set_name(path)) for prompt in _read(path)]
    if not found:
        raise InvalidRequest(f"{path} has no prompts: give {' or '.join(_FORMS)}")
    seen: set[str] = set()
    for prompt in found:
        if str(prompt) in seen:
            raise InvalidRequest(f"{path} has two prompts named {prompt}: rename one of them")
        seen.add(str(prompt))
    return found


_FORMS = (
    "[[prompt]] tables (.toml)",
    "objects (.jsonl)",
    "one prompt per line (.txt)",
    f"a folder of NAME/{_SET} files",
)


def _set_name(path: Path) -> str:
    return path.absolute().parent.name if path.name == _SET else path.stem


def _read(path: Path) -> list[Prompt]:
    text = read_text(path, _MAX_BYTES)
    return {".toml": _toml, ".jsonl": _jsonl}.get(path.suffix.lower(), _lines)(text, str(path))


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
    if isinstance(entry, dict) and not entry.keys().isdisjoint(("turns", "messages")):
        return _conversation(entry, where)
    wanted = f"{', '.join(_FIELDS)}, or question_id, category, turns"
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        has = ", ".join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise InvalidRequest(f"{where} has {' '.join(has.split())[:_MAX_SHOWN] or 'nothing'}: give {wanted}")
    for name in _FIELDS:
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise InvalidRequest(f"{where} has no {name}: give some text")
    return Prompt(**{name: entry[name].strip() for name in _FIELDS})


def _conversation(entry: Mapping[str, object], where: str) -> Prompt:
    """A prompt in the format of Spec-Bench, EAGLE and SPEED-Bench; its texts are used exactly as they are.

    They have question_id, turns and category, which may be missing or empty, and other fields. A copy of
    SPEED-Bench (NeMo-Skills) has messages of the user in place of turns.
    """
    turns = entry.get("turns")
    if turns is None and isinstance(messages := entry.get("messages"), list):
        turns = [each.get("content") for each in messages if isinstance(each, dict)]
        if [each for each in messages if not isinstance(each, dict) or each.get("role") != "user"]:
            raise InvalidRequest(f"{where} has messages that are not the user's: give turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise InvalidRequest(f"{where} has no turns: give a list of the user's messages, each with some text")
    if any(turn.startswith(_NOT_FILLED) for turn in turns):
        raise InvalidRequest(
            f"{where} has no text yet: run SPEED-Bench's prepare_data.py, which downloads it"
        )
    name = entry.get("question_id", entry.get("name"))
    if not isinstance(name, int | str) or isinstance(name, bool) or not str(name).strip():
        raise InvalidRequest(f"{where} has no question_id: give a number or a name")
    category = entry.get("category") or ""
    if not isinstance(category, str):
        raise InvalidRequest(f"{where} has no category: give some text")
    first, *later = turns
    return Prompt(category.strip(), str(name).strip(), first, tuple(later))
