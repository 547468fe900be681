"""What was found out about a library of kernels on this machine: JSON files beside it.

A user who may not write there has them in a folder of their own.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from spec_local.system import machine
from spec_local.system.files import write_atomically
from spec_local.system.folders import user_folder
from spec_local.system.json_file import JsonRecord, read_record

Kind = TypeVar("Kind", bound=JsonRecord)
_MAX_BYTES = 1 << 20  # of a record; one has some thousand


def machine_digest() -> str:
    """Return a digest of the processor's features and the build of llama.cpp, as 16 hexadecimal digits."""
    known = [*sorted(machine.processor_features()), machine.llama_cpp_build()]
    return hashlib.sha256(" ".join(known).encode()).hexdigest()[:16]


def paths(library: Path, name: str = "") -> list[Path]:
    """Return where a record may be: beside the library, then in the user's folder."""
    own = user_folder("cache") / "kernels"
    return [folder / f"{library.stem}{name}.json" for folder in (library.parent, own)]


def read(library: Path, kind: type[Kind], name: str = "") -> Iterator[Kind]:
    """Yield the records that can be read, of this machine or another one."""
    for path in paths(library, name):
        with contextlib.suppress(OSError, ValueError):
            yield read_record(path, kind, _MAX_BYTES)


def forget(library: Path) -> None:
    """Remove all records of a library, which is about to change."""
    for path in paths(library):
        for record in path.parent.glob(f"{library.stem}*.json"):
            record.unlink(missing_ok=True)


def write(library: Path, record: JsonRecord, name: str = "") -> None:
    """Write a record.

    Raises:
        OSError: neither folder is writable.
    """
    beside, own = paths(library, name)
    data = record.model_dump_json(indent=1).encode()
    try:
        _write(beside, data)
    except OSError:
        _write(own, data)


def _write(path: Path, data: bytes) -> None:
    write_atomically(path, data)
    path.chmod(0o644)  # readable by all users of this environment, like the library
