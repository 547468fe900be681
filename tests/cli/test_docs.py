"""README and docs: every command line in them runs, on tiny models under the names they use."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import PIL.Image
import pytest
import typer

from spec_local.llama.tiny import write_tiny_model
from spec_local.models.head_versions import HeadVersions
from specdec_cli import settings
from specdec_cli.app import app
from tests.chat_templates import TOOL_TEMPLATES
from tests.cli.conftest import Inside
from tests.hub_server import HubServer
from tests.scripted_model import write_scripted_model
from tests.tiny_projectors import write_projector
from tests.tiny_vision import write_vision_model

ROOT = Path(__file__).parents[2]
USER_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*USER_PAGES, *sorted((ROOT / "docs/notes").glob("*.md"))]  # notes are for contributors
LANGUAGES = {"sh", "python", "toml", "text"}
NOT_RUN = {
    r"make (demo|test)\b": "installs everything, and runs this test",
    r"make (wheels|PYTHON=)": "compiles llama.cpp for minutes",
    r"(\S+ -m )?pipx? install ": "needs the network: tools/check_wheels.py does it",
    r"uv tool install ": "installs into the user's folders",
    r"specdec doctor --fix": "may compile the CPU kernels: run by test_kernels.py",
    r"specdec .*--workers|specdec worker|ssh ": "need other machines: run on loopback in test_workers.py",
    r"specdec serve\b": "serves until a signal ends it: run in tests/server",
    r"specdec .*--device gpu": "needs a GPU",
    r"python benchmarks/": "measures for minutes",
    r"specdec draft train ": "trains for minutes: run by test_draft_train.py",
    r"git clone |cd specdec$": "needs the network: the sets are in the folder already",
    r"export PATH=": "is for the folder of specdec",
    r"rm -rf ~": "deletes the user's files: run by test_install_docs.py",
    r"specdec --install-completion": "asks which shell started it: run in one by test_completion.py",
}
NEEDS_A_SHELL = re.compile(r"[|<>;]|\$\(|^(?!specdec|SPECDEC_)|--kernels")
"""Shell syntax, other programs, and kernels, which are loaded once per process."""
STARTED = set()
"""The commands that have run in a process of their own."""
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = """\
[models.starter]
description = "tiny"
licence = "none"
repo = "tiny/tiny-GGUF"
file = "starter.gguf"

[models."qwen2.5-coder-7b"]
description = "tiny"
licence = "none"
repo = "tiny/tiny-GGUF"
file = "main.gguf"

[models."qwen2.5-coder-0.5b"]
description = "tiny"
licence = "none"
repo = "tiny/tiny-GGUF"
file = "draft.gguf"

