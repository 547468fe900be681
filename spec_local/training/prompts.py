"""Synthetic training prompts in the benchmark's categories, and prompts and passages from the user.

``prompts.toml`` contains a template grammar: templates for each category, with slots for topics and phrases.
Topics, not prompts, are held out, so that a draft model is evaluated on topics that are not in its training
data. Some prompts are about a passage instead: an earlier answer of the main model, or text from the user's
files.
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

from spec_local.bench.prompts import load
from spec_local.datastore import text_files

HOLD_OUT_EVERY = 20
"""One of this number of topics, passages and user prompts is held out."""
MAX_PASSAGE = 1200
"""Maximum length in characters, about 200 words."""
_MIN_PASSAGE = 160  # minimum length in characters; less is too short to ask about
_PASSAGE_SHARE = 0.5  # share of the prompts that can be about a passage
_TYPO_SHARE = 0.08  # share of the prompts without a text that get typing errors
_TRIES = 8  # number of tries to draw a passage that suits the category

_SLOT = re.compile(r"\{(?:(\d+)-(\d+)|([a-z_]+))(#\w+)?(?:([*/])(\d+))?\}")
_FENCED = re.compile(r"^```[^\n`]*\n.+?^```$", re.MULTILINE | re.DOTALL)
_PROMPT_FILES = {".toml": ["[[prompt]]"], ".jsonl": ['"category"', '"name"', '"text"']}  # what they contain


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt.

    held_out: its answer is used for evaluation only, not for training. tokens: those of a whole conversation
    before its next answer, in place of `text`.
    """

    category: str
    text: str
    held_out: bool
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class UserTexts:
    """Prompts and passages from the user's files, and skipped files by reason."""

    prompts: list[TrainingPrompt] = field(default_factory=list)
    passages: list[str] = field(default_factory=list)
    skipped: dict[str, list[Path]] = field(default_factory=dict)


def synthetic_prompt(seed: int, i: int, passages: Sequence[str] = ()) -> TrainingPrompt:
    """Return the i-th prompt, determined by the arguments; each block of eight contains every category once.

    Args:
        passages: texts for half of the prompts in the categories that need one; a fenced code block in a
            passage becomes the code in a code editing prompt. `split_passages` creates them from longer
            texts.
    """
    grammar = _grammar()
    block, position = divmod(i, len(grammar.templates))
    categories = list(grammar.templates)
    random.Random(f"{seed} {block}").shuffle(categories)
    category = categories[position]
    rng = random.Random(f"{seed} {block} {position}")

    held_out = rng.random() < 1 / HOLD_OUT_EVERY
    templates = grammar.templates[category]
    filled: dict[str, str] = {}
    slot = "{code}" if category == "code editing" else "{text}"
    with_passage = [template for template in templates if template.count(slot) == 1]
    if with_passage and rng.random() < _PASSAGE_SHARE:
        for passage in rng.choices(passages, k=_TRIES) if passages else ():
            code = _FENCED.search(passage)
            if (code is not None) == (slot == "{code}"):
                templates, held_out = with_passage, is_held_out(passage)
                filled[slot] = code[0] if code else passage.strip()
                break
    text = _TemplateFiller(grammar, rng, held_out, filled).fill(rng.choice(templates)).strip()
    if not with_passage and rng.random() < _TYPO_SHARE:
        text = _with_typos(text, rng)
    return TrainingPrompt(category, text, held_out)


def read_user_texts(paths: Iterable[Path]) -> UserTexts:
    """Read prompts from prompt files, and passages from other files; code passages are fenced.

    paths: files and folders; prompt files are .toml and .jsonl, as for `spec_local.bench.prompts.load`.

    Raises:
        InvalidRequest: a path does not exist, or a prompt file is invalid.
    """
    found = UserTexts()
    for path in text_files.list_files(paths):
        kind = path.suffix.lower()
        try:
            text = text_files.read_text(path)
            if kind in _PROMPT_FILES and all(mark in text for mark in _PROMPT_FILES[kind]):
                found.prompts.extend(
                    TrainingPrompt(p.category, p.text, is_held_out(p.text)) for p in load(path)
                )
                continue
            passages = split_passages(text)
            if not passages:
                raise text_files.Skipped("almost empty")
            if language := _grammar().fences.get(kind[1:]):
                passages = [f"```{language}\n{part}\n```" for part in passages if "```" not in part]
            found.passages.extend(passages)
        except text_files.Skipped as why:
            found.skipped.setdefault(str(why), []).append(path)
    return found


