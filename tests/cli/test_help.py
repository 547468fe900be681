"""Test --help and --version: fast, and at any width."""

import re
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
    ["config", "set"],
    ["config", "unset"],
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
    for arguments, why in (
        (["fly"], "no such command 'fly': see specdec --help"),
        (["models", "pul"], "no such command 'pul'. Did you mean 'pull'?: see specdec models --help"),
        (["generate", "--fly"], "no such option: --fly"),
        (["generate", "a", "b"], "got unexpected extra argument(s) (b): see specdec generate --help"),
        (["generate", "--top-k", "x"], "invalid value for '--top-k': Input should be a valid integer: see"),
        (["generate", "--main"], "option '--main' requires an argument"),
        (["draft", "train"], "missing argument 'MAIN': see specdec draft train --help"),
        (["generate", "--fly\x1b[31m\n"], "no such option: --fly\\x1b[31m"),
    ):
        done = specdec(*arguments)
        line = specdec.one_line(done, 2)
        assert line.startswith(f"specdec: {why}"), line
        assert done.stdout == b""


def test_help_begins_with_what_people_need_and_ends_with_speculation(inside):
    for command, first in (
        ("generate", ["main", "draft", "ctx", "temp", "max-tokens", "prompt", "file", "system", "json"]),
        ("chat", ["main", "draft", "ctx", "temp", "max-tokens", "system"]),
        ("run", ["main", "draft", "ctx", "temp", "max-tokens", "prompt", "system"]),
    ):
        page = inside(command, "--help").stdout.decode()
        panels = re.findall("╭─ (.*?) ─", page)
        assert panels[-1] == "Speculation"
        options = page.partition("╭─ Options")[2].partition("╰")[0]
        assert re.findall("│ --([a-z-]+)", options)[: len(first)] == first
        assert "<bool>" not in page


def test_without_a_command_it_shows_help(specdec):
    done = specdec()
    assert b"generate" in done.stdout + done.stderr
