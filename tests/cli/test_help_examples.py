"""Every example in the help of every command runs as it stands, on tiny models with these names."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess

import pytest
import typer

from tests.checkpoints import write_checkpoint
from tests.cli import test_docs
from tests.cli.conftest import BUILT, Inside
from tests.cli.test_help import COMMANDS
from tests.tiny_heads import write_tiny_main
from tests.torch_eagle import tiny_eagles

hub, docs_world = test_docs.hub, test_docs.world
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
LLAMA = "bartowski/Llama-3.2-3B-Instruct-GGUF"
NAMED = test_docs.NAMED.replace('"main.gguf"', '"coder.gguf"') + (
    '\n[models.qwen3-4b]\ndescription = "tiny"\nlicence = "none"\nrepo = "tiny/tiny"\nfile = "main.gguf"\n'
)
ONLY_PARSED = {
    r"specdec doctor --fix": "may compile the CPU kernels: run by test_kernels.py",
    r"specdec draft train ": "trains for minutes: run by test_draft_train.py",
}
UNTIL_STOPPED = {
    r"(\w+=\w+ )?specdec serve\b": b"http://",
    r"specdec worker": b"worker at",
}
"""Commands that end at a signal, and what they write to standard error when they have started."""
MAY_FAIL = {
    r"specdec worker --host 192": rb"specdec: .*192\.168\.1\.7.*\n",  # no address of this machine
    r"specdec doctor --report": rb"specdec: nothing was measured on this machine .*\n",
}
"""Commands that this machine may be unable to run: they then end with this line."""


def examples():
    for words in COMMANDS:
        command = BUILT
        for word in words:
            command = command.commands[word]
        for line in (command.help or "").splitlines():
            if line.startswith("  "):
                yield pytest.param(line.strip(), id=f"{' '.join(words)}: {line.strip()}")


EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def world(hub, docs_world, main, draft):
    """The world of the docs, with the files and models that the examples name."""
    folder, environment = docs_world.folder, docs_world.environment
    coder = folder / "coder.gguf"
    hub.put("tiny/tiny-GGUF", {p: (folder / p).read_bytes() for p in ("coder.gguf", "draft.gguf")})
    hub.put("tiny/tiny", {"main.gguf": main.read_bytes()})
    hub.put(LLAMA, {"Llama-3.2-3B-Instruct-Q5_K_M.gguf": coder.read_bytes()})
    (folder / "config/specdec/models.toml").write_text(NAMED)
    (folder / "llama-13b.gguf").symlink_to(main)
    write_tiny_main(folder / "llama.gguf", n_layers=8)
    eagle = tiny_eagles()["SafeAILab"]
    head = write_checkpoint(folder / "eagle3-folder", eagle.config, eagle.tensors)
    hub.put(HEAD, {path.name: path.read_bytes() for path in head.iterdir()})
    (folder / "tiny.gguf").symlink_to(draft)
    lines = "".join(f"x{n} = {n}\n" for n in range(60))
    for name in ("f.py", "README.md", "src/g.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(lines)
    (folder / "prompts.txt").write_text("Name a colour.\nName a fruit.\n")
    subprocess.run(["git", "add", "f.py"], cwd=folder, check=True)
    (folder / "f.py").write_text(lines.replace("x50", "y50"))  # for git diff
    inside = Inside(folder, environment | {"EDITOR": "true"})
    pull(inside)
    return inside


def pull(inside):
    for name in ("coder-7b", "qwen3-4b"):
        done = inside("models", "pull", name)
        assert done.returncode == 0, done.stderr


def start(line, world):
    more = {"SPECDEC_PER_CATEGORY": "8"} if "--parallel" in line else {}  # as many as are answered at a time
    if re.search(r"specdec (serve|worker)", line):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            more = {"SPECDEC_PORT": str(free.getsockname()[1])}
    return subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", line],
        cwd=world.folder,
        env=world.environment | more,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_there_are_examples():
    """Of each command; and each exception is one of an example."""
    assert len(EXAMPLES) > len([words for words, is_group in COMMANDS.items() if not is_group])
    for known in (*ONLY_PARSED, *UNTIL_STOPPED):
        assert any(re.match(known, example.values[0]) for example in EXAMPLES)


@pytest.mark.skipif(not shutil.which("bash") or not shutil.which("jq"), reason="there is no bash, or no jq")
@pytest.mark.parametrize("line", EXAMPLES)
def test_example(line, world, terminal):
    if any(re.match(known, line) for known in ONLY_PARSED):
        parse(shlex.split(line)[1:])
        return
    if "--continue" in line and "chat" in line:
        person = terminal("starter", specdec=world)
        person.prompt()
        person.say("hello")
        person.type("/exit\r")
        assert person.leaves_with() == 0
    ready = next((text for known, text in UNTIL_STOPPED.items() if re.match(known, line)), None)
    failure = next((text for known, text in MAY_FAIL.items() if re.match(known, line)), None)
    process = start(re.sub(r"--port \d+", "", line), world)
    try:
        if ready and not failure:
            world.wait_for(process, ready)
            os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(b"hello\n", timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if failure and process.returncode:
        assert process.returncode in (1, 2)
        assert re.fullmatch(failure, err), err
        return
    assert process.returncode in ((0, 143) if ready else (0,)), err.decode()
    assert not re.search(b"Traceback|is not an option", err)
    if "models rm" in line:
        pull(world)


def parse(words):
    """Read the arguments of a command as the command line does, but do not run it."""
    command, ctx = BUILT, typer.Context(BUILT, info_name="specdec")
    while words and words[0] in getattr(command, "commands", {}):
        command, word = command.commands[words[0]], words[0]
        words = words[1:]
        if hasattr(command, "commands"):
            ctx = typer.Context(command, parent=ctx, info_name=word)
    command.make_context(word, list(words), parent=ctx)


def test_a_wrong_example_would_be_found(world):
    with pytest.raises(Exception, match="No such option"):
        parse(["draft", "train", "main.gguf", "--minuts", "3"])
    process = start("specdec generate starter --suffx x", world)
    assert process.communicate(b"", timeout=60)[1].startswith(b"specdec: no such option --suffx")
