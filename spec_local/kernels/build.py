"""Compile the kernels on this machine against the installed llama.cpp.

The library's file name contains a digest of the sources, the llama.cpp build and the compiler flags, so that
a library that does not match them is never loaded.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs

from spec_local import machine

SOURCES = Path(__file__).parent
_PREFIX = "specdec-kernels-"
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")
# Only these files may contain instructions that not every x86-64 processor has.
_EXTRA_FLAGS = {
    "avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "avxvnni.cpp": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx512.cpp": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        *("-mfma", "-mf16c"),
    ),
}
_ABANDONED = 3600.0  # seconds after which a temporary folder must be left over from a killed build
_MAX_QUOTED = 200  # maximum number of characters quoted from a compiler message

# Best first. The names are those of `Kernels::name`; the features are spelled as on Linux.
INSTRUCTION_SETS = {
    "avx512_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"),
    "avx_vnni": ("avx_vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
}


def reported() -> list[str]:
    """Return the instruction sets that this processor reports, best first; all if it reports none."""
    # macOS spells them without underscores.
    features = {name.replace("_", "") for name in machine.processor_features()}
    return [
        name
        for name, needs in INSTRUCTION_SETS.items()
        if not features or features.issuperset(n.replace("_", "") for n in needs)
    ]


def unsupported() -> str | None:
    """Return why the kernels are not available on this machine, or None if they are."""
    own = "llama.cpp's own kernels are used"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"this processor is not x86-64: {own}"
    if not sys.platform.startswith(("linux", "darwin")):
        return f"they are for Linux and macOS: {own}"
    if not reported():
        return f"this processor lacks AVX2: {own}"
    return None


def folders() -> list[Path]:
    """Return the folders for the library: in the Python environment, then in the user's data folder."""
    share = Path(sys.prefix) / "share" / "specdec"
    return [share / "kernels", Path(platformdirs.user_data_dir("specdec")) / "kernels"]


def digest() -> str:
    """Return a digest of everything that the library is compiled from, as 16 hexadecimal digits."""
    known = hashlib.sha256(json.dumps([machine.llama_cpp_build(), _FLAGS, _EXTRA_FLAGS]).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        known.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return known.hexdigest()[:16]


def built() -> Path | None:
    """Return the library for these sources and this llama.cpp, or None if it has not been built."""
    name = _name()
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def outdated() -> bool:
    """Return whether any library exists, for any sources and llama.cpp version."""
    return any(True for folder in folders() for _ in folder.glob(f"{_PREFIX}*{_SUFFIX}"))


def build() -> str | None:
    """Compile the library and remove earlier ones.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    if reason := unsupported():
        return reason
    compiler = _compiler()
    if not compiler:
        return "no C++ compiler was found: install one, or name it in CXX"
    headers = _headers()
    if not headers:
        return "llama-cpp-python was installed without its headers: reinstall it"
    try:
        with contextlib.ExitStack() as stack:
            folder, work = _workplace(stack)
            library = folder / _name()
            if reason := _compile(compiler, headers, work / library.name):
                return reason
            library.with_suffix(".json").unlink(missing_ok=True)  # so that the self-test runs again
            (work / library.name).replace(library)
        _remove_others(library)
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or compiler[0]}"
    return None


def _name() -> str:
    return f"{_PREFIX}{digest()}{_SUFFIX}"


def _headers() -> Path | None:
    """Return the folder of llama.cpp's public headers, or None if it is not found."""
    listed = importlib.metadata.files("llama-cpp-python") or []
    near = [Path(str(file.locate())).parent for file in listed if file.name == "ggml.h"]
    return next(
        (f for f in (*near, machine.llama_cpp_folder().parent / "include") if (f / "ggml.h").is_file()), None
    )


def _compiler() -> list[str]:
    """Return the C++ compiler command, empty if none is found. CXX may include arguments (``ccache g++``)."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen if shutil.which(chosen[0]) else []
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), [])


def _workplace(stack: contextlib.ExitStack) -> tuple[Path, Path]:
    """Return the first writable folder of `folders` and a temporary folder in it.

    Raises:
        OSError: none of the folders is writable.
    """
    *others, last = folders()
    for folder in others:
        with contextlib.suppress(OSError):
            return folder, _temporary(folder, stack)
    return last, _temporary(last, stack)


def _temporary(folder: Path, stack: contextlib.ExitStack) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".build-")))


def _compile(compiler: Sequence[str], headers: Path, library: Path) -> str | None:
    """Compile all sources in parallel and link them. Returns None on success, otherwise the reason."""
    work, theirs = library.parent, machine.llama_cpp_folder() / "lib"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(work / f"{source.stem}.o") for source in sources]
    commands = [
        [*compiler, *_FLAGS, *_EXTRA_FLAGS.get(source.name, ()), f"-I{headers}", "-c", str(source), "-o", o]
        for source, o in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for reason in pool.map(functools.partial(_run, work), commands):
            if reason:
                return reason
    link = [*compiler, "-shared", "-pthread", *objects, "-o", str(library)]
    link += [f"-L{theirs}", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{theirs}"]
    if sys.platform.startswith("linux"):  # the default on macOS
        link.append("-Wl,--no-undefined")
    return _run(work, link)


def _run(folder: Path, command: Sequence[str]) -> str | None:
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


def _remove_others(library: Path) -> None:
    for path in library.parent.iterdir():
        with contextlib.suppress(OSError):
            if path.name.startswith(_PREFIX) and path.stem != library.stem:
                path.unlink()
            elif path.name.startswith(".build-") and time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path)
