"""Compile the kernels against the installed llama.cpp.

The library's file name contains a digest of the sources, the version of llama-cpp-python and the compiler
flags, so that a library that does not match them is never loaded. A wheel contains one for all instruction
sets; ``specdec doctor --fix`` compiles one for this machine's, which takes a third of the time.

    python -m spec_local.kernels.build     # for all instruction sets
"""

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spec_local.kernels import records
from spec_local.system import machine, native_build
from spec_local.system.native_build import SUFFIX
from spec_local.system.processors import usable_processors

SOURCES = Path(__file__).parent
_PREFIX = "specdec-kernels-"
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

# The set of each of these files.
_SETS = {"avx512_vnni": "avx512.cpp", "avx_vnni": "avxvnni.cpp", "avx2": "avx2.cpp"}
_LEAVE_OUT = "-DSPECDEC_LEAVE_OUT"

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
    return native_build.folders("kernels")


def digest() -> str:
    """Return a digest of everything that the library is compiled from, as 16 hexadecimal digits."""
    known = hashlib.sha256(json.dumps([machine.binding_version(), _FLAGS, _EXTRA_FLAGS]).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        known.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return known.hexdigest()[:16]


def built() -> Path | None:
    """Return the library for these sources and this llama.cpp, or None if it has not been built."""
    return native_build.find(_name(), "kernels", folders())


def outdated() -> bool:
    """Return whether any library exists, for any sources and llama.cpp version."""
    return any(True for folder in folders() for _ in folder.glob(f"{_PREFIX}*{SUFFIX}"))


def build(sets: Collection[str] = tuple(INSTRUCTION_SETS)) -> str | None:
    """Compile the library for some instruction sets, and remove earlier ones.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    if reason := unsupported():
        return reason
    return native_build.install(_name(), folders(), _PREFIX, functools.partial(_make, sets))


def _make(sets: Collection[str], compiler: Sequence[str], library: Path) -> str | None:
    headers = native_build.headers()
    if not headers:
        return "llama-cpp-python was installed without its headers: reinstall it"
    if reason := _compile(compiler, headers, library, sets):
        return reason
    records.forget(library.parent.parent / library.name)  # the self-test and the measurements run again
    return None


def _name() -> str:
    return f"{_PREFIX}{digest()}{SUFFIX}"


def compile_command(compiler: Sequence[str], headers: Path, source: Path, to: Path) -> list[str]:
    """Return the command that compiles a source file to an object file."""
    flags = [*_FLAGS, *_EXTRA_FLAGS.get(source.name, ()), f"-I{headers}"]
    return [*compiler, *flags, "-c", str(source), "-o", str(to)]


def _compile(compiler: Sequence[str], headers: Path, library: Path, sets: Collection[str]) -> str | None:
    """Compile all sources in parallel and link them. Returns None on success, otherwise the reason."""
    work = library.parent
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(work / f"{source.stem}.o") for source in sources]
    left_out = {file for name, file in _SETS.items() if name not in sets}
    commands = [
        [*compile_command(compiler, headers, source, Path(o)), *[_LEAVE_OUT] * (source.name in left_out)]
        for source, o in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(usable_processors().hardware_threads) as pool:
        for reason in pool.map(functools.partial(native_build.run, work), commands):
            if reason:
                return reason
    libraries = native_build.link_options("ggml-base", "ggml-cpu")
    link = [*compiler, "-shared", "-pthread", *objects, "-o", str(library), *libraries]
    return native_build.run(work, link)


if __name__ == "__main__":
    sys.exit(build())