def split_passages(text: str) -> list[str]:
    """Split a text into passages of at most MAX_PASSAGE characters, and drop those that are too short.

    Texts are split between paragraphs, and longer paragraphs between lines, sentences or words.
    """
    parts = _pack("\n".join(line.rstrip() for line in text.splitlines()), ["\n\n", "\n", ". ", " "])
    return [part for part in (part.strip("\n") for part in parts) if len(part) >= _MIN_PASSAGE]


def _pack(text: str, separators: Sequence[str]) -> list[str]:
    if len(text) <= MAX_PASSAGE:
        return [text]
    if not separators:
        return [text[start : start + MAX_PASSAGE] for start in range(0, len(text), MAX_PASSAGE)]
    parts: list[str] = []
    for piece in text.split(separators[0]):
        for part in _pack(piece, separators[1:]):
            if parts and len(parts[-1]) + len(separators[0]) + len(part) <= MAX_PASSAGE:
                parts[-1] += separators[0] + part
            else:
                parts.append(part)
    return parts


def is_held_out(text: str) -> bool:
    """Return whether a prompt or passage is held out; depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HOLD_OUT_EVERY == 0


def _with_typos(text: str, rng: random.Random) -> str:
    """Make a text look as if typed on a phone: lower case, no apostrophes, some swapped letters."""
    words = text.lower().replace("'", "").split(" ")
    for i, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and rng.random() < 0.12:
            at = rng.randrange(1, len(word) - 2)
            words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The tables of ``prompts.toml``.

    templates: by category. phrases: by name; they have slots. topics: by name, those for training and those
    held out. fences: language names by file extension.
    """

    templates: dict[str, list[str]]
    phrases: dict[str, list[str]]
    topics: dict[str, tuple[list[str], list[str]]]
    fences: dict[str, str]


@cache
def _grammar() -> _Grammar:
    text = (files("spec_local.training") / "prompts.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    topics = {}
    for name, entries in tables["topics"].items():
        listed = entries.splitlines() if isinstance(entries, str) else [entry.strip() for entry in entries]
        held_out = listed[HOLD_OUT_EVERY // 2 - 1 :: HOLD_OUT_EVERY]
        topics[name] = ([entry for entry in listed if entry not in held_out], held_out)
    return _Grammar(tables["templates"], tables["phrases"], topics, tables["fences"])


class _TemplateFiller:
    """Fills the slots of one prompt.

    ``{town}``: a phrase or topic from that list, without repetition while there are others. ``{3-90}``: a
    number from 3 to 90. ``{town#a}``: the same text wherever it occurs in the prompt. ``{line*4}``: four
    entries, separated by spaces; ``{line/4}``: separated by newlines.
    """

    def __init__(self, grammar: _Grammar, rng: random.Random, held_out: bool, filled: dict[str, str]) -> None:
        self._grammar, self._rng, self._held_out, self._filled = grammar, rng, held_out, filled
        self._used: set[tuple[str, str]] = set()

    def fill(self, template: str) -> str:
        return _SLOT.sub(self._slot, template)

    def _slot(self, match: re.Match[str]) -> str:
        low, high, name, label, separator, times = match.groups()
        if match[0] in self._filled:
            return self._filled[match[0]]
        drawn = [
            self._draw(name) if name else str(self._rng.randint(int(low), int(high)))
            for _ in range(int(times or 1))
        ]
        text = ("\n" if separator == "/" else " ").join(drawn)
        if label:
            self._filled[match[0]] = text
        return text

    def _draw(self, name: str) -> str:
        if name in self._grammar.topics:
            return self._draw_unused(name, self._grammar.topics[name][self._held_out])
        return self.fill(self._draw_unused(name, self._grammar.phrases[name]))

    def _draw_unused(self, name: str, entries: Sequence[str]) -> str:
        text = self._rng.choice([e for e in entries if (name, e) not in self._used] or entries)
        self._used.add((name, text))
        return text
