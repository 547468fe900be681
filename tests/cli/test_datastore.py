"""specdec datastore and --datastore, as a person uses them."""

import json
import os
import re

import pytest

from spec_local.datastore.text_store import Datastore
from spec_local.llama.model import Model
from tests.cli.conftest import Specdec, folders

TINY = ["--threads", 1, "--ctx", 512]


@pytest.fixture
def apart(home, tmp_path):
    """The command with what was checked and measured, and a store of its own."""
    own = tmp_path / "cache"
    (own / "specdec").mkdir(parents=True)
    for kept in (home / "cache/specdec").iterdir():
        if kept.name != "texts":
            (own / "specdec" / kept.name).symlink_to(kept)
    return Specdec(tmp_path, folders(home) | {"XDG_CACHE_HOME": str(own)})


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "project"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "one.py").write_text("def one():\n    return 1\n" * 5)
    (folder / "deep/two.txt").write_text("The two of them were long in words.\n" * 5)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0 and more")
    (folder / "latin.txt").write_bytes("Käse und Brot".encode("latin-1"))
    (folder / "data.json").write_text("1, " * 400_000)
    (folder / "empty.txt").write_text("")
    (folder / ".git/config").write_text("hidden hidden hidden hidden")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    return folder


def shown(apart):
    done = apart("datastore", "show")
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.decode().strip().split("\n\n")
    return [dict(re.split(r" +", line, maxsplit=1) for line in b.splitlines()) for b in blocks if b]


def notes(done, code=0):
    assert done.returncode == code, done.stderr
    return done.stderr.decode()


def answer(apart, main, *more):
    arguments = ["generate", "--main", main, *TINY, "--temp", 0, "-n", 40, "--json", *more, "words"]
    done = apart(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_kept_unless_asked_for(apart, main):
    answer(apart, main)
    done = apart("datastore", "show")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"nothing is kept" in done.stderr
    assert b"nothing is kept" in apart("datastore", "clear").stderr
    assert not list(apart.folder.rglob("texts"))


def test_an_answer_is_kept_and_shown(apart, main):
    said = answer(apart, main, "--datastore")
    [store] = shown(apart)
    assert (store["models"], store["texts"], store["tokens"]) == ("main.gguf", "1", "50")
    assert store["path"].startswith(str(apart.folder))
    assert answer(apart, main, "--datastore")["content"] == said["content"]
    assert shown(apart) == [store]  # the same answer is no other text


def test_every_way_to_ask_for_it(apart, main, tmp_path):
    (tmp_path / "c.toml").write_text("datastore = true\n")
    told = {"SPECDEC_DATASTORE": "1"}

    def say(word, *arguments, env=None):
        done = apart("generate", "--main", main, *TINY, "-n", 8, *arguments, word, env=env)
        assert done.returncode == 0, done.stderr

    say("words", "--no-datastore", env=told)
    say("words", "--config", tmp_path / "c.toml", "--no-datastore")
    assert shown(apart) == []
    say("some", "--config", tmp_path / "c.toml")
    say("other", env=told)
    assert shown(apart)[0]["texts"] == "2"


def test_files_and_folders(apart, main, sources):
    done = apart("datastore", "add", main, sources)
    told = notes(done)
    assert done.stdout == b""
    for name, reason in (
        ("picture.png", "no text in UTF-8"),
        ("latin.txt", "no text in UTF-8"),
        ("data.json", "larger than 1 MiB"),
        ("empty.txt", "next to empty"),
        ("pipe", "no ordinary file"),
    ):
        [line] = [line for line in told.splitlines() if reason in line]
        assert name in line
    assert "loop" not in told
    assert "hidden" not in told
    assert "added 2 files" in told
    [store] = shown(apart)
    assert store["texts"] == "2"
    assert notes(apart("datastore", "add", main, sources)) == told
    assert shown(apart) == [store]  # the same again does not double it
    (sources / "one.py").write_text("def one():\n    return 2\n" * 50)
    notes(apart("datastore", "add", main, sources / "one.py"))
    [longer] = shown(apart)
    assert longer["texts"] == "2"
    assert int(longer["tokens"]) > int(store["tokens"])


def test_what_was_said_is_guessed(apart, main):
    fixed = ["--policy", "fixed", "--draft-max", 8, "--datastore"]
    first, again = answer(apart, main, *fixed), answer(apart, main, *fixed)
    assert again["content"] == first["content"]
    accepted = [each["timings"].get("draft_n_accepted", 0) for each in (first, again)]
    assert accepted[1] >= 25 + accepted[0]


def test_what_was_added_is_there_as_tokens(apart, main, tmp_path):
    text = "The two of them were long in words.\n"
    (tmp_path / "two.txt").write_text("\ufeff" + text)
    notes(apart("datastore", "add", main, tmp_path / "two.txt"))
    model = Model(main, weights=False)
    tokens = model.vocabulary.tokenize(text)
    [folder] = apart.folder.glob("cache/specdec/texts/*")
    matches, rows = Datastore(folder, model.vocabulary.n_tokens).find(tokens[:6], len(tokens) - 6)
    assert (list(matches), rows.tolist()) == ([6], [tokens[6:]])


def test_wrong_requests(apart, main, sources):
    for arguments, what in (
        ([main, sources / "nothing.py"], "does not exist"),
        ([main, sources / "picture.png"], "none of these files"),
        ([main, sources / ".git/nothing"], "does not exist"),
    ):
        done = apart("datastore", "add", *arguments)
        assert done.returncode == 2
        assert what in done.stderr.decode().splitlines()[-1]
    assert apart("datastore", "add", main).returncode == 2
    assert apart("datastore", "add", sources / "one.py", sources / "one.py").returncode == 1
    assert not list(apart.folder.rglob("texts"))


def test_clear_asks(apart, main):
    answer(apart, main, "--datastore")
    assert "--yes" in apart.one_line(apart("datastore", "clear"), 2)
    assert shown(apart)
    assert "deleted 1 text" in notes(apart("datastore", "clear", "--yes"))
    assert not shown(apart)
    assert not list(apart.folder.rglob("texts/*"))


def test_a_damaged_store_is_told_in_a_line_and_costs_no_answer(apart, main):
    answer(apart, main, "--datastore")
    for path in apart.folder.rglob("texts/*/journal"):
        path.write_bytes(b"nonsense" * 20)
    done = apart("generate", "--main", main, *TINY, "--temp", 0, "-n", 40, "--datastore", "words")
    assert done.returncode == 0
    assert len(done.stderr.decode().splitlines()) == 1
    assert b"journal" in done.stderr
    assert shown(apart)[0]["texts"] == "1"


def test_bench_does_not_feed_what_it_compares(apart, main, tmp_path):
    (tmp_path / "prompts.txt").write_text("words words\n")
    arguments = ["--prompts", tmp_path / "prompts.txt", "--tokens", 12, "--proposer", "lookup", "--datastore"]
    done = apart("bench", "--main", main, *TINY, *arguments)
    assert done.returncode == 0, done.stderr
    assert shown(apart)[0]["texts"] == "0"


def test_in_chat(apart, main):
    done = apart("chat", "--main", main, *TINY, "-n", 20, "--datastore", stdin=b"hello\nand more\n")
    assert done.returncode == 0, done.stderr
    assert shown(apart)[0]["texts"] == "2"
