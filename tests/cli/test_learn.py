"""`--learn`: what is kept, who can read it, and how it is shown and deleted."""

import importlib.util
import json
import re
import stat
import time

import pytest

from spec_local.datastore.answer_store import AnswerStore
from spec_local.models.head_versions import HeadVersions
from tests.tiny_heads import N_EMBD, write_tiny_eagle, write_tiny_main

TINY = ["--threads", 1, "--ctx", 512]
FIRST_USE = "learning: prompts and answers are kept as tokens in "


def answer(isolated, main, *more, prompt="words", env=None):
    arguments = ["generate", "--main", main, *TINY, "--temp", 0, "-n", 40, "--json", *more, prompt]
    done = isolated(*arguments, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["content"], done.stderr.decode()


def store_of(isolated):
    [path] = isolated.folder.glob("cache/specdec/texts/*/*.answers")
    return AnswerStore(path)


def kept(isolated):
    paths = list(isolated.folder.glob("cache/specdec/texts/*/*.answers"))
    return sum(len(AnswerStore(path).answers()) for path in paths)


def shown(isolated):
    """The lines of `datastore show`, as (name, text)."""
    done = isolated("datastore", "show")
    assert done.returncode == 0, done.stderr
    return [tuple(re.split(r" +", line, maxsplit=1)) for line in done.stdout.decode().splitlines() if line]


def test_prompts_and_answers_are_kept_and_the_first_use_says_so(isolated, main):
    plain, notes = answer(isolated, main)
    assert (kept(isolated), "learning" in notes) == (0, False)
    first, notes = answer(isolated, main, "--learn")
    [line] = [line for line in notes.splitlines() if line.startswith(FIRST_USE)]
    store = store_of(isolated)
    for part in (str(store.path), "only you can read", "specdec datastore show", "specdec datastore clear"):
        assert part in line
    _, notes = answer(isolated, main, "--learn", prompt="other words")
    assert FIRST_USE not in notes
    assert first == plain
    one, two = store.answers()
    assert (one.n_prompt, len(one.tokens), one.temperature) == (10, 50, 0)
    assert two.number > one.number
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    assert dict(shown(isolated))["texts"] == "2"  # for lookups, too


def test_show_and_clear(isolated, main):
    answer(isolated, main, "--learn")
    answer(isolated, main, "--learn", prompt="other words")
    today = time.strftime("%Y-%m-%d")
    store = store_of(isolated)
    n_tokens = sum(len(answer.tokens) for answer in store.answers())
    assert ("answers", f"2 of main.gguf ({n_tokens} tokens, {today} to {today})") in shown(isolated)
    what = r"2 texts and 2 answers kept for learning \(0\.\d MB\)"
    assert re.search(f"delete {what}: pass --yes", isolated.one_line(isolated("datastore", "clear"), 2))
    assert len(store.answers()) == 2
    heads = isolated.folder / "data/specdec/heads"
    (heads / "fedcba9876543210").mkdir(parents=True)
    # What trainings that were killed have left of them; the second one has lost its entry in the list.
    copied = [isolated.folder / "h.gguf.training/own", heads / store.key / "training/head.gguf.training/own"]
    store.answers_to_copy(copied[0])
    copied[1].mkdir(parents=True)
    for own in copied:
        (own / "00000.states").touch()
    moved = isolated.folder / "moved.gguf.training"
    store.answers_to_copy(moved / "own")
    moved.rename(isolated.folder / "elsewhere")
    (heads / store.key / "head-1.gguf").touch()
    ended = isolated.folder / "learned.gguf"
    store.answers_to_copy(isolated.folder / "learned.gguf.training/own")
    store.end_copy(isolated.folder / "learned.gguf.training/own", ended)
    ended.touch()
    done = isolated("datastore", "clear", "--yes")
    assert done.returncode == 0
    lines = done.stderr.decode().splitlines()
    assert re.fullmatch(f"deleted {what}", lines[0])
    assert lines[1:3] == [f"deleted what a training had made of these answers: {own}" for own in copied]
    assert lines[3].startswith(f"a training kept copies of these answers in {moved / 'own'}: ")
    assert lines[4].endswith(f"delete the file {ended}")
    assert lines[5:] == [
        f"a head trained on these answers is kept: to remove it, delete the folder {heads / store.key}"
    ]
    assert not [own for own in copied if own.exists()]
    assert not list(isolated.folder.rglob("texts/*"))
    _, notes = answer(isolated, main, "--learn")
    assert FIRST_USE in notes  # again: it is a new file
    assert kept(isolated) == 1


def test_without_heads_clear_does_not_mention_them(isolated, main):
    answer(isolated, main, "--learn")
    (isolated.folder / "data/specdec/heads" / store_of(isolated).key / "training").mkdir(parents=True)
    assert len(isolated("datastore", "clear", "--yes").stderr.splitlines()) == 1


def test_a_damaged_file_is_reported_in_one_line(isolated, main):
    answer(isolated, main, "--learn")
    path = store_of(isolated).path
    path.write_bytes(b"something else" * 1000)
    done = isolated("datastore", "show")
    assert done.returncode == 0
    assert done.stderr.decode().splitlines() == [f"{path} is damaged: 0 answers can be read"]
    _, notes = answer(isolated, main, "--learn")
    (aside,) = path.parent.glob("*.damaged-*")
    (line,) = (line for line in notes.splitlines() if str(path) in line)
    assert line.startswith(f"{path} was damaged: the 0 answers that can be read are in it again")
    assert line.endswith(aside.name)
    assert ("damaged", f"{aside.name}, set aside (0.0 MB)") in shown(isolated)
    _, notes = answer(isolated, main, "--learn")
    assert str(path) not in notes
    assert kept(isolated) == 1
    path.write_bytes(b"something else" * 500)
    assert b"0 answers kept for learning and 1 damaged file" in isolated("datastore", "clear", "--yes").stderr
    assert not path.parent.exists()


def test_without_pytorch_the_first_use_says_what_is_missing(isolated, main, monkeypatch):
    find_spec = importlib.util.find_spec
    for found in (None, object()):

        def find(name, *more, found=found):
            return found if name == "torch" else find_spec(name, *more)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        _, notes = answer(isolated, main, "--learn")
        lines = [line for line in notes.splitlines() if "PyTorch" in line]
        assert [
            bool(re.search("lookups use them, but training a head needs PyTorch: run .*torch", line))
            for line in lines
        ] == ([] if found else [True])
        assert "PyTorch" not in answer(isolated, main, "--learn")[1]
        isolated("datastore", "clear", "--yes")


def test_the_option_the_environment_and_the_config_file(isolated, main, tmp_path):
    config, both = tmp_path / "c.toml", tmp_path / "both.toml"
    config.write_text("learn = true\n")
    both.write_text("learn = true\n[generate]\ndatastore = false\n")
    learn, nothing = {"SPECDEC_LEARN": "1"}, {"SPECDEC_DATASTORE": "0"}
    for arguments, env in (
        (["--no-learn"], learn),
        (["--config", config, "--no-learn"], None),
        (["--no-datastore"], learn),
        (["--config", config, "--no-datastore"], None),
        (["--config", config], nothing),
        (["--config", both], None),
    ):
        answer(isolated, main, *arguments, env=env)
        assert kept(isolated) == 0, (arguments, env)
    for n, (arguments, env) in enumerate(
        [
            (["--config", config], None),
            ([], learn),
            (["--learn"], nothing),
            (["--config", both, "--learn"], None),
        ]
    ):
        answer(isolated, main, *arguments, env=env, prompt="abcd"[n])
        assert kept(isolated) == n + 1, (arguments, env)
    done = isolated("generate", "--main", main, *TINY, "--learn", "--no-datastore", "words")
    assert "--no-datastore" in isolated.one_line(done, 2)


def test_bench_keeps_nothing(isolated, main, tmp_path):
    (tmp_path / "prompts.txt").write_text("words words\n")
    arguments = ["--prompts", tmp_path / "prompts.txt", "--tokens", 12, "--proposer", "lookup"]
    done = isolated("bench", "--main", main, *TINY, *arguments, env={"SPECDEC_LEARN": "1"})
    assert done.returncode == 0, done.stderr
    assert b"learning" not in done.stderr
    assert not list(isolated.folder.rglob("*.answers"))


def test_chat_keeps_the_whole_conversation_before_each_answer(isolated, main):
    done = isolated("chat", "--main", main, *TINY, "-n", 20, "--learn", stdin=b"hello\nand more\n")
    assert done.returncode == 0, done.stderr
    one, two = store_of(isolated).answers()
    assert one.tokens.tolist() == two.tokens[: len(one.tokens)].tolist()
    assert two.n_prompt > len(one.tokens)


def test_several_prompts(isolated, main, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(4)))
    arguments = ["--input", tmp_path / "prompts.jsonl", "--parallel", 2, "-n", 10]
    done = isolated("generate", "--main", main, *TINY, *arguments, "--learn")
    assert done.returncode == 0, done.stderr
    assert kept(isolated) == 4


