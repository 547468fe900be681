"""Install specdec and llama.cpp, from their sources, into the environment whose Python runs this.

    .venv/bin/python tools/install.py [EXTRA…]

llama.cpp is compiled for this machine, without what specdec does not use, while pip installs the other
packages.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT = Path(sys.prefix) / "wheels"  # where the wheel of llama-cpp-python is kept
BINDING = "llama-cpp-python"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
PIP = (*_PIP, "--quiet")
_STEP = re.compile(r"\[(\d+)/(\d+)\]")  # of Ninja
_LINE_S = 20.0  # seconds from one line to the next where they cannot overwrite each other
_QUOTED = 30  # lines of the compiler's output after a failure


def requirements(extras: Sequence[str]) -> tuple[str, list[str]]:
    """Return this project's requirement for the binding, and all others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = (r for extra in extras for r in project["optional-dependencies"][extra])
    needed = [*project["dependencies"], *(r for r in more if not r.startswith("spec-local"))]
    (binding,) = (r for r in needed if r.startswith(BINDING))
    return binding, [r for r in needed if r != binding]


def compile_llama_cpp(folder: Path) -> Path:
    """Compile llama-cpp-python for this machine and these sources, unless pip has it in its cache.

    Returns:
        The wheel, in a folder that is made anew.

    Raises:
        SystemExit: as `build_binding`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # pip's cache does not distinguish CMake's arguments: it may have a wheel of others than the user's.
    is_given = bool(os.environ.get("CMAKE_ARGS"))
    build_binding(folder, "", *["--no-cache-dir"] * is_given)
    (wheel,) = folder.glob("*.whl")
    if not is_given and not reads_images(wheel):
        print("pip's cache had an earlier build of llama.cpp, which cannot read pictures")
        subprocess.run([*PIP, "cache", "remove", BINDING.replace("-", "_")], check=False)
        wheel.unlink()
        build_binding(folder)
    return wheel


def reads_images(wheel: Path) -> bool:
    """Return whether a wheel of llama-cpp-python contains libmtmd."""
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("llama_cpp/lib/libmtmd.") for name in archive.namelist())


def build_binding(folder: Path, cmake_args: str = "", *options: str) -> None:
    """Compile llama-cpp-python into a wheel in a folder, and say how far it is.

    Args:
        options: more options of pip.

    Raises:
        SystemExit: it failed; the end of the compiler's output is on stderr.
    """
    binding, _ = requirements(())
    ours = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={ROOT / 'tools/llama_cpp.cmake'}"
    arguments = " ".join(a for a in (ours, cmake_args, os.environ.get("CMAKE_ARGS", "")) if a)
    command = [*_PIP, "wheel", "--verbose", "--no-deps", "--no-binary", BINDING]
    command += ["--wheel-dir", str(folder), *options, binding]
    with tempfile.TemporaryFile("w+") as log, Progress("compiling llama.cpp") as progress:
        process = subprocess.Popen(
            command,
            env=os.environ | {"CMAKE_ARGS": arguments},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout
        for line in process.stdout:
            log.write(line)
            if step := _STEP.search(line):
                progress.show(f"{step[1]} of {step[2]} files")
        if process.wait():
            log.seek(0)
            sys.stderr.write("\n" + "".join(log.readlines()[-_QUOTED:]))
            raise SystemExit("llama.cpp could not be compiled: see above")


class Progress:
    """One line about a task, with the seconds that it has taken; in a terminal, it overwrites itself."""

    def __init__(self, task: str) -> None:
        self._task, self._start, self._shown = task, time.monotonic(), 0.0
        self._is_terminal = sys.stdout.isatty()

    def __enter__(self) -> "Progress":
        self._write("takes some minutes" if not self._is_terminal else "")
        return self

    def show(self, state: str) -> None:
        """Show a new state."""
        now = time.monotonic()
        if self._is_terminal or now >= self._shown + _LINE_S:
            self._shown = now
            self._write(f"{state}, {now - self._start:.0f} s")

    def __exit__(self, *_: object) -> None:
        self._write(f"{time.monotonic() - self._start:.0f} s")
        if self._is_terminal:
            print()

    def _write(self, state: str) -> None:
        line = f"{self._task}: {state}" if state else self._task
        print(
            f"\r\x1b[K{line}" if self._is_terminal else line,
            end="" if self._is_terminal else "\n",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="such as serve, plot, train or dev")
    extras = parser.parse_args().extras
    _, others = requirements(extras)
    install = (*PIP, "install", "--constraint", str(ROOT / "requirements-dev.txt"))
    with subprocess.Popen([*install, *others]) as meanwhile:
        wheel = compile_llama_cpp(BUILT)
        if meanwhile.wait():
            raise SystemExit("pip could not install the packages: see above")
    chosen = f"[{','.join(extras)}]" if extras else ""
    # pip would keep an installed one of the same version.
    subprocess.run([*install, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    found = ("--find-links", str(BUILT), "--editable", f"{ROOT}{chosen}")
    raise SystemExit(subprocess.run([*install, *found], check=False).returncode)


if __name__ == "__main__":
    main()
