"""Test --help and --version: fast, and at any width."""

import subprocess
import sys

import pytest

import spec_local

COMMANDS = [
    [],
    ["run"],
    ["generate"],
    ["chat"],
    ["bench"],
    ["tune"],
    ["doctor"],
    ["models"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "path"],
    ["models", "show"],
    ["models", "rm"],
    ["models", "check"],
    ["draft", "quantize"],
    ["datastore"],
    ["datastore", "show"],
    ["datastore", "add"],
    ["datastore", "clear"],
    ["config"],
    ["config", "path"],
    ["config", "show"],
]


@pytest.mark.parametrize("width", [60, 200])
def test_help_of_every_command(specdec, width):
    # in one process, which is faster
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from specdec_cli.app import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    done = CliRunner().invoke(app, [*command, '--help'])\n"
        "    assert done.exit_code == 0, done.stderr\n"
        "    print('@', *command)\n"
        "    print(done.stdout)\n"
    )
    environment = specdec.environment | {"COLUMNS": str(width)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    pages = done.stdout.split("@ ")
    assert len(pages) == len(COMMANDS) if pages[0] else len(COMMANDS) + 1
    assert max(map(len, done.stdout.splitlines())) <= width
    assert "\x1b" not in done.stdout
    overview = pages[0]
    for command in ("run", "generate", "chat", "bench", "tune", "doctor", "models"):
        assert f" {command} " in overview
    page = next(p for p in pages if p.startswith("generate"))
    # At 60 columns Typer may cut long option names.
    for option in ("--main", "--draft", "--temp", "--seed", "--stop", "--json"):
        assert option in page
    if width == 200:
        for option in (
            "--no-spec",
            "--proposer",
            "--policy",
            "--draft-max",
            "--draft-p-min",
            "--max-tokens",
            "--cache-type",
            "--gpu-layers",
        ):
            assert option in page
        assert 'specdec generate "Why is the sky blue?"' in page
    groups = ("config", "models", "draft", "datastore")
    for page in pages:
        name, _, text = page.partition("\n")
        if name in groups or not name.strip() or name not in [" ".join(c) for c in COMMANDS]:
            continue
        examples = text.partition("Example")[2].partition("╭")[0]
        assert f"specdec {name}" in " ".join(examples.split()), name


def test_help_imports_nothing_slow(specdec):
    script = (
        "import runpy, sys\n"
        "sys.argv = ['specdec', 'generate', '--help']\n"
        "try:\n"
        "    runpy.run_module('specdec_cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "slow = {'llama_cpp', 'huggingface_hub', 'prompt_toolkit', 'numpy', 'gguf', 'jinja2', 'pydantic'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=specdec.environment, capture_output=True, check=True)


def test_version(specdec):
    done = specdec("--version")
    assert done.stdout == f"specdec {spec_local.__version__}\n".encode()
    assert done.stderr == b""
    assert done.returncode == 0


def test_usage_errors(specdec):
    for arguments in (["fly"], ["generate", "--fly"], ["generate", "a", "b"]):
        done = specdec(*arguments)
        assert done.returncode == 2
        assert done.stdout == b""
        assert b"Usage" in done.stderr
        assert b"Traceback" not in done.stderr


def test_without_a_command_it_shows_help(specdec):
    done = specdec()
    assert b"generate" in done.stdout + done.stderr
