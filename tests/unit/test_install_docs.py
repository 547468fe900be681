"""docs/install.md, and everything else that tells how to install specdec."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from spec_local.system import extras
from spec_local.system.folders import Kind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TELLING = ("*.md", "docs/**/*.md", "plugins/*/README.md", "Dockerfile", "Makefile", ".github/workflows/*.yml")
SOURCES = ("tools/*.py", "spec_local/**/*.py", "cli/**/*.py", "plugins/**/*.py")
BY_NAME = re.compile(r"""\binstall\b[^\n`]*[\s"']spec-local(?!\S*\.whl)""")


def test_a_name_in_a_command_is_found():
    for line in ("pip install --find-links dist spec-local", "pipx install 'spec-local[serve]'"):
        assert BY_NAME.search(line)
    for line in ('pip install "$(ls dist/spec_local-*.whl)[serve]"', "uv tool uninstall spec-local"):
        assert not BY_NAME.search(line)


def test_nothing_is_installed_from_an_index_by_its_name():
    """No index has specdec, so that a package of its name would be another one."""
    files = [file for pattern in TELLING + SOURCES for file in ROOT.glob(pattern)]
    assert len(files) > 300
    for file in files:
        if file.name != "CHANGELOG.md":
            found = BY_NAME.search(file.read_text(encoding="utf-8"))
            assert not found, (file.name, found[0])
    plugin = (ROOT / "plugins/llm-specdec/pyproject.toml").read_text()
    assert re.search(r'"spec-local @ \{root:', plugin)


def test_errors_and_docs_install_the_same_packages():
    command = ".venv/bin/python -m pip install "
    documented = re.findall(f"^{re.escape(command)}'(.*?)'", PAGE, re.MULTILINE)
    assert documented == extras.packages("train") + extras.packages("plot")
    training = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert re.findall(f"^{re.escape(command)}'(.*?)'", training, re.MULTILINE) == extras.packages("train")


def test_blocks_that_were_never_run_say_why():
    marked = [block for block in BLOCKS if "never run" in block]
    assert marked
    assert all(re.match(r"# never run: \w.{20,}\n", block) for block in marked)
    for block in set(BLOCKS) - set(marked):
        assert "uv python" not in block
        assert "CMAKE_ARGS" not in block


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_uninstalling_deletes_every_folder(tmp_path, monkeypatch):
    for kind in ("CONFIG", "CACHE", "DATA", "STATE"):
        monkeypatch.delenv(f"XDG_{kind}_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    used = {f"user_{kind}_dir" for kind in get_args(Kind)}
    assert len(used) == 4
    for system in (Unix, MacOS):
        for name in used:
            folder = Path(getattr(system("specdec"), name))
            (folder / "file").mkdir(parents=True, exist_ok=True)
            (folder.parent / "other").mkdir(exist_ok=True)
    assert len(list(tmp_path.rglob("specdec"))) == 6
    (script,) = (block for block in BLOCKS if block.startswith("rm -rf ~"))
    subprocess.run(["bash", "-e", "-c", script], check=True)
    assert not list(tmp_path.rglob("specdec"))
    assert len(list(tmp_path.rglob("other"))) == 6
