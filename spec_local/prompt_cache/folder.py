"""The folder of the files: their names, their limit, what other processes left over; show and clear them.

`<folder>/<identity>/<key>.prompt`, both in hexadecimal, and `about.json`, which names the model, beside them.
Several processes use the folder at once, without locks: files appear by renaming, complete, and may vanish at
any moment. Names that are not of this form are not touched.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spec_local.system.files import ABANDONED, read_bytes, write_atomically
from spec_local.system.folders import user_folder

_SUFFIX = ".prompt"
_ABOUT, _MAX_ABOUT = "about.json", 1 << 16
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_ENTRY = re.compile(r"[0-9a-f]{32}\.prompt")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.prompt\..+\.part")  # see `replacing`

_DEFAULT_LIMIT, _DEFAULT_SHARE = 2 << 30, 0.05


@dataclass(frozen=True)
class Usage:
    """The files of one identity.

    name: of the model, "" if unknown. last_used: seconds since the epoch.
    """

    identity_dir: Path
    name: str
    n_files: int
    n_bytes: int
    last_used: float


def default_folder() -> Path:
    return user_folder("cache") / "prompts"


def default_limit(folder: Path) -> int:
    """2 GiB, or 5 % of the free space of the disk if that is less."""
    for existing in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return min(_DEFAULT_LIMIT, int(shutil.disk_usage(existing).free * _DEFAULT_SHARE))
    return 0


def usage(folder: Path) -> list[Usage]:
    """The files of each identity that has some, the most recently used identity first."""
    found = []
    for identity in _identities(folder):
        facts = [facts for path, facts in _files(identity) if path.endswith(_SUFFIX)]
        if facts:
            n_bytes, last_used = sum(each.st_size for each in facts), max(each.st_mtime for each in facts)
            found.append(Usage(identity, _name(identity), len(facts), n_bytes, last_used))
    return sorted(found, key=lambda each: each.last_used, reverse=True)


def clear(folder: Path) -> int:
    """Delete all files of the cache; returns how many bytes were freed."""
    freed = 0
    for identity in _identities(folder):
        for path, facts in list(_files(identity)):
            with contextlib.suppress(OSError):
                os.unlink(path)
                freed += facts.st_size
        with contextlib.suppress(OSError):
            (identity / _ABOUT).unlink(missing_ok=True)
            identity.rmdir()
    return freed


def file_name(key: bytes) -> str:
    return f"{key.hex()}{_SUFFIX}"


def is_entry(name: str) -> bool:
    return bool(_ENTRY.fullmatch(name))


def prepare(identity_dir: Path, name: str) -> None:
    """Create the folder of an identity, which only the user can read.

    Raises:
        OSError: it cannot be created.
    """
    about = identity_dir / _ABOUT
    if about.exists():
        return
    for path in (identity_dir.parent, identity_dir):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(about, json.dumps({"name": name}).encode())


def make_room(folder: Path, size: int, limit: int, kept: Collection[Path]) -> bool:
    """Delete the least recently used files, so that another of `size` bytes stays within the limit.

    kept: files that are not deleted. False: there is no room without them, and nothing was deleted.
    """
    files = [file for identity in _identities(folder) for file in _files(identity)]
    excess = sum(facts.st_size for _, facts in files) + size - limit
    if excess <= 0:
        return True
    not_deleted = {str(path) for path in kept}
    victims = []
    for path, facts in sorted(files, key=lambda file: file[1].st_mtime_ns):
        if path not in not_deleted and path.endswith(_SUFFIX):
            victims.append(path)
            excess -= facts.st_size
            if excess <= 0:
                break
    else:
        return False
    for path in victims:
        with contextlib.suppress(OSError):  # it vanished, or another process may not delete it
            os.unlink(path)
    return True


def mark_used(paths: Iterable[tuple[Path, int]]) -> None:
    """Set the time of last use of files to now; less a microsecond for each token before the end of a file.

    So the end of a history is deleted before its beginning, whatever was used in between.
    """
    now = time.time_ns()
    for path, end in paths:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now - end * 1000), follow_symlinks=False)


def remove_left_overs(folder: Path) -> None:
    """Delete temporary files that processes which were killed have left, an hour after their last write."""
    for identity in _identities(folder):
        for path, facts in list(_files(identity)):
            if not path.endswith(_SUFFIX) and time.time() - facts.st_mtime > ABANDONED:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _identities(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if _IDENTITY.fullmatch(each.name) and each.is_dir(follow_symlinks=False):
                yield Path(each.path)


def _files(identity: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Entries and temporary files; links, but no pipes, devices or folders."""
    with contextlib.suppress(OSError), os.scandir(identity) as found:
        for each in found:
            if is_entry(each.name) or _TEMPORARY.fullmatch(each.name):
                with contextlib.suppress(OSError):
                    facts = each.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
                        yield each.path, facts


def _name(identity: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        about = json.loads(read_bytes(identity / _ABOUT, _MAX_ABOUT))
        if isinstance(about, dict):
            return str(about.get("name", ""))
    return ""
