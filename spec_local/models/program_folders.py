"""The folders in which other programs keep models on this machine, read without failing."""

import os
import sys
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from spec_local.errors import InvalidRequest
from spec_local.system.files import expanded, read_bytes

_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of ollama as a service on Linux
_MAX_BYTES = 1 << 20  # of a settings file or a manifest; usual ones have a few thousand


def ollama() -> list[Path]:
    """Folders with the manifests and blobs of ollama."""
    return _expanded(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models", _OLLAMA_SERVICE)


def lm_studio() -> list[Path]:
    """Folders with USER/REPO/FILE.gguf of LM Studio."""
    pointers = _expanded("~/.lmstudio-home-pointer")
    homes = _expanded(*map(_text, pointers), "~/.lmstudio", "~/.cache/lm-studio")
    settings = [read_json(home / "settings.json") for home in homes]
    moved = [each.get("downloadsFolder") for each in settings if isinstance(each, dict)]
    return _expanded(*[each for each in moved if isinstance(each, str)], *[home / "models" for home in homes])


def llama_cpp() -> list[Path]:
    """Folders with USER_REPO_FILE.gguf of llama.cpp."""
    usual = "~/Library/Caches/llama.cpp" if sys.platform == "darwin" else "~/.cache/llama.cpp"
    base = os.environ.get("XDG_CACHE_HOME")
    if base and sys.platform != "darwin":
        usual = f"{base}/llama.cpp"
    return _expanded(os.environ.get("LLAMA_CACHE") or usual)


def content(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the entries of a folder that match a pattern, sorted; none if it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except (OSError, ValueError):  # the latter: a name with a null character
        return []


def size_of(path: Path) -> int | None:
    """Bytes of a regular file; None if it is not one, or cannot be read."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def read_json(path: Path) -> Any:
    """The content of a small JSON file; None if there is none."""
    try:
        return from_json(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        return read_bytes(path, _MAX_BYTES).decode("utf-8-sig").strip()
    except (OSError, ValueError):
        return ""


def _expanded(*folders: Path | str) -> list[Path]:
    """The folders that are named, each once; a home directory may be unknown."""
    found: dict[Path, None] = {}
    for folder in folders:
        try:
            if folder:
                found[expanded(folder)] = None
        except (InvalidRequest, OSError, ValueError):
            continue
    return list(found)
