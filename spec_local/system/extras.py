"""Optional dependencies: the command that installs them, for the Python that runs now."""

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import spec_local
from spec_local.errors import SpecLocalError


def check(module: str, extra: str, what: str) -> None:
    """Check that a module of an optional dependency is installed, without importing it.

    Args:
        extra: its name in pyproject.toml. what: the subject of the message, such as ``--plot``.

    Raises:
        SpecLocalError: it is missing.
    """
    if not is_installed(module):
        raise SpecLocalError(f"{what} needs {module}: {hint(extra)}")


def without_torch() -> str | None:
    """What to do before a head can be trained; None: PyTorch is installed."""
    return None if is_installed("torch") else f"training a head needs PyTorch: {hint('train')}"


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def hint(extra: str) -> str:
    """Return what to do if the packages of an extra are missing, for the end of an error message."""
    return f"run {shlex.join([*_installer(), *packages(extra)])}"


def packages(extra: str) -> list[str]:
    """Return the requirements of an extra.

    Never specdec's own name: the package index does not have it, or has another package of that name.
    """
    try:
        requirements = importlib.metadata.requires("spec-local") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from its folder
        return ["--editable", f"{Path(spec_local.__file__).parents[1]}[{extra}]"]
    found = []
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        if re.search(rf"""extra\s*==\s*["']{re.escape(extra)}["']""", marker):
            found.append(package.strip())
    return found


def _installer() -> list[str]:
    if is_installed("pip"):
        return [sys.executable, "-m", "pip", "install"]
    return ["uv", "pip", "install", "--python", sys.executable]  # uv's environments have no pip
