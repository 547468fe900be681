"""requirements-dev.txt, which make installs, has a version of each package that pyproject.toml asks for."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(requirements: list[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from required(PROJECT["optional-dependencies"][extra])
        else:
            yield requirement


def test_versions_satisfy_pyproject():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    locked = dict(line.split(" ;")[0].split("==") for line in lines if not line.startswith("#"))
    wanted = [*required(PROJECT["dependencies"]), *required(PROJECT["optional-dependencies"]["dev"])]
    assert len(wanted) > 30
    for requirement in wanted:
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is {version} in the lock file"
