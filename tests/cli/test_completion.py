"""Test shell completion, by the protocol of the three shells and in bash."""

import os
import shutil
import sys
import time

import pexpect
import pytest


@pytest.fixture
def complete(specdec, tmp_path):
    """Return the completions that a shell receives for a line."""

    def complete(shell, line, **files):
        for name in files.get("files", ()):
            (tmp_path / name).touch()
        words = line.split(" ")
        variables = {
            "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
            "zsh": {"_TYPER_COMPLETE_ARGS": line},
            "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        }[shell]
        done = specdec(env=variables | {"_SPECDEC_COMPLETE": f"complete_{shell}"}, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, b""), done
        return done.stdout.decode()

    return complete


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_models_values_and_commands(complete, shell):
    found = complete(shell, "specdec generate --main co", files=["code.gguf", "copy.txt"])
    assert "coder-7b" in found
    assert "code.gguf" in found
    assert "starter" not in found
    assert "copy.txt" not in found
    assert "lookup" in complete(shell, "specdec chat --proposer lo")
    assert "quantize" in complete(shell, "specdec draft qu")


def test_every_model_parameter_is_completed(complete):
    for line in (
        "generate --draft",
        "bench --main",
        "tune",
        "tune x",
        "models check",
        "draft quantize",
        "models pull",
    ):
        assert "coder-7b" in complete("bash", f"specdec {line} coder-7"), line
    assert complete("bash", "specdec generate --file a") == "\n"  # the shell completes paths


def test_completion_ignores_broken_settings(specdec, tmp_path):
    (tmp_path / "broken.toml").write_text("topk =")
    variables = {
        "COMP_WORDS": "specdec generate --proposer lo",
        "COMP_CWORD": "3",
        "_SPECDEC_COMPLETE": "complete_bash",
    }
    broken = {"SPECDEC_CONFIG": str(tmp_path / "broken.toml"), "SPECDEC_TYPO": "1"}
    done = specdec(env=variables | broken)
    assert (done.stdout, done.stderr) == (b"lookup\n", b"")


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
    bash.expect("ready")
    bash.expect("% ")
    bash.send("specdec models pull qwen3-hu\t")
    time.sleep(0.1)
    bash.expect("qwen3-huge")
    bash.close(force=True)
