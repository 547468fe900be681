"""Files whose names are not UTF-8 work like any others: names that are shown have U+FFFD instead."""

import json
import os
import shutil

import pytest

SHORT = ["--threads", 1, "--ctx", 512]
SHOWN = "caf�.gguf"


@pytest.fixture
def odd(fresh_inside, main):
    """A main model and its draft in a folder, all named in Latin-1."""
    folder = fresh_inside.folder / os.fsdecode(b"mod\xe8les")
    folder.mkdir()
    found = folder / os.fsdecode(b"caf\xe9.gguf"), folder / os.fsdecode(b"br\xe8ve.gguf")
    for path in found:
        shutil.copy(main, path)
    return found


def test_answers_learn_and_keep_what_they_learn(fresh_inside, odd):
    arguments = ["generate", "--main", odd[0], "--draft", odd[1], *SHORT, "-n", 8, "--datastore", "x"]
    for _ in range(2):
        done = fresh_inside(*arguments, "--json")
        assert done.returncode == 0, done
        assert json.loads(done.stdout)["model"] == SHOWN
    kept = [json.loads(path.read_text())["model"] for path in fresh_inside.folder.rglob("costs/*.json")]
    assert sorted(kept) == ["br�ve.gguf", SHOWN]
    (learned,) = fresh_inside.folder.rglob("learned/*.json")
    assert json.loads(learned.read_text())["main"] == SHOWN
    assert f"models  {SHOWN}" in fresh_inside("datastore", "show").stdout.decode()


def test_reports_and_copies(fresh_inside, odd, tmp_path):
    path = tmp_path / os.fsdecode(b"r\xe9sultat.json")
    bench = ["bench", "--main", odd[0], "--category", "chat", "--per-category", 1, "--tokens", 4]
    done = fresh_inside(*bench, "--threads", 1, "--ctx", 512, "--output", path)
    assert done.returncode == 0, done
    assert f'"file": "{SHOWN}"' in path.read_text()
    done = fresh_inside("draft", "quantize", odd[0], "--type", "Q8_0", "--yes")
    assert os.fsdecode(done.stdout).rstrip() == str(odd[0].with_name(os.fsdecode(b"caf\xe9-Q8_0.gguf")))
    assert fresh_inside("models", "check", *odd).returncode == 0


def test_answers_of_a_batch(fresh_inside, odd, tmp_path):
    given, answers = (tmp_path / os.fsdecode(name) for name in (b"pr\xeat.jsonl", b"r\xe9ponses.jsonl"))
    given.write_text('{"prompt": "x"}\n')
    done = fresh_inside("generate", "--main", odd[0], *SHORT, "-n", 4, "--input", given, "--output", answers)
    assert done.returncode == 0, done
    assert json.loads(answers.read_text())["model"] == SHOWN


def test_a_name_in_an_error_and_in_the_config_file(fresh_inside, odd):
    missing = odd[0].with_name(os.fsdecode(b"\xe9.gguf"))
    line = fresh_inside.one_line(fresh_inside("generate", "--main", missing, "x"), 1)
    assert "�.gguf does not exist" in line
    line = fresh_inside.one_line(fresh_inside("config", "set", "main", odd[0]), 2)
    assert "is not UTF-8, which a config file must be: rename the file" in line
