"""The user's folders for specdec's own files, also where no home directory is known, as in a container."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal

import platformdirs

Kind = Literal["cache", "config", "data", "state"]
_NOWHERE = Path(os.devnull)  # nothing below it can be read or written


def user_folder(kind: Kind) -> Path:
    """The folder for files of one kind; it may not exist, and it may be impossible to make it.

    Without a home directory and without the XDG variable of this kind, it is in the temporary folder.
    """
    with contextlib.suppress(RuntimeError):  # no home directory is known
        folder = Path(getattr(platformdirs, f"user_{kind}_dir")("specdec"))
        if folder.is_absolute():  # not if HOME is relative
            return folder
    return _private_folder() / kind


def _private_folder() -> Path:
    """A folder in the temporary one that no other user can read or replace."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"specdec-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    return _NOWHERE
