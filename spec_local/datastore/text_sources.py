"""Files of text that a person wants to be guessed from: which they are, and their tokens."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spec_local.datastore.text_format import Text
from spec_local.errors import InvalidRequest
from spec_local.llama.vocabulary import Vocabulary

LARGEST = 1 << 20
"""Bytes of a file; what is larger is seldom written by hand."""
_SHORTEST = 4  # tokens of a text that can be found
_NOBODYS = {"node_modules", "__pycache__", "site-packages"}


@dataclass(frozen=True, slots=True)
class Found:
    """Texts, and the files that are none, by the reason."""

    texts: list[Text] = field(default_factory=list)
    skipped: dict[str, list[Path]] = field(default_factory=dict)


def files(paths: Iterable[Path]) -> list[Path]:
    """The files that are named, and those in folders that are, in order; of folders nothing hidden, and no links to others.

    Raises:
        InvalidRequest: a path does not exist.
    """
    found: dict[Path, None] = {}  # in order, and each once
    for path in paths:
        if not path.exists():
            raise InvalidRequest(f"{path} does not exist: check the path")
        if not path.is_dir():
            found[path] = None
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if name[0] != "." and name not in _NOBODYS)
            found.update(dict.fromkeys(Path(folder, name) for name in sorted(names) if name[0] != "."))
    return list(found)


def read(
    files: Sequence[Path], vocabulary: Vocabulary, most: int, progress: Callable[[], None] = lambda: None
) -> Found:
    """The tokens of files, labelled by their paths, so that a newer state of a file takes the place of an older one.

    Args:
        most: tokens in all; what comes after that is skipped.
        progress: called after each file.
    """
    found, room = Found(), most
    for path in files:
        try:
            tokens = vocabulary.tokenize(text(path)) if room else []
            if len(tokens) >= room:
                room = 0
                raise Skipped(f"there is room for {most:,} tokens")
            if len(tokens) < _SHORTEST:
                raise Skipped("next to empty")
            found.texts.append(Text.of(tokens, str(path.resolve())))
            room -= len(tokens) + 1
        except Skipped as why:
            found.skipped.setdefault(str(why), []).append(path)
        progress()
    return found


class Skipped(Exception):
    """A file that gives no text; says why."""


def text(path: Path) -> str:
    """The text of a file.

    Raises:
        Skipped: it is none, cannot be read, or is larger than `LARGEST`.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            raise Skipped("no ordinary file")
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise Skipped(f"it cannot be read ({error.strerror})") from None
    if len(raw) > LARGEST:
        raise Skipped(f"larger than {LARGEST >> 20} MiB")
    try:
        if b"\0" in raw:
            raise ValueError
        return raw.decode("utf-8-sig")
    except ValueError:
        raise Skipped("no text in UTF-8") from None
