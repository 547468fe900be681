"""Test specdec with llama.cpp's Vulkan backend: on a GPU if there is one, else with a driver in software.

    python tools/test_vulkan.py FOLDER [PYTEST ARGUMENT…]

Needs Vulkan's headers, its compiler and a driver, CMake and Ninja; without them, nothing is tested, and the
last line says so. On Debian, install libvulkan-dev, glslc, spirv-headers, and mesa-vulkan-drivers, which
contains lavapipe, a driver that computes on the CPU. With lavapipe, no test uses flash attention.

The backend is compiled from the source archive of the installed llama-cpp-python, and put beside a copy of
its libraries; the environment stays as it is. FOLDER keeps what was compiled, and the shaders of the driver:
the first run takes about half an hour on two cores.

All models of the tests are on the device, but for those that ask for the CPU.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from test_arm64 import sources

from spec_local.llama.setup.vulkan import later_headers
from spec_local.system import machine

_HERE = Path(__file__).parents[1]
_DRIVERS = Path("/usr/share/vulkan/icd.d")
_HEADER = Path("/usr/include/vulkan/vulkan.hpp")
_NEEDED = ("cmake", "ninja", "glslc")
_CONTEXT = "tests/llama/test_context.py"
# What pytest runs. Calls on a GPU cannot be aborted, and 255 branches take minutes on lavapipe.
_TESTS = [
    *("tests/llama/test_gpu.py", _CONTEXT),
    f"--deselect={_CONTEXT}::test_abort_within_llama_cpp",
    f"--deselect={_CONTEXT}::test_unusual_arguments[{{'max_branches': 255, 'n_ctx': 8}}]",
]
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "GGML_NATIVE": "OFF",  # its CPU backend is not used
    "GGML_VULKAN": "ON",
    "LLAMA_BUILD_COMMON": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_FOUND = "from spec_local.llama.devices import gpus; print(*(gpu.name for gpu in gpus()))"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    arguments, chosen = parser.parse_known_args()
    folder: Path = arguments.folder.resolve()
    missing = [name for name in _NEEDED if not shutil.which(name)]
    missing += ["libvulkan-dev"] * (not _HEADER.exists())
    if missing:
        print(f"The GPU backend was not tested: there is no {', '.join(missing)}")
        return
    try:
        llama_cpp = sources(folder)
    except subprocess.CalledProcessError:  # pip has said why
        print("The GPU backend was not tested: llama-cpp-python's source archive cannot be downloaded")
        return
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (_with_backend(llama_cpp, folder), _HERE, _HERE / "cli"))),
        "SPECDEC_TEST_DEVICE": "gpu",
        "MESA_SHADER_CACHE_DIR": str(folder / "shaders"),
        "MESA_SHADER_CACHE_MAX_SIZE": "4G",
    }
    if not _gpus(environment):
        # Of devices that are not GPUs, the backend uses only those that it is told to. In lavapipe of Mesa 22
        # flash attention crashes; in that of Mesa 25, its shaders take minutes to compile.
        driver = next(_DRIVERS.glob("lvp_icd*.json"), "")
        environment |= {"GGML_VK_VISIBLE_DEVICES": "0", "SPECDEC_TEST_FLASH": "0", "LP_NUM_THREADS": "1"}
        environment.setdefault("VK_ICD_FILENAMES", str(driver))
        if not _gpus(environment):
            print("The GPU backend was not tested: there is no GPU, and no lavapipe (mesa-vulkan-drivers)")
            return
    raise SystemExit(_tested(folder, environment, chosen or _TESTS))


def _gpus(environment: dict[str, str]) -> str:
    """The names of the GPUs that a process with this environment finds."""
    command = [sys.executable, "-c", _FOUND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _with_backend(llama_cpp: Path, folder: Path) -> Path:
    """Compile the backend. Returns a folder for PYTHONPATH with the installed binding and the backend."""
    build, headers = folder / f"vulkan-{machine.binding_version()}", later_headers(folder / "include")
    options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
    given = ["-G", "Ninja", "-S", str(llama_cpp / "vendor/llama.cpp"), "-B", str(build)]
    if not (build / "build.ninja").exists():
        _run("cmake", *given, *options, f"-DCMAKE_CXX_FLAGS=-I{headers}")
    _run("ninja", "-C", str(build), "ggml")
    found = folder / "site" / "llama_cpp"
    shutil.rmtree(found, ignore_errors=True)
    shutil.copytree(machine.llama_cpp_folder(), found, symlinks=True)
    # All others are as installed: the backend of the CPU is that for this machine.
    for name in ("libggml", "libggml-vulkan"):
        for library in (build / "bin").glob(f"{name}.so*"):
            (found / "lib" / library.name).unlink(missing_ok=True)
            shutil.copy2(library, found / "lib", follow_symlinks=False)
    return found.parent


def _tested(folder: Path, environment: dict[str, str], tests: list[str]) -> int:
    """Run tests, and print a table of their results by file. Returns pytest's exit status."""
    report, started = folder / "tests.xml", time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "-n", "auto"]
    command += tests
    status = subprocess.run(command, cwd=_HERE, env=environment, check=False).returncode
    counts: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").replace(".", "/")
        kind = next((part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed")
        counts.setdefault(name, Counter())[kind] += 1
        seconds[name] += float(case.get("time", 0.0))
    print("| tests | passed | failed | skipped | seconds |\n|---|---|---|---|---|")
    for name, found in counts.items():
        failed = found["failure"] + found["error"]
        print(f"| {name} | {found['passed']} | {failed} | {found['skipped']} | {seconds[name]:.0f} |")
    print(f"\nTogether: {time.monotonic() - started:.0f} s")
    return status


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stdout.strip()[-2000:]}")


if __name__ == "__main__":
    main()
