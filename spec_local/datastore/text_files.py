"""Find, read and tokenize the text files that a user adds to the datastore."""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spec_local.datastore.file_format import StoredText
from spec_local.errors import InvalidRequest
from spec_local.llama.vocabulary import Vocabulary
from spec_local.system.files import NotRegular, read_bytes

MAX_FILE_SIZE = 1 << 20
"""Maximum size in bytes; larger files are rarely written by hand."""
_MIN_TOKENS = 4  # minimum length of a text that a search can find
_IGNORED_FOLDERS = {"node_modules", "__pycache__", "site-packages"}


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Tokenized files, and the skipped files by reason."""

    texts: list[StoredText] = field(default_factory=list)
    skipped: dict[str, list[Path]] = field(default_factory=dict)


class Skipped(Exception):
    """A file that is not used; the message is the reason."""


def list_files(paths: Iterable[Path]) -> list[Path]:
    """List files, including those in folders, sorted; hidden files and links to folders are left out.

    Raises:
        InvalidRequest: a path does not exist.
    """
    found: dict[Path, None] = {}  # an ordered set
    for path in paths:
        if not path.exists():
            raise InvalidRequest(f"{path} does not exist: check the path")
        if not path.is_dir():
            found[path] = None
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if name[0] != "." and name not in _IGNORED_FOLDERS)
            found.update(dict.fromkeys(Path(folder, name) for name in sorted(names) if name[0] != "."))
    return list(found)


def tokenize_files(
    files: Sequence[Path],
    vocabulary: Vocabulary,
    max_tokens: int,
    on_progress: Callable[[], None] = lambda: None,
) -> TextFiles:
    """Tokenize files, labelled by their paths, so that a new version of a file replaces the old one.

    Args:
        max_tokens: maximum number of tokens in all files together; files beyond that are skipped.
        on_progress: called after each file.
    """
    found, room = TextFiles(), max_tokens
    for path in files:
        try:
            tokens = vocabulary.tokenize(read_text(path)) if room else []
            if len(tokens) >= room:
                room = 0
                raise Skipped(f"beyond the limit of {max_tokens:,} tokens")
            if len(tokens) < _MIN_TOKENS:
                raise Skipped("almost empty")
            found.texts.append(StoredText.of(tokens, str(path.resolve())))
            room -= len(tokens) + 1
        except Skipped as reason:
            found.skipped.setdefault(str(reason), []).append(path)
        on_progress()
    return found


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        Skipped: it is not UTF-8 text, cannot be read, or is larger than `MAX_FILE_SIZE`.
    """
    try:
        raw = read_bytes(path, MAX_FILE_SIZE)
    except NotRegular:
        raise Skipped("not a regular file") from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise Skipped(f"larger than {MAX_FILE_SIZE >> 20} MiB") from None
        raise Skipped(f"cannot be read ({error.strerror})") from None
    try:
        if b"\0" in raw:
            raise ValueError
        return raw.decode("utf-8-sig")
    except ValueError:
        raise Skipped("not UTF-8 text") from None
