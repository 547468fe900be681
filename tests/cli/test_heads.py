"""Heads on the command line: EAGLE-3 files, and layers for multi-token prediction in the main file."""

import json

import pytest

from tests.tiny_architectures import write_tiny
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

SMALL = ["--threads", 1, "--ctx", 256, "-n", 24, "--temp", 0, "--policy", "fixed"]


@pytest.fixture(scope="module")
def mtp_path(home):
    return write_tiny(home / "mtp.gguf", "qwen35", n_mtp=1)


def answer(specdec, *arguments):
    """The answer, and the notes on standard error."""
    done = specdec("generate", *arguments, *SMALL, "--json", "hello")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.decode()


def test_layers_for_multi_token_prediction_are_used_without_a_draft(specdec, mtp_path):
    plain, notes = answer(specdec, "--main", mtp_path, "--draft", "none")
    assert "multi-token prediction" not in notes
    found, notes = answer(specdec, "--main", mtp_path)
    assert "draft: the layer for multi-token prediction of mtp.gguf" in notes
    assert found["content"] == plain["content"]
    assert found["timings"]["draft_n"] > 0


def test_a_head_is_a_draft(specdec, home):
    main, head = write_tiny_main(home / "eagle-main.gguf"), write_tiny_eagle(home / "eagle.gguf")
    plain, _ = answer(specdec, "--main", main, "--draft", "none")
    found, notes = answer(specdec, "--main", main, "--draft", head)
    assert "draft: eagle.gguf, an EAGLE-3 head" in notes
    assert found["content"] == plain["content"]
    assert found["timings"]["draft_n_accepted"] > 0


@pytest.mark.parametrize("shape", ["tree", "beam"])
def test_a_head_drafts_trees(specdec, home, shape):
    main, head = write_tiny_main(home / "eagle-main.gguf"), write_tiny_eagle(home / "eagle.gguf")
    plain, _ = answer(specdec, "--main", main, "--draft", "none")
    found, _ = answer(specdec, "--main", main, "--draft", head, "--shape", shape)
    assert found["content"] == plain["content"]
    assert found["timings"]["draft_n_accepted"] > 0


def test_a_head_for_another_model(specdec, main, home):
    head = write_tiny_eagle(home / "other.gguf", target_width=128)
    done = specdec("generate", "--main", main, "--draft", head, *SMALL, "hello")
    assert "is an EAGLE-3 head for another model" in specdec.one_line(done, 1)
    done = specdec("generate", "--main", head, *SMALL, "hello")
    assert "give it as the draft of the model it is for" in specdec.one_line(done, 1)


def test_tune_measures_a_head(fresh, home):
    main, head = write_tiny_main(home / "eagle-main.gguf"), write_tiny_eagle(home / "eagle.gguf")
    conditions = ["--ctx", 256, "--threads", 1]
    done = fresh("tune", main, head, *conditions, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "A call of the head takes" in text
    assert "## Head: expected speed-up" in text
    assert "draft model" not in text
    checked = fresh("models", "check", main, head, *conditions)
    assert checked.returncode == 0, checked.stderr
    assert "unknown" not in checked.stdout.decode()


def test_tune_measures_layers_of_the_main_model(fresh, mtp_path):
    done = fresh("tune", mtp_path, "--ctx", 256, "--threads", 1, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    assert "A call of the head takes" in done.stdout.decode()


def test_tune_refuses_a_head_for_another_model(fresh, main, home):
    head = write_tiny_eagle(home / "other.gguf", target_width=128)
    done = fresh("tune", main, head, "--ctx", 256, "--threads", 1, "--rounds", 1)
    assert "is an EAGLE-3 head for another model" in fresh.one_line(done, 1)
