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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from spec_local.kernels import records
from spec_local.system import machine, native_build
from spec_local.system.native_build import SUFFIX
from spec_local.system.processors import usable_processors

SOURCES = Path(__file__).parent
_PREFIX = "specdec-kernels-"
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")


class InstructionSet(NamedTuple):
    """An instruction set: the only source file that may contain it, the flags for it, and what it needs.

    features: spelled as on Linux.
    """

    source: str
    flags: tuple[str, ...]
    features: tuple[str, ...]


# By architecture, best first. The names are those of `Kernels::name`.
_X86_64 = {
    "avx512_vnni": InstructionSet(
        "avx512.cpp",
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"),
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"),
    ),
    "avx_vnni": InstructionSet(
        "avxvnni.cpp", ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"), ("avx_vnni", "avx2", "fma", "f16c")
    ),
    "avx2": InstructionSet("avx2.cpp", ("-mavx2", "-mfma", "-mf16c"), ("avx2", "fma", "f16c")),
}
_ARM64 = {
    "neon_i8mm": InstructionSet("neon_i8mm.cpp", ("-march=armv8.2-a+dotprod+i8mm",), ("asimddp", "i8mm")),
    "neon_dotprod": InstructionSet("neon.cpp", ("-march=armv8.2-a+dotprod",), ("asimddp",)),
}
_SETS = {"x86_64": _X86_64, "amd64": _X86_64, "aarch64": _ARM64, "arm64": _ARM64}
_LACKS = {"avx2": "AVX2", "neon_dotprod": "dot products (FEAT_DotProd)"}  # what the least of them needs
_LEAVE_OUT = "-DSPECDEC_LEAVE_OUT"


def instruction_sets(architecture: str | None = None) -> Mapping[str, InstructionSet]:
    """Return the instruction sets of an architecture, spelled as by `platform.machine`, by name, best first.

    By default, those of this machine. Other architectures than x86-64 and Arm64 have none.
    """
    return _SETS.get((architecture or platform.machine()).lower(), {})


def reported() -> list[str]:
    """Return the instruction sets that this processor reports, best first; all if it reports none."""
    # macOS spells those of x86-64 without underscores.
    features = {name.replace("_", "") for name in machine.processor_features()}
    return [
        name
        for name, each in instruction_sets().items()
        if not features or features.issuperset(need.replace("_", "") for need in each.features)
    ]


def unsupported() -> str | None:
    """Return why the kernels are not available on this machine, or None if they are."""
    own = "llama.cpp's own kernels are used"
    if not instruction_sets():
        return f"this processor is neither x86-64 nor Arm64: {own}"
    if not sys.platform.startswith(("linux", "darwin")):
        return f"they are for Linux and macOS: {own}"
    if not reported():
        return f"this processor lacks {_LACKS[list(instruction_sets())[-1]]}: {own}"
    return None


def folders() -> list[Path]:
    """Return the folders for the library: in the Python environment, then in the user's data folder."""
    return native_build.folders("kernels")


def digest(sources: Path = SOURCES, flags: Sequence[str] = _FLAGS) -> str:
    """Return a digest of everything that the library is compiled from, as 16 hexadecimal digits."""
    known = hashlib.sha256(json.dumps([machine.binding_version(), flags, _SETS]).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        known.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return known.hexdigest()[:16]


def built() -> Path | None:
    """Return the library for these sources and this llama.cpp, or None if it has not been built."""
    return native_build.find(_name(), "kernels", folders())


def outdated() -> bool:
    """Return whether any library exists, for any sources and llama.cpp version."""
    return any(True for folder in folders() for _ in folder.glob(f"{_PREFIX}*{SUFFIX}"))


def build(sets: Collection[str] | None = None) -> str | None:
    """Compile the library for some instruction sets, by default all of this machine, and remove earlier ones.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    if reason := unsupported():
        return reason
    wanted = instruction_sets() if sets is None else sets
    return native_build.install(_name(), folders(), _PREFIX, functools.partial(_make, wanted))


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


def compile_command(
    compiler: Sequence[str],
    headers: Path,
    source: Path,
    to: Path,
    sets: Collection[str] | None = None,
    architecture: str | None = None,
) -> list[str]:
    """Return the command that compiles a source file to an object file.

    Args:
        sets: the instruction sets to compile; the others are left out. By default all of the architecture.
        architecture: as `instruction_sets`.
    """
    compiled = instruction_sets(architecture)
    of_source = {each.source: name for known in (_X86_64, _ARM64) for name, each in known.items()}
    flags = [*_FLAGS, f"-I{headers}"]
    if name := of_source.get(source.name):
        wanted = name in (compiled if sets is None else sets) and name in compiled
        flags += compiled[name].flags if wanted else (_LEAVE_OUT,)
    return [*compiler, *flags, "-c", str(source), "-o", str(to)]


def _compile(compiler: Sequence[str], headers: Path, library: Path, sets: Collection[str]) -> str | None:
    """Compile all sources in parallel and link them. Returns None on success, otherwise the reason."""
    work = library.parent
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(work / f"{source.stem}.o") for source in sources]
    commands = [
        compile_command(compiler, headers, source, Path(o), sets)
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
