"""Proposers of other packages, which are found by their entry points."""

import importlib.metadata
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from spec_local import installed
from spec_local.core.sampling import SamplingSettings
from spec_local.errors import InvalidRequest
from spec_local.proposers import PROPOSER_NAMES
from spec_local.server.protocols import sampling_body
from spec_local.server.protocols.sampling_body import SamplingBody
from spec_local.session import Done, Session, Text
from spec_local.settings import GenerationSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "specdec-period"
GREEDY = GenerationSettings(SamplingSettings(temperature=0), max_tokens=40, policy="fixed")
LOOKUP = """
class Broken:
    needs_logits = False

    @classmethod
    def create(cls, calibrated):
        return cls()

    def observe(self, tokens, logits):
        pass

    def find(self, history, limit):
        return None
"""


def install(folder, package, entry_points):
    """What an installer writes."""
    info = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = [f"{name} = {target}\n" for name, target in entry_points.items()]
    (info / "entry_points.txt").write_text("[specdec.proposers]\n" + "".join(lines))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages that this process can import."""
    folder, before = tmp_path / "packages", set(sys.modules)
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for each in (installed._found, installed.load):
        each.cache_clear()
    yield folder
    for each in (installed._found, installed.load):
        each.cache_clear()
    for module in {"specdec_period", "broken_lookup"} - before:
        sys.modules.pop(module, None)


@pytest.fixture
def example(packages):
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copy(EXAMPLE / "specdec_period.py", packages)
    install(packages, project["name"], project["entry-points"]["specdec.proposers"])


@pytest.fixture
def broken(packages):
    """A function that installs a package with a class made from these lines, and drafts with it."""

    def make(lines, target="broken_lookup:Broken", name="broken"):
        (packages / "broken_lookup.py").write_text(lines)
        install(packages, "specdec-broken", {name: target})
        importlib.invalidate_caches()

    return make


def answer(session, **settings):
    """Tokens and statistics of an answer."""
    events = list(session.generate("1, 2, 1, 2, 1, 2,", GREEDY, **settings))
    (done,) = (event for event in events if isinstance(event, Done))
    return [token for event in events if isinstance(event, Text) for token in event.tokens], done.statistics


@pytest.fixture
def session(main, inside):
    with inside._in_place(), Session.open(main, threads=1, n_ctx=256) as session:
        yield session


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_the_output_is_that_without_drafts(session, example, policy):
    plain, _ = answer(session, policy="off")
    drafted, statistics = answer(session, proposer="period", policy=policy)
    assert drafted == plain
    assert statistics.draft_n > 0
    assert set(statistics.steps_by) <= {"period", "none"}
    assert session.proposers(GenerationSettings(proposer="period")) == ["period"]


def test_the_command_takes_its_name(specdec, inside, main, example, packages):
    here = {"PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    words = ["generate", "--main", main, *("--temp", 0, "--threads", 1, "--ctx", 256, "-n", 40)]
    words += ["--raw", "1, 2, 1, 2, 1, 2,"]
    plain = specdec(*words, "--no-spec")
    drafted = specdec(*words, "--proposer", "period", "--policy", "fixed", "-v", env=here)
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    assert b"proposers: period" in drafted.stderr
    line = inside.one_line(inside(*words, "--proposer", "perod"), 2)
    assert f"'perod' is not one of {', '.join(map(repr, [*PROPOSER_NAMES, 'period']))}" in line


def test_chat_server_and_completion_take_its_name(inside, main, example):
    done = inside("chat", "--main", main, "--ctx", 256, stdin=b"/draft period\n/draft perod\n")
    assert b"period, policy adaptive\n" in done.stderr
    assert b"/draft perod is unknown: give on, off, auto, draft, suffix" in done.stderr
    body = sampling_body.read(SamplingBody, {"speculative": {"proposer": "period"}})
    assert body.settings().proposer == "period"
    line = {"COMP_WORDS": "specdec chat --proposer pe", "COMP_CWORD": "3"}
    assert inside(env={"_SPECDEC_COMPLETE": "complete_bash"} | line).stdout == b"period\n"


BREAKS = {
    "no such module": ("", "missing:Lookup"),
    "no such class": ("", "broken_lookup:Lookup"),
    "an error at import": ("1 / 0", "broken_lookup:Broken"),
    "no lookup": ("class Broken: pass", "broken_lookup:Broken"),
    "an error for each answer": (LOOKUP.replace("return cls()", "1 / 0"), "broken_lookup:Broken"),
    "no needs_logits": (LOOKUP.replace("needs_logits", "_logits"), "broken_lookup:Broken"),
    "an error for each step": (LOOKUP.replace("return None", "1 / 0"), "broken_lookup:Broken"),
    "no proposal": (LOOKUP, "broken_lookup:Broken"),
}
MESSAGE = r"^proposer broken of the package specdec-broken failed \(.+\): update or uninstall it$"


@pytest.mark.parametrize("how", BREAKS)
def test_errors_name_the_package(session, broken, how):
    broken(*BREAKS[how])
    with pytest.raises(InvalidRequest, match=MESSAGE):
        answer(session, proposer="broken")
    plain, _ = answer(session, policy="off")
    assert len(plain) == 40


def test_an_error_ends_one_of_several_answers(session, broken):
    broken(LOOKUP)
    settings = [GenerationSettings(max_tokens=3, proposer=name) for name in ("broken", "none")]
    events = list(session.generate_many(["a", "b"], iter(settings)))
    assert [type(event).__name__ for number, event in events if number == 0][-1] == "Failed"
    assert isinstance(events[-1].event, Done)


def test_a_broken_package_is_one_line(inside, main, broken):
    broken("1 / 0")
    line = inside.one_line(inside("generate", "--main", main, "--proposer", "broken", "x"), 2)
    assert "proposer broken of the package specdec-broken failed (ZeroDivisionError: division by" in line


def test_a_name_that_is_built_in_wins(session, broken, monkeypatch):
    """The metadata of packages is not even read."""
    broken("1 / 0", name="suffix")
    assert list(installed.known_names()).count("suffix") == 1
    installed._found.cache_clear()
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **options: 1 / 0)
    assert answer(session, proposer="suffix")[0] == answer(session, policy="off")[0]
