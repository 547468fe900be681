"""Models of other programs by name, and the tables of specdec models list."""

import random
from pathlib import Path

import pytest
from rich.cells import cell_len

from spec_local.llama.tiny import write_tiny_model
from specdec_cli import models_view
from tests import hostile
from tests.stored_models import add_to_ollama, write_header

TINY = ["--raw", "--ctx", 64, "-n", 2, "--threads", 1, "--temp", 0, "x"]


@pytest.fixture
def stored(fresh_inside):
    """The command, and models of ollama and LM Studio in its home folder."""
    home = fresh_inside.folder
    for name in ("tiny/1b", "tiny/latest"):
        path = write_tiny_model(home / "m.gguf", n_layers=1, tensor_type="F32")
        add_to_ollama(home / ".ollama" / "models", f"registry.ollama.ai/library/{name}", path)
    lm_studio = home / ".lmstudio" / "models"
    write_header(lm_studio / "someone-with-a-long-name" / "A-Model-With-A-Long-Name-GGUF" / "a-Q4_K_M.gguf")
    write_header(lm_studio / "bad" / hostile.NAME[:60] / "b-Q4_K_M.gguf")
    write_header(lm_studio / "bad" / "name" / "b-Q4_K_M.gguf", name=hostile.ALL, license=hostile.ALL)
    return fresh_inside


LONG = "someone-with-a-long-name/A-Model-With-A-Long-Name-GGUF:Q4_K_M"


def test_a_model_of_ollama_answers(stored):
    done = stored("generate", "--main", "tiny:1b", "--draft", "ollama:tiny", *TINY)
    assert done.returncode == 0, done
    assert done.stdout
    missing = stored.one_line(stored("generate", "--main", "tiny:2b", *TINY), 2)
    assert "there is no model or file 'tiny:2b': similar names are tiny:" in missing
    (path,) = stored("models", "path", "tiny:1b").stdout.decode().split()
    assert path.endswith("/tiny:1b.gguf")
    assert Path(path).resolve().parent == stored.folder / ".ollama" / "models" / "blobs"


def test_they_are_listed_shown_and_kept(stored):
    rows = [line.split("\t") for line in stored("models", "list", "--local").stdout.decode().splitlines()]
    assert {row[0]: row[1] for row in rows} == {
        "starter-draft": "downloaded",
        LONG: "in LM Studio",
        "bad/name:Q4_K_M": "in LM Studio",
        "tiny:1b": "in ollama",
        "tiny:latest": "in ollama",
    }
    assert {len(row) for row in rows} == {5}
    assert not list(stored.folder.rglob("tiny:*.gguf"))  # a list makes no links
    shown = stored("models", "show", "tiny:1b").stdout.decode()
    assert "state       in ollama\ndescription tiny-llama-0\n" in shown
    assert "belongs to ollama: delete it there" in stored.one_line(stored("models", "rm", "tiny:1b", "-y"), 2)
    pulled = stored("models", "pull", "tiny:1b")
    assert pulled.stdout == stored("models", "path", "tiny:1b").stdout
    assert pulled.stderr == b""
    line = {"COMP_WORDS": "specdec models show ti", "COMP_CWORD": "3", "_SPECDEC_COMPLETE": "complete_bash"}
    assert stored(env=line).stdout == b"tiny:1b\ntiny:latest\n"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_list_on_a_terminal(stored, width):
    del stored.environment["COLUMNS"]
    _, screen = stored.on_terminal("models", "list", width=width)
    seen = stored.plain(screen).replace("\r\n", "\n")
    assert hostile.forbidden(seen) == []
    lines = seen.splitlines()
    first_words = {line.split("  ")[0] for line in lines}
    piped = [line.split("\t") for line in stored("models", "list").stdout.decode().splitlines()]
    assert {row[0] for row in piped} <= first_words  # no name is cut
    assert max(map(cell_len, lines)) <= max(width, len(LONG))
    titles = [line for line in lines if line.startswith(("On this", "To download", "Pairs"))]
    assert titles == [
        "On this machine",
        "To download",
        "Pairs of a main and a draft model, with the size of both",
    ]
    assert ("in LM Studio" in seen) is (width >= 80)  # the less important column
    assert "98 MB" in seen


def test_no_cell_is_cut_at_any_width():
    rng = random.Random(0)
    letters = "abc de 日本 é-/:."
    for _ in range(200):
        rows = [
            ["n" * rng.randrange(1, 60), "1.5 GB", "MIT", "".join(rng.choices(letters, k=rng.randrange(90)))]
            for _ in range(rng.randrange(1, 8))
        ]
        width = rng.randrange(10, 120)
        lines = models_view.lines(rows, width)
        shown = "".join("".join(lines).split())
        for row in rows:
            assert any(line.split("  ")[0] == row[0] for line in lines)
        assert sum(shown.count(c) for c in "日本é") == sum(row[3].count(c) for row in rows for c in "日本é")
        longest_name = max(len(row[0]) for row in rows)
        assert max(map(cell_len, lines)) <= max(width, longest_name + 2 + 6 + 2 + 28)
