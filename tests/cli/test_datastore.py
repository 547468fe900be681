"""`specdec datastore` and `--datastore`."""

import json
import os
import re

import pytest

from spec_local.datastore.datastore import Datastore
from spec_local.llama.model import Model

TINY = ["--threads", 1, "--ctx", 512]


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


def shown(isolated):
    done = isolated("datastore", "show")
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.decode().strip().split("\n\n")
    return [dict(re.split(r" +", line, maxsplit=1) for line in b.splitlines()) for b in blocks if b]


def notes(done, code=0):
    assert done.returncode == code, done.stderr
    return done.stderr.decode()


def answer(isolated, main, *more):
    arguments = ["generate", "--main", main, *TINY, "--temp", 0, "-n", 40, "--json", *more, "words"]
    done = isolated(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_added_without_the_option(isolated, main):
    answer(isolated, main)
    done = isolated("datastore", "show")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"the datastore is empty" in done.stderr
    assert b"the datastore is empty" in isolated("datastore", "clear").stderr
    assert not list(isolated.folder.rglob("texts"))


def test_an_answer_is_added_and_shown(isolated, main):
    first = answer(isolated, main, "--datastore")
    [datastore] = shown(isolated)
    assert (datastore["models"], datastore["texts"], datastore["tokens"]) == ("main.gguf", "1", "50")
    assert datastore["path"].startswith(str(isolated.folder))
    assert answer(isolated, main, "--datastore")["content"] == first["content"]
    assert shown(isolated) == [datastore]  # the same answer is not added again


def test_the_option_the_environment_and_the_config_file(isolated, main, tmp_path):
    (tmp_path / "c.toml").write_text("datastore = true\n")
    environment = {"SPECDEC_DATASTORE": "1"}

    def generate(word, *arguments, env=None):
        done = isolated("generate", "--main", main, *TINY, "-n", 8, *arguments, word, env=env)
        assert done.returncode == 0, done.stderr

    generate("words", "--no-datastore", env=environment)
    generate("words", "--config", tmp_path / "c.toml", "--no-datastore")
    assert shown(isolated) == []
    generate("some", "--config", tmp_path / "c.toml")
    generate("other", env=environment)
    assert shown(isolated)[0]["texts"] == "2"


def test_files_and_folders(isolated, main, sources):
    done = isolated("datastore", "add", main, sources)
    output = notes(done)
    assert done.stdout == b""
    for name, reason in (
        ("picture.png", "not UTF-8 text"),
        ("latin.txt", "not UTF-8 text"),
        ("data.json", "larger than 1 MiB"),
        ("empty.txt", "almost empty"),
        ("pipe", "not a regular file"),
    ):
        [line] = [line for line in output.splitlines() if reason in line]
        assert name in line
    assert "loop" not in output
    assert "hidden" not in output
    assert "added 2 files" in output
    [datastore] = shown(isolated)
    assert datastore["texts"] == "2"
    assert notes(isolated("datastore", "add", main, sources)) == output
    assert shown(isolated) == [datastore]  # the same files replace themselves
    (sources / "one.py").write_text("def one():\n    return 2\n" * 50)
    notes(isolated("datastore", "add", main, sources / "one.py"))
    [longer] = shown(isolated)
    assert longer["texts"] == "2"
    assert int(longer["tokens"]) > int(datastore["tokens"])


def test_an_earlier_answer_is_drafted(isolated, main):
    fixed = ["--policy", "fixed", "--draft-max", 8, "--datastore"]
    first, again = answer(isolated, main, *fixed), answer(isolated, main, *fixed)
    assert again["content"] == first["content"]
    accepted = [each["timings"].get("draft_n_accepted", 0) for each in (first, again)]
    assert accepted[1] >= 25 + accepted[0]


def test_an_added_file_is_found_as_tokens(isolated, main, tmp_path):
    text = "The two of them were long in words.\n"
    (tmp_path / "two.txt").write_text("\ufeff" + text)
    notes(isolated("datastore", "add", main, tmp_path / "two.txt"))
    model = Model(main, weights=False)
    tokens = model.vocabulary.tokenize(text)
    [folder] = isolated.folder.glob("cache/specdec/texts/*")
    matches, rows = Datastore(folder, model.vocabulary.n_tokens).find(tokens[:6], len(tokens) - 6)
    assert (list(matches), rows.tolist()) == ([6], [tokens[6:]])


def test_the_model_is_an_argument_or_an_option(isolated, main, sources, monkeypatch):
    files = sources / "one.py", sources / "deep/two.txt"
    expected = notes(isolated("datastore", "add", main, *files))
    assert "added 2 files" in expected
    assert notes(isolated("datastore", "add", "--main", main, *files)) == expected
    monkeypatch.setitem(isolated.environment, "SPECDEC_MAIN", str(main))
    assert notes(isolated("datastore", "add", *files)) == expected
    monkeypatch.setitem(isolated.environment, "SPECDEC_MAIN", "absent.gguf")
    assert notes(isolated("datastore", "add", main, *files)) == expected  # the argument overrides it
    assert "absent.gguf" in notes(isolated("datastore", "add", *files), 1)
    assert "'nothing'" in isolated.one_line(isolated("datastore", "add", "nothing", *files), 2)
    assert "text files are missing" in isolated.one_line(isolated("datastore", "add", main), 2)


def test_wrong_requests(isolated, main, sources):
    for arguments, what in (
        ([main, sources / "nothing.py"], "does not exist"),
        ([main, sources / "picture.png"], "none of these files"),
        ([main, sources / ".git/nothing"], "does not exist"),
    ):
        done = isolated("datastore", "add", *arguments)
        assert done.returncode == 2
        assert what in done.stderr.decode().splitlines()[-1]
    assert isolated("datastore", "add", main).returncode == 2
    assert isolated("datastore", "add", sources / "one.py", sources / "one.py").returncode == 1
    assert not list(isolated.folder.rglob("texts"))


def test_clear_asks_for_confirmation(isolated, main):
    answer(isolated, main, "--datastore")
    assert "--yes" in isolated.one_line(isolated("datastore", "clear"), 2)
    assert shown(isolated)
    assert "deleted 1 text" in notes(isolated("datastore", "clear", "--yes"))
    assert not shown(isolated)
    assert not list(isolated.folder.rglob("texts/*"))


def test_bench_adds_nothing(isolated, main, tmp_path):
    (tmp_path / "prompts.txt").write_text("words words\n")
    arguments = ["--prompts", tmp_path / "prompts.txt", "--tokens", 12, "--proposer", "lookup", "--datastore"]
    done = isolated("bench", "--main", main, *TINY, *arguments)
    assert done.returncode == 0, done.stderr
    assert shown(isolated)[0]["texts"] == "0"


def test_chat_adds_each_answer(isolated, main):
    done = isolated("chat", "--main", main, *TINY, "-n", 20, "--datastore", stdin=b"hello\nand more\n")
    assert done.returncode == 0, done.stderr
    assert shown(isolated)[0]["texts"] == "2"
