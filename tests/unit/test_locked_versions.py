"""The versions that make installs, and the lowest ones, are versions that pyproject.toml allows."""

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


def versions(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split(" ;")[0].split("==") for line in lines if not line.startswith("#"))


def test_versions_satisfy_pyproject():
    locked = versions("requirements-dev.txt")
    wanted = [*required(PROJECT["dependencies"]), *required(PROJECT["optional-dependencies"]["dev"])]
    assert len(wanted) > 30
    for requirement in wanted:
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is {version} in the lock file"


def test_the_lowest_versions_are_those_of_pyproject():
    wanted = [*required(PROJECT["dependencies"]), *required(PROJECT["optional-dependencies"]["serve"])]
    lowest = {
        canonicalize_name(requirement.name): bound.version
        for requirement in wanted
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    assert len(lowest) == len(wanted) - 1  # of llama-cpp-python, there is one version
    assert versions("requirements-lowest.txt") == lowest
