"""Test --help and --version: fast, and at any width; and command lines that no command understands."""

import re
import subprocess
import sys

import pytest
import typer

import spec_local
from specdec_cli.app import app


def all_commands(command, words=()):
    """Yield the words of a command and of those below it, and whether it is a group of them."""
    below = getattr(command, "commands", {})
    yield words, bool(below)
    for name, each in below.items():
        yield from all_commands(each, (*words, name))


COMMANDS = dict(all_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(("specdec", *words)))
def test_help(inside, command, width):
    done = inside(*command, "--help", env={"COLUMNS": str(width)})
    assert done.returncode == 0
    page = done.stdout.decode()
    assert max(map(len, page.splitlines())) <= width
    assert "\x1b" not in page
    if not COMMANDS[command]:
        examples = page.partition("Example")[2].partition("╭")[0]
        assert " ".join(("specdec", *command)) in " ".join(examples.split())


@pytest.mark.parametrize("command", ["generate", "draft train"])
def test_help_imports_nothing_slow(specdec, command):
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['specdec', *{command.split()!r}, '--help']\n"
        "try:\n"
        "    runpy.run_module('specdec_cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "slow = {'llama_cpp', 'huggingface_hub', 'prompt_toolkit', 'numpy', 'gguf', 'jinja2', 'pydantic'}\n"
        "slow |= {'matplotlib', 'psutil', 'rich.progress', 'torch'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=specdec.environment, capture_output=True, check=True)


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("generate", ["main", "draft", "ctx", "temp", "max-tokens", "prompt", "file", "system", "json"]),
        ("chat", ["main", "draft", "ctx", "temp", "max-tokens", "system"]),
        ("run", ["main", "draft", "ctx", "temp", "max-tokens", "prompt", "system"]),
    ],
)
def test_help_begins_with_what_people_need_and_ends_with_speculation(inside, command, first):
    page = inside(command, "--help").stdout.decode()
    panels = re.findall("╭─ (.*?) ─", page)
    assert panels[-1] == "Speculation"
    options = page.partition("╭─ Options")[2].partition("╰")[0]
    assert re.findall("│ --([a-z-]+)", options)[: len(first)] == first
    assert "<bool>" not in page


def test_help_names_the_extra(inside):
    """Square brackets are markup in help texts, and must be escaped."""
    assert b"pip install 'spec-local[train]'" in inside("draft", "train", "--help").stdout


def test_without_a_command_it_shows_help(inside):
    done = inside()
    assert b"generate" in done.stdout + done.stderr


def test_version(specdec):
    done = specdec("--version")
    version = f"specdec {spec_local.__version__}\n".encode()
    assert (done.returncode, done.stdout, done.stderr) == (0, version, b"")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("fly", "no such command 'fly': see specdec --help"),
        ("models pul", "no such command 'pul'. Did you mean 'pull'?: see specdec models --help"),
        ("generate --fly", "no such option: --fly"),
        ("generate a b", "got unexpected extra argument(s) (b): see specdec generate --help"),
        ("generate --top-k x", "invalid value for '--top-k': Input should be a valid integer: see"),
        ("generate --main", "option '--main' requires an argument"),
        ("draft train", "missing argument 'MAIN': see specdec draft train --help"),
    ],
)
def test_usage_errors(inside, arguments, why):
    assert inside.one_line(inside(*arguments.split()), 2).startswith(f"specdec: {why}")