[models.gemma3-4b]
description = "tiny"
licence = "none"
repo = "tiny/seeing-GGUF"
file = "gemma.gguf"
"""
TOOL_CALL = "<0x0A>", ['<tool_call>{"name": "weather", ', '"arguments": {"city": "Paris"}}</tool_call>']
"""The last token of the prompt, and what the model of the docs writes then."""


def blocks(page):
    """(language, text, line) of each fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    assert text.count("\n```") % 2 == 0, page
    return [(m[1], m[2], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def cases(language):
    return [
        pytest.param(text, id=f"{page.name}:{line}")
        for page in PAGES
        if page.name != "server.md"  # its requests need a server: see tests/server/test_docs.py
        for found, text, line in blocks(page)
        if found == language and not text.startswith("# never run: ")  # which readers see, too
    ]


@pytest.fixture(scope="module")
def hub(main, draft, tmp_path_factory):
    """A hub that has the models that the docs name, and a cache into which they have been pulled."""
    starter = write_tiny_model(tmp_path_factory.mktemp("hub") / "s.gguf", n_layers=1, n_ctx=4096, end_scale=2)
    with HubServer() as server:
        files = {"starter.gguf": starter, "main.gguf": main, "draft.gguf": draft}
        server.put("tiny/tiny-GGUF", {name: path.read_bytes() for name, path in files.items()})
        folder = starter.parent
        files = [
            write_vision_model(folder / "gemma.gguf", "gemma3", n_ctx=4096),
            write_projector(folder / "mmproj-gemma.gguf", "gemma3"),
        ]
        server.put("tiny/seeing-GGUF", {path.name: path.read_bytes() for path in files})
        yield server


@pytest.fixture(scope="module")
def world(specdec, main, draft, hub, tmp_path_factory):
    """A folder with the files that the docs name, and an environment that makes everything short."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "bin").mkdir()
    command = folder / "bin/specdec"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m specdec_cli "$@"\n')
    command.chmod(0o755)
    (folder / "main.gguf").symlink_to(main)
    for name in ("draft.gguf", "head.gguf"):  # what a head drafts is tested elsewhere
        (folder / name).symlink_to(draft)
    write_tiny_model(folder / "main-f16.gguf", n_layers=1, n_embd=256, n_ctx=4096)
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    write_tiny_model(folder / "coder.gguf", n_layers=1, n_ctx=4096, extra_tokens=marks)
    before, script = TOOL_CALL
    write_scripted_model(folder / "qwen3-8b.gguf", TOOL_TEMPLATES["Hermes"], before, script)
    (folder / "notes.txt").write_text("Milk.\nBread.\n")
    for name in ("photo.jpg", "later.jpg"):
        PIL.Image.effect_noise((64, 48), 90).save(folder / name)
    (folder / "sum.py").write_text("def sum(a, b):\n    c = a\n    c += b\n    return c\n")
    for name in ("EAGLE/eagle/data/mt_bench", "EAGLE/eagle/data/gsm8k", "Spec-Bench/data/spec_bench"):
        (folder / name).mkdir(parents=True)
        (folder / name / "question.jsonl").write_text(
            '{"question_id": 81, "category": "math", "turns": ["the of", "and to"], "reference": []}\n'
        )
    (folder / "config/specdec").mkdir(parents=True)
    (folder / "config/specdec/models.toml").write_text(NAMED)
    environment = (
        specdec.environment
        | hub.environment(folder)
        | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")]),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_DATA_HOME": str(folder / "data"),
            "SPECDEC_MAX_TOKENS": "3",
            "SPECDEC_CTX": "2048",
            "SPECDEC_THREADS": "1",
            "SPECDEC_ROUNDS": "1",
            "SPECDEC_RUNS": "1",
            "SPECDEC_PER_CATEGORY": "1",
        }
    )
    subprocess.run(["git", "init", "-q"], cwd=folder, check=False)
    inside = Inside(folder, environment)
    for name in ("starter", "coder-7b", "gemma3-4b"):
        run(f"specdec models pull {name}", inside)
    with inside._in_place():
        versions = HeadVersions(folder / "main.gguf")
        for end in (b"\0", b"\0\0"):  # two files that can be loaded
            (folder / "learned.gguf").write_bytes(draft.read_bytes() + end)
            versions.add(folder / "learned.gguf")
    return inside


def run(line, inside):
    """Run a command line: in this process, unless it needs a shell or is the first one of its command."""
    command = re.search(r"specdec ((config|datastore|draft|models) )?\w+|$", line)[0]
    if NEEDS_A_SHELL.search(line) or command not in STARTED:
        STARTED.add(command)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", line],
            cwd=inside.folder,
            env=inside.environment,
            input=b"hello\n",
            capture_output=True,
            timeout=60,
            check=False,
        )
    else:
        variables, words = line.split("specdec ", 1)
        set_here = dict(word.split("=", 1) for word in shlex.split(variables))
        done = inside(*shlex.split(words, comments=True), stdin=b"hello\n", env=set_here)
    assert done.returncode == 0, (line, done.stderr.decode(), done.stdout.decode())
    assert not re.search(b"Traceback|is not an option", done.stderr)
    return done


@pytest.mark.skipif(not shutil.which("bash") or not shutil.which("jq"), reason="there is no bash, or no jq")
@pytest.mark.parametrize("script", cases("sh"))
def test_command_lines(script, world):
    lines = [line for line in script.splitlines() if not any(re.match(known, line) for known in NOT_RUN)]
    for copy in world.folder.glob("main-f16-*"):  # of another page
        copy.unlink()
    # JSON that is cut off is invalid.
    more = {"SPECDEC_MAX_TOKENS": "200"} if "--json-schema" in script else {}
    for line in lines:
        if "--parallel" not in line:
            line = re.sub(r"--per-category \d+", "--per-category 1", line)  # which takes less time
        run(line, Inside(world.folder, world.environment | more))
    if "models rm" in script:
        run("specdec models pull coder-7b", world)


@pytest.mark.parametrize("script", cases("python"))
def test_python(script, world):
    shown = io.StringIO()
    variables = mock.patch.dict(os.environ, world.environment, clear=True)
    with variables, contextlib.chdir(world.folder), contextlib.redirect_stdout(shown):
        exec(script, {"__name__": "__main__"})
    assert shown.getvalue()


@pytest.mark.starter
def test_several_chats_with_the_starter(starter_path, tmp_path, monkeypatch, capsys):
    """Its answers are about the questions, so that the example gives it chats and no texts to continue."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (example,) = (case.values[0] for case in cases("python") if "generate_many" in case.values[0])
    exec(example.replace("main.gguf", str(starter_path)), {})
    lines = sorted(line for line in capsys.readouterr().out.splitlines() if line)
    for subject, line in zip(("bird", "river", "tree"), lines, strict=True):
        assert line.startswith(f"What is a {subject}? A {subject} is a ")


@pytest.mark.parametrize("text", cases("toml"))
def test_settings_files(text, world, tmp_path):
    """A config file, or a models.toml."""
    inside = Inside(tmp_path, world.environment | {"XDG_CONFIG_HOME": str(tmp_path)})
    if "[models." in text:
        (tmp_path / "specdec").mkdir()
        (tmp_path / "specdec/models.toml").write_text(text)
        assert b"my-pair" in inside("models", "list").stdout
        return
    (tmp_path / "config.toml").write_text(text)
    shown = inside("config", "show", "--config", "config.toml").stdout.decode()
    set_here = {line.split("\t")[0] for line in shown.splitlines() if "config.toml:" in line}
    n_short = "threads" in text  # set in the environment
    assert len(set_here) == sum("=" in line for line in text.splitlines()) - n_short


def test_every_block_has_a_known_language():
    for page in PAGES:
        for language, text, line in blocks(page):
            assert language in LANGUAGES, f"{page.name}:{line}"
            if language == "text":
                assert not re.search(r"^\S*specdec [a-z-]", text, re.MULTILINE), (
                    f"{page.name}:{line} runs specdec"
                )


def test_commands_that_are_not_run_occur_in_the_docs():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for known in NOT_RUN:
        assert re.search(rf"^{known}", text, re.MULTILINE), known


def commands():
    """Command lines in running text and in tables, in the examples of --help, and in the messages of doctor
    and config."""
    for page in PAGES:
        running = FENCE.sub("", page.read_text(encoding="utf-8"))
        for inline in re.findall(r"`([^`\n]*\bspecdec [^`\n]*)`", running):
            yield page.name, inline
    for name, command in settings.runnable(typer.main.get_command(app)):
        for line in (command.help or "").splitlines():
            if line.startswith("  ") and "specdec " in line:
                yield f"{name} --help", line


def test_commands_and_options_in_running_text_exist():
    """Options and commands of lines that cannot be run as they stand, since they have FILE or MAIN in
    them."""
    known = dict(settings.runnable(typer.main.get_command(app)))
    root = {"--version", "--help", "--no-color", "--install-completion", "--show-completion"}
    everywhere = {"--help", "--config", "-h"}
    checked = 0
    for place, line in commands():
        for part in re.split(r"\$\(|[|)]| && ", line):
            words = part.split("specdec ")[-1].replace("\\", "").split() if "specdec " in part else []
            if not words or words[0].startswith("-"):
                assert set(words[:1]) <= root, (place, line)
                continue
            word, *more = (re.sub(r"\W+$", "", each) for each in words)
            if word not in known and more:  # a group, and one of its commands
                own = {f"config-{name}" for name in ("show", "path", "set", "unset")}
                assert f"{word}-{more[0]}" in {*known, *own}, (place, line)
            assert any(n == word or n.startswith(f"{word}-") for n in [*known, "config"]), (place, line)
            name = "-".join(words[:2]) if "-".join(words[:2]) in known else word
            opts = {o for n in ([name] if name in known else []) for p in known[n].params for o in p.opts}
            if opts:
                used = {
                    w.split("=")[0] for w in words[1:] if re.match(r"-\w|--\w", w) and not re.match(r"-\d", w)
                }
                used = {re.sub(r"[^\w-].*$", "", w) for w in used}
                bundles = {w for w in used if re.fullmatch(r"-[a-z]+", w)}
                assert used - bundles - everywhere <= opts, (place, line)
                assert {f"-{c}" for w in bundles for c in w[1:]} <= opts | everywhere, (place, line)
                checked += 1
    assert checked > 20


def test_links_have_targets():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), (page.name, target)
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, (page.name, target)
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]} - {"index.md"}
    assert all(f"({page})" in index for page in pages)


def test_user_pages_stay_short():
    """Tables, measurements and experiments belong to docs/notes."""
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in USER_PAGES}
    assert words["benchmarks.md"] <= 1_000
    assert sum(words.values()) <= 26_000, words


@pytest.mark.parametrize("figure", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_figures_are_svg_with_a_dark_mode(figure):
    assert ElementTree.parse(figure).getroot().tag.endswith("svg")
    assert b"prefers-color-scheme: dark" in figure.read_bytes()


@pytest.mark.parametrize("colour", ["accepted", "corrected"])
def test_the_picture_of_a_chat_shows_what_was_drafted(colour):
    assert f'class="{colour}"' in (ROOT / "docs/images/chat.svg").read_text(encoding="utf-8")
