"""Test shell completion, by the protocol of the three shells and in bash."""

import os
import shutil
import sys
import time
from unittest import mock

import pexpect
import pytest
import typer

from specdec_cli.app import app


def complete(command, shell, line, folder=None):
    """Return the completions that a shell receives for a line."""
    variables = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = command(env=variables | {"_SPECDEC_COMPLETE": f"complete_{shell}"}, cwd=folder)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_models_values_and_commands(inside, tmp_path, shell):
    for name in ("code.gguf", "copy.txt"):
        (tmp_path / name).touch()
    found = complete(inside, shell, "specdec generate --main co", tmp_path)
    assert "coder-7b" in found
    assert "code.gguf" in found
    assert "starter" not in found
    assert "copy.txt" not in found


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("chat --proposer lo", "lookup"),
        ("draft qu", "quantize"),
        ("cache cl", "clear"),
        ("generate --file a", ""),
    ],
)
def test_values_and_commands(inside, line, value):
    assert complete(inside, "bash", f"specdec {line}").strip() == value  # the shell completes paths


@pytest.mark.parametrize(
    "command",
    [
        "generate --draft",
        "bench --main",
        "bench",
        "bench x",
        "generate",
        "tune --draft",
        "tune",
        "tune x",
        "models check",
        "draft quantize",
        "models pull",
    ],
)
def test_every_model_parameter_is_completed(inside, command):
    assert "coder-7b" in complete(inside, "bash", f"specdec {command} coder-7")


def test_options_that_help_omits_are_completed(inside):
    assert complete(inside, "bash", "specdec chat --draft-p").split() == ["--draft-p-min"]
    assert complete(inside, "bash", "specdec serve --prompt-").split() == ["--prompt-cache"]
    assert not complete(inside, "bash", "specdec bench --prompt-").strip()
    assert "--help-all" in complete(inside, "bash", "specdec chat --help-").split()


def test_completion_ignores_broken_settings(inside, tmp_path, monkeypatch):
    (tmp_path / "broken.toml").write_text("topk =")
    monkeypatch.setitem(inside.environment, "SPECDEC_CONFIG", str(tmp_path / "broken.toml"))
    monkeypatch.setitem(inside.environment, "SPECDEC_TYPO", "1")
    assert complete(inside, "bash", "specdec generate --proposer lo") == "lookup\n"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Could not determine home directory."), PermissionError(13, "Permission denied", "/x")],
)
def test_without_a_home_it_cannot_be_installed(monkeypatch, capfd, error):
    monkeypatch.setattr("typer.core.TyperGroup.make_context", mock.Mock(side_effect=error))
    with pytest.raises((typer.Exit, SystemExit)):
        app(["--install-completion"], prog_name="specdec")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"specdec: completion cannot be installed ({str(error).rstrip('.')}): set HOME")


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_in_bash(specdec, fresh):
    script = fresh.folder / "specdec"  # as the installed command is named
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m specdec_cli "$@"\n')
    script.chmod(0o755)
    environment = fresh.environment | {
        "PATH": f"{fresh.folder}:{os.environ['PATH']}",
        "PS1": "% ",
        "SHELL": "/bin/bash",
    }
    bash = pexpect.spawn("bash", ["--norc", "--noprofile"], env=environment, encoding="utf-8", timeout=20)
    bash.expect("% ")
    bash.sendline("specdec --install-completion && . ~/.bashrc && echo rea''dy")
    bash.expect("bash completion installed in ")
    bash.expect("ready")
    assert "u001b" not in bash.before  # colours of Typer's that are shown as escapes
    bash.expect("% ")
    bash.sendline("specdec --show-completion; echo do''ne")
    bash.expect("done")
    assert "complete -o default" in bash.before
    assert "u001b" not in bash.before
    bash.expect("% ")
    bash.send("specdec models pull starter-p\t")
    time.sleep(0.1)
    bash.expect("starter-pair")
    bash.close(force=True)
