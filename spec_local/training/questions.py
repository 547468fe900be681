"""What main is asked so that a draft can learn how it writes: as many questions as one likes, of the benchmark's categories.

A grammar (``questions.toml``) makes them: of a category one form, in whose slots topics and further phrases are put. What
is held out is decided by topic, so that a draft is measured on what it has never read about, and not on the same matter
in other words. Some questions are about passages instead: what main wrote before, or what a person's files hold.
"""

import hashlib
import random
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from spec_local.bench import prompts
from spec_local.datastore import text_files

EVERY = 20
"""One topic, or passage, of so many is held out."""
LONGEST = 1200
"""Characters of a passage, some 200 words."""
_SHORTEST = 160  # less is too little to ask about
_FROM_PASSAGES = 0.5  # of the questions that can be about one
_HURRIED = 0.08  # of the questions that hold no text, written without care
_TRIES = 8  # draws of a passage that suits the category

_SLOT = re.compile(r"\{(?:(\d+)-(\d+)|([a-z_]+))(#\w+)?(?:([*/])(\d+))?\}")
_FENCED = re.compile(r"^```[^\n`]*\n.+?^```$", re.MULTILINE | re.DOTALL)
_PROMPT_FILES = {".toml": ["[[prompt]]"], ".jsonl": ['"category"', '"name"', '"text"']}  # and what they hold


@dataclass(frozen=True, slots=True)
class Question:
    """What main is asked; of which category; and whether the answer is for measuring, and never learned from."""

    category: str
    text: str
    held_out: bool


@dataclass(frozen=True, slots=True)
class FromFiles:
    """Questions as a person wrote them, passages to ask about, and the files that gave neither, by the reason."""

    questions: list[Question] = field(default_factory=list)
    passages: list[str] = field(default_factory=list)
    skipped: dict[str, list[Path]] = field(default_factory=dict)


def question(seed: int, i: int, passages: Sequence[str] = ()) -> Question:
    """The i-th question; the same for the same arguments, in any process. Any eight in a row from a multiple of eight are
    of eight categories.

    Args:
        passages: texts that half of the questions of the categories that need one are about; one with a fenced block of
            code gives that block to be edited. ``cut`` makes them of long texts.
    """
    grammar = _grammar()
    block, place = divmod(i, len(grammar.forms))
    categories = list(grammar.forms)
    random.Random(f"{seed} {block}").shuffle(categories)
    category = categories[place]
    rng = random.Random(f"{seed} {block} {place}")

    held_out = rng.random() < 1 / EVERY
    forms = grammar.forms[category]
    known: dict[str, str] = {}
    slot = "{code}" if category == "code editing" else "{text}"
    about = [form for form in forms if form.count(slot) == 1]
    if about and rng.random() < _FROM_PASSAGES:
        for passage in rng.choices(passages, k=_TRIES) if passages else ():
            code = _FENCED.search(passage)
            if (code is not None) == (slot == "{code}"):
                forms, held_out = about, is_held_out(passage)
                known[slot] = code[0] if code else passage.strip()
                break
    text = _Pen(grammar, rng, held_out, known).fill(rng.choice(forms)).strip()
    if not about and rng.random() < _HURRIED:
        text = _hurried(text, rng)
    return Question(category, text, held_out)


def from_files(paths: Iterable[Path]) -> FromFiles:
    """What a person's files give: those of prompts (.toml, .jsonl, as ``bench.prompts.load`` has them) questions as they
    are, any other text passages, code in a fence.

    Raises:
        InvalidRequest: a path does not exist, or a file of prompts says something impossible.
    """
    found = FromFiles()
    for path in text_files.list_files(paths):
        kind = path.suffix.lower()
        try:
            text = text_files.read_text(path)
            if kind in _PROMPT_FILES and all(mark in text for mark in _PROMPT_FILES[kind]):
                for prompt in prompts.load(path):
                    found.questions.append(Question(prompt.category, prompt.text, is_held_out(prompt.text)))
                continue
            passages = cut(text)
            if not passages:
                raise text_files.Skipped("almost empty")
            if language := _grammar().fences.get(kind[1:]):
                passages = [f"```{language}\n{part}\n```" for part in passages if "```" not in part]
            found.passages.extend(passages)
        except text_files.Skipped as why:
            found.skipped.setdefault(str(why), []).append(path)
    return found


