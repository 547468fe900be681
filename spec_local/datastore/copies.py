"""The list of what was made from kept answers, so that clearing them reaches all of it.

A training writes a thousand times the size of the answers, into a folder beside its head, wherever that is.
It adds the folder to this list before it creates it, and never creates it twice: once the folder is deleted,
whatever the training still wants to write there fails. Heads that have learned from the answers are listed,
too. The list is a file in the datastore's folder, whose lock its writers hold.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spec_local.system.files import NotRegular, read_bytes, replacing

LIST = "copies"
"""Name of the file: absolute paths, each followed by a zero byte."""
OWN = "own"
"""Name of a folder with copies, in a folder whose name ends with `TRAINING`."""
TRAINING = ".training"
CHECKPOINT = "checkpoint.pt"
"""Name of the file beside `OWN` with the state of a training, which nothing continues without the answers."""
_MAX_BYTES = 1 << 20  # of the list: thousands of paths


@dataclass(frozen=True, slots=True)
class Made:
    """What was made from the answers that were cleared.

    deleted, missing, failed: folders with copies that were deleted, that are not where they were, and that
    could not be deleted. heads: files of heads, which stay.
    """

    deleted: list[Path] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    failed: list[Path] = field(default_factory=list)
    heads: list[Path] = field(default_factory=list)


def add(folder: Path, path: Path) -> None:
    """List a folder with copies in the datastore's folder.

    Raises:
        OSError: the list cannot be written.
    """
    replace(folder, path, path)


def replace(folder: Path, path: Path, head: Path) -> None:
    """List a head in place of the folder with the copies that it was made from; raises as `add`."""
    known = _read(folder)
    changed = [each for each in known if each != path.absolute()] + [head.absolute()]
    if sorted(changed) != sorted(known):
        _write(folder, list(dict.fromkeys(changed)))


def delete_all(folder: Path) -> Made:
    """Delete all folders with copies that are listed; those that could not be deleted stay listed.

    Raises:
        OSError: the list cannot be read or written.
    """
    made = Made()
    for path in _read(folder):
        if not _is_own(path):
            if path.is_file():
                made.heads.append(path)
        elif not path.parent.is_dir():
            made.missing.append(path)
        else:
            try:
                if delete(path):
                    made.deleted.append(path)
                path.with_name(CHECKPOINT).unlink(missing_ok=True)
            except OSError:
                made.failed.append(path)
    if made.failed:
        _write(folder, made.failed)
    return made


def delete(path: Path) -> bool:
    """Delete a folder with copies, with the rest of one that was being deleted; returns whether they had any.

    Raises:
        OSError: it cannot be deleted.
    """
    moved = path.with_name(f"{OWN}.deleted")
    found = False
    for each in (moved, path):
        with contextlib.suppress(FileNotFoundError):
            each.rename(moved)  # at once: a training that is writing cannot add to it meanwhile
        if moved.exists():
            found = found or any(moved.iterdir())
            shutil.rmtree(moved)
    return found


def _is_own(path: Path) -> bool:
    return path.name == OWN and path.parent.name.endswith(TRAINING)


def _read(folder: Path) -> list[Path]:
    try:
        content = read_bytes(folder / LIST, _MAX_BYTES)
    except (FileNotFoundError, NotRegular):
        return []
    paths = [Path(os.fsdecode(each)) for each in content.split(b"\0") if each]
    return [path for path in paths if path.is_absolute()]


def _write(folder: Path, paths: Iterable[Path]) -> None:
    with replacing(folder / LIST) as temporary:
        temporary.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
