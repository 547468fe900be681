"""`specdec generate --answers N`: several answers to one prompt."""

import pytest


@pytest.fixture
def run(inside, main):
    common = ["generate", "--main", main, "--threads", 1, "--ctx", 512, "--no-spec", "--reproducible"]

    def call(*more, n=8):
        return inside(*common, "-n", n, *more)

    return call


def test_each_answer_is_that_of_its_seed(inside, run):
    found = inside.objects(run("--seed", 5, "--answers", 4, "--parallel", 2, "--json", "hello"))
    assert sorted(answer["index"] for answer in found) == list(range(4))
    for answer in found:
        (alone,) = inside.objects(run("--seed", 5 + answer["index"], "--json", "hello"))
        assert answer["content"] == alone["content"]
    assert len({answer["content"] for answer in found}) == 4


@pytest.mark.parametrize("parallel", [1, 3])
def test_text_is_printed_in_order_with_a_line_between_answers(inside, run, parallel):
    by_index = {
        answer["index"]: answer["content"]
        for answer in inside.objects(run("--seed", 5, "--answers", 3, "--json", "hello", n=30))
    }
    done = run("--seed", 5, "--answers", 3, "--parallel", parallel, "hello", n=30)
    assert (done.returncode, inside.notes(done)) == (0, b"")
    ended = [text if text.endswith("\n") else text + "\n" for _, text in sorted(by_index.items())]
    assert done.stdout.decode(errors="replace") == "---\n".join(ended)


def test_steps_have_the_index_of_their_answer(inside, run):
    steps = inside.objects(run("--seed", 5, "--answers", 2, "--parallel", 2, "--jsonl", "hello"))
    whole = inside.objects(run("--seed", 5, "--answers", 2, "--json", "hello"))
    for answer in whole:
        mine = [step for step in steps if step["index"] == answer["index"]]
        assert [step["stop"] for step in mine] == [False] * (len(mine) - 1) + [True]
        assert "".join(step["content"] for step in mine) == answer["content"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--answers", 0], "--answers is 0: give 1 to 10000"),
        (["--answers", 10001], "--answers is 10001: give 1 to 10000"),
        (["--answers", 2, "--profile"], "--answers is for one prompt: remove"),
        (["--answers", 2, "--echo"], "--answers is for one prompt: remove"),
    ],
    ids=str,
)
def test_invalid_arguments(inside, run, arguments, message):
    assert message in inside.one_line(run(*arguments, "hello"), 2)


def test_a_prompt_that_does_not_fit(inside, run):
    output = inside.one_line(run("--answers", 3, "word " * 2000), 1)
    assert "context" in output