@pytest.mark.parametrize("draft", [["--draft", "none"], []], ids=["none is given", "one is looked for"])
def test_versions_that_cannot_be_loaded_are_rolled_back(fresh_inside, draft):
    """They have the right size and digest, but one is garbage, and one is a head for another model."""
    main = write_tiny_main(fresh_inside.folder / "eagle-main.gguf")
    good = write_tiny_eagle(fresh_inside.folder / "good.gguf").read_bytes()
    other = write_tiny_eagle(fresh_inside.folder / "other.gguf", target_width=2 * N_EMBD).read_bytes()
    for path in fresh_inside.folder.glob("[go]*.gguf"):
        path.unlink()
    with fresh_inside._in_place():
        versions = HeadVersions(main)
        for content in (good, b"GGUF and not much more", other):
            head = fresh_inside.folder / "new-head"
            head.write_bytes(content)
            versions.add(head)
    _, notes = answer(fresh_inside, main, "--learn", *draft)
    assert [line[:11] for line in notes.splitlines() if "is rolled back" in line] == [
        "head-3.gguf",
        "head-2.gguf",
    ], notes
    assert "drafting with head-1.gguf" in notes
    assert [version.is_rolled_back for version in versions.all()] == [False, True, True]
    _, notes = answer(fresh_inside, main, "--learn", *draft, prompt="other words")
    assert "rolled back" not in notes
    assert "drafting with head-1.gguf" in notes
