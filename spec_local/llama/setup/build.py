"""Rebuild llama-cpp-python with fewer instruction sets until it runs on this machine.

A native build uses the instructions that the processor reports. A virtual machine can report instructions
that fault when used (AMX tiles), and a cached wheel may have been built on a newer processor. Each build is
therefore tested in a child process before it is used.
"""

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spec_local.errors import InvalidRequest
from spec_local.llama.setup.vulkan import later_headers
from spec_local.system import machine
from spec_local.system.folders import user_folder
from spec_local.system.processors import usable_processors

_X86_64 = ("x86_64", "amd64")
# ggml's options and the processor features that each one needs. Without a native build, all are off
# by default.
_OPTIONS = {
    "SSE42": ("sse4_2",),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "FMA": ("fma",),
    "F16C": ("f16c",),
    "BMI2": ("bmi2",),
    "AVX512": ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AVX_VNNI": ("avx_vnni",),
}
_COMMON = "-DMTMD_VIDEO=OFF"
"""Of all builds. With videos, libmtmd, which reads pictures, starts the program ffmpeg."""
_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")


@dataclass(frozen=True, slots=True)
class BuildRecipe:
    """A way to build llama.cpp: a display name and the CMake arguments."""

    name: str
    cmake_args: str

    def command(self) -> str:
        """Return the shell command that installs this build."""
        return f'CMAKE_ARGS="{self.cmake_args}" {shlex.join(_install_command())}'


def portable() -> BuildRecipe:
    """Return the build that runs on all processors of this kind: with AVX2 on x86-64."""
    if platform.machine().lower() not in _X86_64:
        return BuildRecipe("a portable build", f"-DGGML_NATIVE=OFF {_COMMON}")
    return BuildRecipe("a plain AVX2 build", _cmake_args(_AVX2))


def lacking() -> str | None:
    """Return what this processor lacks for the portable build, or None if it has everything or is unknown."""
    features = machine.processor_features()
    if platform.machine().lower() not in _X86_64 or not features:
        return None
    names = sorted({need for option in _AVX2 for need in _OPTIONS[option]} - features)
    return f"this processor lacks {', '.join(names)}, which wheels of specdec need" if names else None


def recipes() -> list[BuildRecipe]:
    """Return the builds to try if the native one crashes, fastest first."""
    if platform.machine().lower() not in _X86_64:
        return [portable()]
    reported = machine.processor_features()
    safe = tuple(o for o, needs in _OPTIONS.items() if reported.issuperset(needs))
    # ggml's AVX-512 code also uses the older instruction sets.
    if not set(_AVX2) <= set(safe):
        safe = tuple(o for o in safe if not o.startswith("AVX512"))
    candidates = [
        ("a build without AMX", safe),
        ("a plain AVX2 build", _AVX2),
        ("a plain SSE 4.2 build", ("SSE42",)),
    ]
    by_arguments: dict[str, BuildRecipe] = {}
    for name, options in candidates:
        arguments = _cmake_args(options)
        by_arguments.setdefault(arguments, BuildRecipe(name, arguments))
    return list(by_arguments.values())


def with_images() -> BuildRecipe:
    """Return the build for this processor that can read images; CMAKE_ARGS of the environment add to it."""
    given = os.environ.get("CMAKE_ARGS", "")
    return BuildRecipe("a build with libmtmd", f"{given} -DLLAVA_BUILD=ON {_COMMON}".strip())


def with_gpu() -> BuildRecipe:
    """Return the build for the GPU of this machine; CMAKE_ARGS of the environment add to it.

    Raises:
        InvalidRequest: what it needs is not installed.
    """
    given = os.environ.get("CMAKE_ARGS", "")
    if sys.platform == "darwin":
        name, option = "Metal", "-DGGML_METAL=ON"
    elif shutil.which("nvcc"):
        name, option = "CUDA", "-DGGML_CUDA=ON"
    elif shutil.which("glslc"):
        headers = later_headers(user_folder("cache") / "vulkan")
        name, option = "Vulkan", f"-DGGML_VULKAN=ON -DCMAKE_CXX_FLAGS=-I{headers}"
    else:
        raise InvalidRequest(
            "no compiler for a GPU is installed: install CUDA for one by NVIDIA, or Vulkan (on Debian and "
            "Ubuntu: apt install glslc libvulkan-dev), and run specdec doctor --fix gpu again"
        )
    arguments = f"{given} {option} -DLLAVA_BUILD=ON {_COMMON}".strip()
    return BuildRecipe(f"a build with {name}", arguments)


def _cmake_args(options: tuple[str, ...]) -> str:
    switches = (f"-DGGML_{o}={'ON' if o in options else 'OFF'}" for o in _OPTIONS)
    return " ".join(["-DGGML_NATIVE=OFF", *switches, _COMMON])


def _requirement() -> str:
    """Return this package's requirement for llama-cpp-python, including its version."""
    return next(
        r.split(";")[0]
        for r in importlib.metadata.requires("spec-local") or []
        if r.startswith("llama-cpp-python")
    )


def _install_command() -> list[str]:
    # pip caches built wheels by version only, whatever their CMake arguments were.
    options = ["--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python"]
    return [sys.executable, "-P", "-m", "pip", "install", *options, _requirement()]


def install(recipe: BuildRecipe) -> bool:
    """Build and install llama-cpp-python, with pip's output on stderr. Return whether that succeeded."""
    environment = os.environ | {"CMAKE_ARGS": recipe.cmake_args}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(usable_processors().hardware_threads))
    return subprocess.run(_install_command(), env=environment, stdout=sys.stderr, check=False).returncode == 0


def repair(
    works: Callable[[], bool], try_to_install: Callable[[BuildRecipe], bool] = install
) -> Iterator[tuple[BuildRecipe, bool | None]]:
    """Try the builds of `recipes` until one works.

    Yields:
        (recipe, None) before each build, and (recipe, whether it works) after it.
    """
    for recipe in recipes():
        yield recipe, None
        repaired = try_to_install(recipe) and works()
        yield recipe, repaired
        if repaired:
            return
