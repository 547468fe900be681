"""Test the CPU kernels for Arm in an emulator: their self-test, and all types against double precision.

    python tools/test_arm64.py FOLDER

Needs a cross compiler and an emulator (on Debian: ``apt install g++-aarch64-linux-gnu qemu-user``); without
them, nothing is tested, and the last line says so. ggml is compiled from the source archive of the installed
llama-cpp-python, for processors without dot products, so that all of its own code runs on all of them. FOLDER
keeps what was compiled. On an Arm machine, the compiler is its own.

The results must also have the same bits as those of this machine's own kernels.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from spec_local.kernels import build
from spec_local.system import machine, native_build

_HERE = Path(__file__).parents[1]
_SOURCE = _HERE / "tests/arm64/products.cpp"
_ARCHITECTURE = "aarch64"
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_DEFINES = ("_GNU_SOURCE", "NDEBUG", "GGML_USE_CPU", "GGML_USE_CPU_REPACK", "GGML_SCHED_MAX_COPIES=4")
# Processors as the emulator names them, and what must be used on each.
_PROCESSORS = {"cortex-a72": [], "cortex-a76": ["neon_dotprod"], "max": ["neon_i8mm", "neon_dotprod"]}
_ROUNDED_ALIKE = 13  # types whose results have the same bits on all processors: all but F16, BF16 and F32


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path)
    folder: Path = arguments.parse_args().folder.resolve()
    prefix = "" if _IS_ARM else "aarch64-linux-gnu-"
    emulator = next(filter(None, map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static"))), None)
    missing = [name for name in (f"{prefix}gcc", f"{prefix}g++") if not shutil.which(name)]
    if missing or not emulator:
        missing += ["qemu-aarch64"] * (not emulator)
        print(f"The kernels for Arm were not tested: there is no {', '.join(missing)}")
        return
    try:
        llama_cpp = sources(folder)
    except subprocess.CalledProcessError:  # pip has said why
        print("The kernels for Arm were not tested: llama-cpp-python's source archive cannot be downloaded")
        return
    program = _compiled(llama_cpp, folder, prefix)
    own = _products([str(_native(folder))], build.reported()[0]) if not _IS_ARM and build.built() else None
    print("| instruction set | type | products | largest error | bits as on this machine |")
    print("|---|---|---|---|---|")
    for name in build.instruction_sets(_ARCHITECTURE):
        lines = _products([emulator, "-cpu", "max", str(program)], name)
        for i, (kind, products, error, digest) in enumerate(lines):
            alike = "" if i >= _ROUNDED_ALIKE or not own else "yes" if digest == own[i][3] else "NO"
            print(f"| {name} | {kind} | {products} | {error} | {alike} |")
            if alike == "NO":
                sys.exit(f"{name}, {kind}: the results differ from those of {build.reported()[0]}")
    for processor, wanted in _PROCESSORS.items():
        print(f"{processor}: {_selected(emulator, processor, program, wanted)}")


def _products(command: Sequence[str], instruction_set: str) -> list[list[str]]:
    """Run the self-test and the products. Returns the fields of a line per type."""
    done = subprocess.run([*command, instruction_set], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{instruction_set}: {(done.stdout + done.stderr).strip()}")
    print(f"{instruction_set}: self-test passed", flush=True)
    return [line.split() for line in done.stdout.splitlines()]


def _selected(emulator: str, processor: str, program: Path, wanted: list[str]) -> str:
    """The instruction sets that are used on a processor, from what it reports, or why none are."""
    command = [emulator, "-cpu", processor, str(program)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    features = machine.arm_features(dict(zip((16, 26), map(int, words), strict=True)))
    with (
        mock.patch("platform.machine", return_value=_ARCHITECTURE),
        mock.patch.object(machine, "processor_features", return_value=features),
    ):
        names, reason = build.reported(), build.unsupported()
    if names != wanted or bool(reason) == bool(wanted):
        sys.exit(f"{processor}: {names} instead of {wanted} ({reason})")
    return ", ".join(names) or str(reason)


def _compiled(llama_cpp: Path, folder: Path, prefix: str) -> Path:
    """Compile ggml, the kernels and the products for Arm; ggml only once."""
    theirs = llama_cpp / "vendor/llama.cpp/ggml"
    objects = folder / f"ggml-{machine.binding_version()}"
    objects.mkdir(parents=True, exist_ok=True)
    cpu = theirs / "src/ggml-cpu"
    files = [p for p in (theirs / "src").iterdir() if p.suffix in (".c", ".cpp")]
    files += [
        p
        for f in (cpu, cpu / "amx", cpu / "tiled", cpu / "llamafile", cpu / "arch/arm")
        for p in f.iterdir()
        if p.suffix in (".c", ".cpp")
    ]
    versions = [
        line for line in (theirs / "CMakeLists.txt").read_text().splitlines() if "GGML_VERSION_" in line
    ]
    version = ".".join(re.findall(r"VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", "\n".join(versions)))
    (objects / "ggml-version.h").write_text(
        f'#define GGML_VERSION "{version}"\n#define GGML_COMMIT "unknown"\n'
    )
    flags = [f"-D{name}" for name in _DEFINES]
    flags += [f"-I{f}" for f in (theirs / "include", theirs / "src", cpu, objects)]
    commands = []
    for source in files:
        to = objects / ("-".join(source.relative_to(theirs).parts) + ".o")
        if not to.exists():
            language = (
                [f"{prefix}gcc", "-std=c11"] if source.suffix == ".c" else [f"{prefix}g++", "-std=c++17"]
            )
            commands.append([*language, "-O2", *flags, "-c", str(source), "-o", str(to)])
    ours = folder / "kernels"
    shutil.rmtree(ours, ignore_errors=True)
    ours.mkdir()
    for source in (*build.SOURCES.glob("*.cpp"), _SOURCE):
        command = build.compile_command(
            [f"{prefix}g++", f"-I{build.SOURCES}"],
            theirs / "include",
            source,
            ours / f"{source.stem}.o",
            architecture=_ARCHITECTURE,
        )
        commands.append(command)
    _run(commands)
    program = folder / "products"
    parts = map(str, (*ours.glob("*.o"), *objects.glob("*.o")))
    _run([[f"{prefix}g++", "-static", "-pthread", *parts, "-o", str(program)]])
    return program


def _native(folder: Path) -> Path:
    """Compile the products for this machine, with its library of kernels."""
    library, headers = build.built(), native_build.headers()
    assert library
    assert headers
    program = folder / "products-native"
    compiler = [*native_build.compiler(), "-std=c++17", "-O2", f"-I{build.SOURCES}", f"-I{headers}"]
    linked = [
        str(library),
        f"-Wl,-rpath,{library.parent}",
        *native_build.link_options("ggml-base", "ggml-cpu"),
    ]
    _run([[*compiler, str(_SOURCE), "-o", str(program), *linked]])
    return program


def sources(folder: Path) -> Path:
    """Return the unpacked source archive of the installed llama-cpp-python.

    Raises:
        subprocess.CalledProcessError: it cannot be downloaded.
    """
    name = f"llama_cpp_python-{machine.binding_version()}"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = f"llama-cpp-python=={machine.binding_version()}"
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.2
            archive.extractall(folder / "unpacking")
        (folder / "unpacking" / name).rename(folder / name)
    return folder / name


def _run(commands: list[list[str]]) -> None:
    """Run compilers in parallel.

    Raises:
        SystemExit: one of them failed.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(
            lambda c: subprocess.run(c, capture_output=True, text=True, check=False), commands
        ):
            if done.returncode:
                sys.exit(f"{done.args[0]} failed: {done.stderr.strip()[:2000]}")


if __name__ == "__main__":
    main()
