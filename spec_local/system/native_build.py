"""Compile C++ libraries against the installed llama.cpp, into a folder where they are found again.

A wheel of this package may contain some, compiled for its own version of llama.cpp.
"""

import contextlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spec_local.system import machine
from spec_local.system.files import ABANDONED
from spec_local.system.folders import user_folder

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_MAX_QUOTED = 200  # maximum number of characters quoted from a compiler message
_TEMPORARY = ".build-"


def folders(kind: str) -> list[Path]:
    """Return the folders for a kind of library: in the Python environment, then in the user's data folder."""
    share = Path(sys.prefix) / "share" / "specdec"
    return [share / kind, user_folder("data") / kind]


def prebuilt(kind: str) -> Path:
    """Return the folder for a kind of library within this package; only a wheel has it."""
    return Path(__file__).parents[1] / "prebuilt" / kind


def find(name: str, kind: str, others: Sequence[Path]) -> Path | None:
    """Return the library of this name, from the package or one of the other folders, or None."""
    return next((f / name for f in (prebuilt(kind), *others) if (f / name).is_file()), None)


def compiler() -> list[str]:
    """Return the C++ compiler command, empty if none is found. CXX may include arguments (``ccache g++``)."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen if shutil.which(chosen[0]) else []
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), [])


def headers() -> Path | None:
    """Return the folder of llama.cpp's public headers, or None if it is not found."""
    listed = importlib.metadata.files("llama-cpp-python") or []
    near = [Path(str(file.locate())).parent for file in listed if file.name == "ggml.h"]
    return next(
        (f for f in (*near, machine.llama_cpp_folder().parent / "include") if (f / "ggml.h").is_file()), None
    )


def _workplace(choices: Sequence[Path], stack: contextlib.ExitStack) -> tuple[Path, Path]:
    """Return the first writable folder and a temporary folder in it, which `stack` deletes.

    Raises:
        OSError: none of the folders is writable.
    """
    *others, last = choices
    for folder in others:
        with contextlib.suppress(OSError):
            return folder, _temporary(folder, stack)
    return last, _temporary(last, stack)


def _temporary(folder: Path, stack: contextlib.ExitStack) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY)))


def link_options(*libraries: str) -> list[str]:
    """Return the linker's options for libraries of llama.cpp, which are loaded from where they are now.

    In a wheel of this package, they are beside it.
    """
    theirs = machine.llama_cpp_folder() / "lib"
    here = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    paths = (theirs, f"{here}/../../../llama_cpp/lib")
    options = [f"-L{theirs}", *(f"-l{name}" for name in libraries), *(f"-Wl,-rpath,{p}" for p in paths)]
    # The default on macOS.
    return [*options, "-Wl,--no-undefined"] if sys.platform.startswith("linux") else options


def run(folder: Path, command: Sequence[str]) -> str | None:
    """Run a compiler. Returns None on success, otherwise the reason in one line."""
    environment = os.environ | {"LC_ALL": "C"}  # its messages are searched below
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode == 0:
        return None
    output = done.stderr.decode("utf-8", "replace")
    if unknown := re.search(r"(?:unrecognized|unknown|unsupported)\b.*?(-m\w+)", output):
        return f"{command[0]} does not support {unknown[1]}: install gcc 11 or clang 12, or name it in CXX"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or [f"exit code {done.returncode}"]
    return f"{command[0]} failed: {errors[0][:_MAX_QUOTED]}"


def install(
    name: str, choices: Sequence[Path], prefix: str, make: Callable[[list[str], Path], str | None]
) -> str | None:
    """Make a library in the first writable folder, and remove earlier ones.

    Args:
        name: file name of the library.
        prefix: of the names of all versions of it.
        make: called with the compiler's command and the file to write, in a temporary folder inside the
            library's own; returns the reason if it fails.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    command = compiler()
    if not command:
        return "no C++ compiler was found: install one, or name it in CXX"
    try:
        with contextlib.ExitStack() as stack:
            folder, work = _workplace(choices, stack)
            if reason := make(command, work / name):
                return reason
            (work / name).replace(folder / name)
        _remove_others(folder / name, prefix)
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or command[0]}"
    return None


def _remove_others(library: Path, prefix: str) -> None:
    """Remove earlier libraries with this prefix from a library's folder, and what killed builds left."""
    for path in library.parent.iterdir():
        with contextlib.suppress(OSError):
            if path.name.startswith(prefix) and path.stem != library.stem:
                path.unlink()
            elif path.name.startswith(_TEMPORARY) and time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path)
