"""Test the commands that install optional dependencies."""

import importlib.metadata
import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from spec_local.errors import SpecLocalError
from spec_local.system import extras

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["serve", "plot", "train"])
def test_it_installs_the_packages_of_the_extra_here(extra):
    command = shlex.split(extras.hint(extra).removeprefix("run "))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert sorted(command[4:]) == sorted(EXTRAS[extra])


def test_without_pip_uv_does_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command = shlex.split(extras.hint("plot"))
    assert command[:6] == ["run", "uv", "pip", "install", "--python", sys.executable]


def test_in_a_folder_that_is_not_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert extras.packages("serve") == ["--editable", f"{ROOT}[serve]"]


def test_what_is_missing_is_named():
    extras.check("json", "serve", "the server")
    with pytest.raises(SpecLocalError, match=r"^--plot needs no_such_module: run .*matplotlib>="):
        extras.check("no_such_module", "plot", "--plot")