def cut(text: str) -> list[str]:
    """Passages of at most LONGEST characters, without what is too short to ask about: cut between paragraphs, and where
    one is longer than that, between lines, sentences or words."""
    parts = _packed("\n".join(line.rstrip() for line in text.splitlines()), ["\n\n", "\n", ". ", " "])
    return [part for part in (part.strip("\n") for part in parts) if len(part) >= _SHORTEST]


def _packed(text: str, separators: Sequence[str]) -> list[str]:
    if len(text) <= LONGEST:
        return [text]
    if not separators:
        return [text[start : start + LONGEST] for start in range(0, len(text), LONGEST)]
    parts: list[str] = []
    for whole in text.split(separators[0]):
        for part in _packed(whole, separators[1:]):
            if parts and len(parts[-1]) + len(separators[0]) + len(part) <= LONGEST:
                parts[-1] += separators[0] + part
            else:
                parts.append(part)
    return parts


def is_held_out(text: str) -> bool:
    """Whether a question, or a passage, is for measuring; the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % EVERY == 0


def _hurried(text: str, rng: random.Random) -> str:
    """As typed on a phone: small letters, no apostrophes, and in some words two letters in each other's place."""
    words = text.lower().replace("'", "").split(" ")
    for i, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and rng.random() < 0.12:
            at = rng.randrange(1, len(word) - 2)
            words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Grammar:
    """Forms by category; phrases (with slots) by name; topics (as they are) by name, those to learn from and those held
    out; and how a fence names the language of a file, by the ending of its name."""

    forms: dict[str, list[str]]
    phrases: dict[str, list[str]]
    topics: dict[str, tuple[list[str], list[str]]]
    fences: dict[str, str]


@cache
def _grammar() -> _Grammar:
    text = (files("spec_local.training") / "questions.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    topics = {}
    for name, entries in tables["topics"].items():
        every = entries.splitlines() if isinstance(entries, str) else [entry.strip() for entry in entries]
        held = every[EVERY // 2 - 1 :: EVERY]
        topics[name] = ([entry for entry in every if entry not in held], held)
    return _Grammar(tables["forms"], tables["phrases"], topics, tables["fences"])


class _Pen:
    """Fills in one question.

    Slots: ``{town}`` a phrase or a topic of that list, not the same twice while there are others; ``{3-90}`` a number
    from 3 to 90; ``{town#a}`` the same wherever it stands in the question; ``{line*4}`` four with blanks between them,
    ``{line/4}`` on a line each.
    """

    def __init__(self, grammar: _Grammar, rng: random.Random, held_out: bool, known: dict[str, str]) -> None:
        self._grammar, self._rng, self._held_out, self._known = grammar, rng, held_out, known
        self._used: set[tuple[str, str]] = set()

    def fill(self, form: str) -> str:
        return _SLOT.sub(self._slot, form)

    def _slot(self, match: re.Match[str]) -> str:
        low, high, name, label, joint, times = match.groups()
        if match[0] in self._known:
            return self._known[match[0]]
        drawn = [
            self._drawn(name) if name else str(self._rng.randint(int(low), int(high)))
            for _ in range(int(times or 1))
        ]
        text = ("\n" if joint == "/" else " ").join(drawn)
        if label:
            self._known[match[0]] = text
        return text

    def _drawn(self, name: str) -> str:
        if name in self._grammar.topics:
            return self._fresh(name, self._grammar.topics[name][self._held_out])
        return self.fill(self._fresh(name, self._grammar.phrases[name]))

    def _fresh(self, name: str, entries: Sequence[str]) -> str:
        text = self._rng.choice([e for e in entries if (name, e) not in self._used] or entries)
        self._used.add((name, text))
        return text
