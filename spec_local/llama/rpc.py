"""llama.cpp's RPC backend as a library of its own: compiled once, and loaded into the installed ggml.

llama-cpp-python as pip builds it has no RPC, but ggml loads backends from files at run time.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_local.errors import BackendError
from spec_local.llama import runtime
from spec_local.system import machine, native_build

_PREFIX = "ggml-rpc-"
# GGML_BACKEND_DL exports `ggml_backend_init`, which `ggml_backend_load` looks for.
_FLAGS = (
    *("-O2", "-std=c++17", "-fPIC", "-shared", "-pthread"),
    *("-DGGML_BACKEND_DL", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED"),
)
_SOURCES = ("ggml-rpc.cpp", "transport.cpp")
_GGML = "vendor/llama.cpp/ggml"
_PARTS = (
    f"{_GGML}/include/",
    f"{_GGML}/src/ggml-rpc/",
    f"{_GGML}/src/ggml-impl.h",
    f"{_GGML}/src/ggml-backend-impl.h",
)
_DOWNLOAD_S = 600


def built() -> Path | None:
    """Return the library for the installed llama.cpp, or None if it has not been built."""
    return native_build.find(_name(), "rpc", native_build.folders("rpc"))


def build() -> str | None:
    """Compile the library from the sources of the installed llama-cpp-python, which pip downloads.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    return native_build.install(_name(), native_build.folders("rpc"), _PREFIX, _make)


def _make(compiler: Sequence[str], library: Path) -> str | None:
    work = library.parent
    if reason := _get_sources(work):
        return reason
    ggml = work / _GGML
    command = [
        *(*compiler, *_FLAGS, f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"),
        *(str(ggml / "src/ggml-rpc" / name) for name in _SOURCES),
        *("-o", str(library), *native_build.link_options("ggml-base")),
    ]
    return native_build.run(work, command)


def _name() -> str:
    known = hashlib.sha256(repr((machine.binding_version(), _FLAGS)).encode())
    return f"{_PREFIX}{known.hexdigest()[:16]}{native_build.SUFFIX}"


def _get_sources(folder: Path) -> str | None:
    """Put the sources of the installed version into a folder; return the reason if that fails."""
    package = f"llama-cpp-python=={machine.binding_version()}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # Only this one: what it builds with would be compiled, too.
    command += ["--no-binary", "llama-cpp-python", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        return f"pip could not download the sources of {package} within {_DOWNLOAD_S} s"
    archive = next(folder.glob("*.tar.gz"), None)
    if done.returncode or not archive:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        return f"pip could not download the sources of {package}: {lines[-1]}"
    with tarfile.open(archive) as opened:
        for member in opened:
            inside = member.name.partition("/")[2]
            file = opened.extractfile(member) if inside.startswith(_PARTS) and member.isfile() else None
            if file and ".." not in inside.split("/"):  # Python 3.11.3 has no safe `extract` yet
                target = folder / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read())
    return None


@functools.cache
def load() -> Any:
    """Load the library into ggml's registry; return llama.cpp's functions.

    Raises:
        BackendError: it has not been built, or ggml rejects it.
    """
    path = built()
    if not path:
        raise BackendError("llama.cpp's RPC backend is missing: run specdec doctor --fix rpc")
    functions = runtime.ggml()
    pointer = ctypes.c_void_p
    for name, result, *arguments in (
        ("ggml_backend_load", pointer, ctypes.c_char_p),
        ("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p),
        ("ggml_backend_register", None, pointer),
        ("ggml_backend_reg_dev_count", ctypes.c_size_t, pointer),
        ("ggml_backend_reg_dev_get", pointer, pointer, ctypes.c_size_t),
        ("ggml_set_abort_callback", pointer, pointer),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    if not functions.ggml_backend_load(os.fsencode(path)):
        raise BackendError(f"llama.cpp rejects {path}: delete it, and run specdec doctor --fix rpc")
    return functions


@functools.cache
def backend() -> Any:
    """The library itself, for functions of the RPC backend."""
    load()
    return ctypes.CDLL(str(built()))
