"""Install the wheels of a folder on a machine without a compiler, and test what was installed.

    python tools/check_wheels.py [--quick] dist

Everything happens in a temporary folder: a virtual environment of this Python, a home folder, and a copy of
the tests, which import what was installed rather than the sources. The search path of programs has that
environment and a few tools, and no compiler. Needs the network, for the other packages and the starter model;
with --quick, which only installs and generates, the user's own copy of it is used where there is one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = ("llama_cpp_python", "spec_local")
PROGRAMS = ("sh", "cat", "env", "git", "ps", "sleep", "touch", "true", "uname")
"""What tests and dependencies start."""
TESTS = ("tests", "benchmarks", "pyproject.toml", "requirements-dev.txt")
"""What the tests read, apart from the sources."""
PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "jsonschema", "httpx", "openai", "anthropic")
LEFT_OUT = (
    "--ignore-glob=*training*",  # needs torch
    "--ignore=tests/unit/test_rooms.py",  # reads the sources
    "--ignore=tests/unit/test_install_docs.py",
    "--deselect=tests/unit/test_extras.py::test_in_a_folder_that_is_not_installed",
)
USES_ITS_LIBRARIES = """
from spec_local import kernels
from spec_local.kernels import build
from spec_local.llama import mtmd, rpc
assert build.unsupported() or kernels.status().instruction_set, kernels.status()
for path in (rpc.built(), *[build.built()] * (not build.unsupported())):
    assert path and "prebuilt" in path.parts, path
    print(path)
print(mtmd.library().__file__)
"""


def main(wheels: Path, is_quick: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="specdec-wheels-") as name:
        folder = Path(name)
        tools, environment, home, copy = (folder / part for part in ("bin", "venv", "home", "copy"))
        for each in (tools, home, copy):
            each.mkdir()
        for program in PROGRAMS:
            if found := shutil.which(program):
                (tools / program).symlink_to(found)
        for part in TESTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, copy / part)
            else:
                shutil.copy(ROOT / part, copy)
        started = time.monotonic()
        venv.create(environment, with_pip=True)
        path = f"{environment / 'bin'}{os.pathsep}{tools}"
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        variables = kept | {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "OMP_WAIT_POLICY": "passive"}
        if is_quick:
            variables["XDG_DATA_HOME"] = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
        assert not any(
            shutil.which(compiler, path=path) for compiler in ("c++", "g++", "clang++", "cc", "gcc")
        )

        def run(program: str, *arguments: str) -> None:
            print("+", program, *arguments, flush=True)
            subprocess.run([environment / "bin" / program, *arguments], cwd=copy, env=variables, check=True)

        install = ("install", "--quiet", "--only-binary", ":all:")
        (binding,), (own,) = (wheels.resolve().glob(f"{name}-*.whl") for name in WHEELS)
        run("pip", *install, str(binding), f"{own}[serve]")
        run("specdec", "doctor", "rpc")
        run("specdec", "models", "pull", "starter")
        run("specdec", "run", "Why is the sky blue?", "-n", "20", "-v")
        print(f"from nothing to an answer: {time.monotonic() - started:.0f} s")
        run("python", "-c", USES_ITS_LIBRARIES)
        if is_quick:
            return
        run("pip", *install, "--constraint", "requirements-dev.txt", *PACKAGES)
        run("pytest", "-n", "auto", "-m", "not slow", *LEFT_OUT, "tests/unit", "tests/llama")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--quick", folder]:
            main(Path(folder), True)
        case [folder]:
            main(Path(folder), False)
        case _:
            sys.exit(__doc__)
