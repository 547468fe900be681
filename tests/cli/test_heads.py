"""Heads on the command line: EAGLE-3 files, and layers for multi-token prediction in the main file."""

import json

import pytest

from tests.tiny_architectures import write_tiny
from tests.tiny_heads import write_tiny_eagle, write_tiny_main

CONTEXT = ["--threads", 1, "--ctx", 256]


@pytest.fixture(scope="module")
def heads(home):
    """A folder of their own: beside another model, they would be tried with it."""
    folder = home / "heads"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def mtp(home):
    return write_tiny(home / "mtp.gguf", "qwen35", n_mtp=1)


@pytest.fixture(scope="module")
def pair(heads):
    return write_tiny_main(heads / "eagle-main.gguf"), write_tiny_eagle(heads / "eagle.gguf")


@pytest.fixture(scope="module")
def other_head(heads):
    return write_tiny_eagle(heads / "other.gguf", target_width=128)


@pytest.fixture
def answer(inside):
    """Return the answer, and the notes on standard error."""

    def answer(*arguments):
        fixed = [*CONTEXT, "-n", 24, "--temp", 0, "--policy", "fixed", "--json"]
        done = inside("generate", *arguments, *fixed, "hello")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr.decode()

    return answer


def test_layers_for_multi_token_prediction_are_used_without_a_draft(answer, mtp):
    plain, notes = answer("--main", mtp, "--draft", "none")
    assert "multi-token prediction" not in notes
    found, notes = answer("--main", mtp)
    assert "draft: the layer for multi-token prediction of mtp.gguf" in notes
    assert found["content"] == plain["content"]
    assert found["timings"]["draft_n"] > 0


@pytest.mark.parametrize("shape", ["chain", "tree", "beam"])
def test_a_head_is_a_draft(answer, pair, shape):
    main, head = pair
    plain, _ = answer("--main", main, "--draft", "none")
    found, notes = answer("--main", main, "--draft", head, "--shape", shape)
    assert "draft: eagle.gguf, an EAGLE-3 head" in notes
    assert found["content"] == plain["content"]
    assert found["timings"]["draft_n_accepted"] > 0


def test_a_head_for_another_model(inside, main, other_head):
    for command in (["generate", "x", "--main", main, "--draft", other_head], ["tune", main, other_head]):
        error = inside.one_line(inside(*command, *CONTEXT), 1)
        assert "is an EAGLE-3 head for another model" in error
    error = inside.one_line(inside("generate", "--main", other_head, *CONTEXT, "hello"), 1)
    assert "give it as the draft of the model it is for" in error


def test_tune_measures_a_head(inside, pair):
    done = inside("tune", *pair, *CONTEXT, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "A call of the head takes" in text
    assert "## Head: expected speed-up" in text
    assert "draft model" not in text
    for path in inside.folder.rglob("costs/*.json"):  # whatever else runs here
        path.write_text(json.dumps(json.loads(path.read_text()) | {"others": 0.0}))
    checked = inside("models", "check", *pair, *CONTEXT)
    assert checked.returncode == 0, checked.stderr
    assert "unknown" not in checked.stdout.decode()


def test_tune_measures_layers_of_the_main_model(inside, mtp):
    done = inside("tune", mtp, *CONTEXT, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    assert "A call of the head takes" in done.stdout.decode()
