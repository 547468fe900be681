"""What the benchmarks share: prompts, runs that take turns, ratios with their uncertainty, tables.

A machine that others use too is 10 times slower for seconds at a time. So nothing here is quoted as one
absolute time: what is compared runs in turns, and a ratio comes with a 95 % interval.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from spec_local.bench import report
from spec_local.chat.template import ChatTemplate
from spec_local.llama.model import Model

T = TypeVar("T")

_ORCHARD = """\
The orchard above Velden was planted in 1923 by two sisters, Marta and Ilse Brenner, who had inherited a stony \
slope that nobody wanted. They chose old varieties of pear, because these root deeply, and built dry-stone terraces \
to hold the soil. By 1940 there were 312 trees. After the war the terraces fell into disrepair, and in 1968 a \
landslide took the lowest of the seven. Since 2004 a society of villagers has looked after what remains: 187 trees, \
the press house, and a cellar in which perry is still made every October."""

_CLASS = """\
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count, price):
        self.items[name] = {"count": count, "price": price}

    def remove(self, name, count):
        self.items[name]["count"] -= count

    def total(self):
        return sum(item["count"] * item["price"] for item in self.items.values())
"""

PROMPTS: Mapping[str, str] = {
    "code": "Write a Python class LRUCache with get and put in O(1), with type hints and a docstring for "
    "every method, and then a few unit tests for it.",
    "edit": f"Add type hints to this class and raise a KeyError with a clear message when an item is unknown. "
    f"Give the whole class.\n\n```python\n{_CLASS}```",
    "prose": "Tell the story of a lighthouse keeper who finds a letter in a bottle that is addressed to her, in "
    "the past tense and with little dialogue.",
    "translation": f"Translate this text into French:\n\n{_ORCHARD}",
    "summary": f"Summarise this text in three points, and quote for each the sentence it rests on, word for "
    f"word:\n\n{_ORCHARD}",
}
"""One question per kind of text; what can be guessed differs a lot between them."""


def chat_text(model: Model, question: str) -> str:
    """The question in the model's own chat template, up to where the answer begins."""
    return ChatTemplate(model).render([{"role": "user", "content": question}])


def tokens_of(model: Model, text: str) -> list[int]:
    """As llama.cpp's own programs read a prompt."""
    return model.vocabulary.tokenize(text, add_special=True, parse_special=True)


def take_turns(
    ways: Mapping[str, Callable[[], T]], runs: int, *, warm_up: bool = True, label: str = ""
) -> dict[str, list[T]]:
    """Run A B A B …; results by way, in order. A first round, which is not counted, warms everything up."""
    results: dict[str, list[T]] = {way: [] for way in ways}
    for round_ in range(-1 if warm_up else 0, runs):
        for way, run in ways.items():
            note(f"{label}{'warm-up' if round_ < 0 else f'run {round_ + 1}/{runs}'}: {way}")
            result = run()
            if round_ >= 0:
                results[way].append(result)
    note("")
    return results


def note(text: str) -> None:
    """A line that the next one overwrites, where someone is watching."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def ratio(ours: Sequence[float], theirs: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """Ratio of the medians, and the 95 % bootstrap interval of it; rounds are drawn, so that pairs stay pairs."""
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    picks = np.random.default_rng(0).integers(0, len(a), (draws, len(a)))
    low, high = np.percentile(np.median(a[picks], axis=1) / np.median(b[picks], axis=1), [2.5, 97.5])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.log(values).mean()))


def interval(figures: tuple[float, float, float]) -> str:
    return f"{figures[0]:.3f} [{figures[1]:.3f}, {figures[2]:.3f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table; numbers stand on the right."""
    cells = [
        [c if isinstance(c, str) else f"{c:.3g}" if isinstance(c, float) else str(c) for c in r] for r in rows
    ]
    print(report.table(head, cells) + "\n", flush=True)


def machine() -> str:
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()}{load}"


def numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """For argparse: ``3,7`` to a list."""

    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = "comma-separated numbers"
    return parse


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
