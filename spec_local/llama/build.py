"""Installing llama-cpp-python so that it runs on this machine.

A native build uses what the processor claims to have. In virtual machines that can be a lie (AMX tiles that
fault at first use), and a cached wheel may come from a newer processor. So the build is tried in a
child process, and if it dies, rebuilt with fewer instruction sets, until one lives.
"""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import requires

from spec_local import machine

_X86_64 = ("x86_64", "amd64")
# ggml's option for each instruction set, and the processor's name for it. With the native build off, all
# of them are off until asked for.
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
_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to build: a name for people, and CMake's arguments."""

    name: str
    cmake_args: str

    def command(self) -> str:
        """What a person would type to install it."""
        return f'CMAKE_ARGS="{self.cmake_args}" {shlex.join(_install_command())}'


def recipes() -> list[Recipe]:
    """Builds to try after the native one has died, the fastest first."""
    if platform.machine().lower() not in _X86_64:
        return [Recipe("a portable build", "-DGGML_NATIVE=OFF")]
    claimed = machine.processor_features()
    safe = tuple(o for o, needs in _OPTIONS.items() if claimed.issuperset(needs))
    # AVX-512 code needs what came before it.
    if not set(_AVX2) <= set(safe):
        safe = tuple(o for o in safe if not o.startswith("AVX512"))
    ladder = [
        ("a build without AMX", safe),
        ("a plain AVX2 build", _AVX2),
        ("a plain SSE 4.2 build", ("SSE42",)),
    ]
    made = [Recipe(name, _cmake_args(options)) for name, options in ladder]
    return [r for i, r in enumerate(made) if r.cmake_args not in [m.cmake_args for m in made[:i]]]


def _cmake_args(options: tuple[str, ...]) -> str:
    return " ".join(
        ["-DGGML_NATIVE=OFF", *(f"-DGGML_{o}={'ON' if o in options else 'OFF'}" for o in _OPTIONS)]
    )


def _requirement() -> str:
    """The version of llama-cpp-python that this package wants."""
    return next(r.split(";")[0] for r in requires("spec-local") or [] if r.startswith("llama-cpp-python"))


def _install_command() -> list[str]:
    # pip keeps built wheels by version, not by how they were built: past its cache, from source.
    options = ["--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python"]
    return [sys.executable, "-P", "-m", "pip", "install", *options, _requirement()]


def install(recipe: Recipe) -> bool:
    """Build and install; pip's own words go to stderr. False if it failed."""
    environment = os.environ | {"CMAKE_ARGS": recipe.cmake_args}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    return subprocess.run(_install_command(), env=environment, stdout=sys.stderr, check=False).returncode == 0


def repair(
    works: Callable[[], bool], try_to_install: Callable[[Recipe], bool] = install
) -> Iterator[tuple[Recipe, bool | None]]:
    """Rebuild until it works.

    Yields:
        (recipe, None) before each build, and (recipe, whether it works now) after it. The last one
        tells how it ended.
    """
    for recipe in recipes():
        yield recipe, None
        mended = try_to_install(recipe) and works()
        yield recipe, mended
        if mended:
            return
