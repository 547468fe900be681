"""Test specdec generate in pipelines: prompts, JSON, filling gaps, and unchanged bytes."""

import json
import math
from contextlib import closing

import pytest

from spec_local.chat.request import ChatRequest
from spec_local.llama.model import Model
from spec_local.llama.tiny import FIRST_BYTE, write_tiny_model

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
GREEDY = ["--temp", "0", "--threads", "1", "--ctx", "512", "--no-spec"]


def options(main, n=24):
    return ["generate", "--main", main, "-n", n, *GREEDY]


@pytest.fixture(scope="module")
def coder(home, inside):
    """A fill-in-the-middle model."""
    path = write_tiny_model(home / "coder.gguf", n_layers=1, tensor_type="F32", extra_tokens=MARKS)
    assert inside(*options(path, 1), "x").returncode == 0
    return path


@pytest.fixture(scope="module")
def model(coder):
    with closing(Model(coder)) as model:
        yield model


@pytest.fixture(scope="module")
def tokens_of(model):
    return model.vocabulary.tokenize


def test_files_and_standard_input_in_the_given_order(inside, main, tmp_path):
    (tmp_path / "a").write_bytes(b"one\n")
    (tmp_path / "b").write_bytes(b"two\n\n")

    def prompt(*arguments, stdin=b""):
        (answer,) = inside.objects(inside(*options(main, 1), "--json", "--echo", *arguments, stdin=stdin))
        return answer["prompt"]

    a, b = ["-f", tmp_path / "a"], ["-f", tmp_path / "b"]
    assert prompt(*a, *b, "three") == "one\n\ntwo\n\nthree"
    assert prompt(*b, *a, stdin=b"unread") == "two\n\none"
    assert prompt(*b, "-f", "-", *a, stdin=b"piped\n") == "two\n\npiped\n\none"
    assert prompt("last", stdin=b"  piped\n") == "  piped\n\nlast"


@pytest.mark.parametrize("text", ["a\n", "a\r\n", "a \n\n", "\n", "a"])
def test_raw_text_goes_on_as_it_is(inside, main, tmp_path, text):
    """Argument, file, pipe and batch alike."""
    (tmp_path / "text").write_bytes(text.encode())
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": text}))
    run, half = [*options(main, 4), "--raw", "--json"], len(text) // 2
    (tmp_path / "half").write_bytes(text[:half].encode())
    answers = [
        inside.objects(inside(*run, "--echo", *arguments, stdin=stdin))[0]
        for arguments, stdin in (
            ([text], b""),
            (["-f", tmp_path / "text"], b""),
            ([], text.encode()),
            (["-f", tmp_path / "half", text[half:]], b""),
        )
    ]
    batch = inside.objects(inside(*run[:-1], "--input", tmp_path / "in.jsonl"))
    assert {answer["prompt"] for answer in answers} == {text}
    assert len({tuple(answer["tokens"]) for answer in [*answers, *batch]}) == 1


def test_line_ends_of_a_question_are_removed(inside, main):
    (answer,) = inside.objects(inside(*options(main, 1), "--json", "--echo", stdin=b"Why?\r\n"))
    assert answer["prompt"] == "Why?"


def test_echo(inside, main):
    answer = inside(*options(main), "--raw", "tell me").stdout
    assert inside(*options(main), "--raw", "--echo", "tell me").stdout == b"tell me" + answer
    answer = inside(*options(main), "tell me").stdout
    assert inside(*options(main), "--echo", "tell me").stdout == b"tell me\n\n" + answer
    error = inside.one_line(inside(*options(main), "--echo", "--ctx", 16, "word " * 100), 1)
    assert "the context only 16" in error  # and no echo


def test_jsonl_has_the_parts_of_the_json_object(inside, main, draft):
    run = [*options(main, 60)[:-1], "--draft", draft, "--policy", "fixed", "--raw", "--echo", "a b a b"]
    (whole,) = inside.objects(inside(*run, "--json"))
    *steps, last = inside.objects(inside(*run, "--jsonl"))
    assert len([step for step in steps if step["tokens"]]) == whole["timings"]["steps_n"] < 60
    assert "".join(part["content"] for part in [*steps, last]) == whole["content"]
    assert [token for step in steps for token in step["tokens"]] == whole["tokens"]
    for part in ("draft_n", "draft_n_accepted"):
        assert sum(step[part] for step in steps) == whole["timings"][part] > 0
    assert [step["stop"] for step in steps] == [False] * len(steps)
    for end in (whole, last):
        assert end["stop"] is True
        assert end["prompt"] == "a b a b"
        assert (end["stop_type"], end["stopping_word"], end["truncated"]) == ("limit", "", False)
        assert end["timings"]["predicted_n"] == 60 == len(whole["tokens"])
    assert set(whole) == set(last)


def test_jsonl_is_streamed(specdec, main):
    arguments = ["--main", main, "--ctx", "100000", "--threads", "1", "--no-spec", "--jsonl", "x"]
    with specdec.start("generate", *arguments) as process:
        first = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert process.poll() is None
        process.stdout.close()  # as `| head -3` does
        assert process.stderr.read() == b""
        assert process.wait(timeout=20) == 0
    assert all(step["tokens"] and not step["stop"] for step in first)


def test_stop_types(inside, main, tmp_path):
    def end(*arguments, model=main):
        (answer,) = inside.objects(inside(*options(model, 60), "--raw", "--json", *arguments))
        return answer["stop_type"], answer["stopping_word"], answer["truncated"]

    text = inside(*options(main, 60), "--raw", "hello").stdout.decode(errors="replace")
    at = next(i for i in range(5, 50) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[at : at + 2]
    stopped = inside(*options(main, 60), "--raw", "--stop", "never this", "--stop", stop, "hello")
    assert stopped.stdout.decode(errors="replace") == text[:at]
    assert end("hello") == ("limit", "", False)
    assert end("hello", "--stop", "no such text", "--stop", stop) == ("word", stop, False)
    assert end("hello", "--ctx", 32) == ("limit", "", True)
    write_tiny_model(tmp_path / "brief.gguf", n_layers=1, end_scale=3.0)
    assert end("hello", "--temp", 1, "--seed", 1, model=tmp_path / "brief.gguf") == ("eos", "", False)


def test_log_probabilities(inside, main):
    (whole,) = inside.objects(inside(*options(main, 8), "--json", "--logprobs", 3, "hello"))
    *steps, _ = inside.objects(inside(*options(main, 8), "--jsonl", "--logprobs", 3, "hello"))
    found = whole["completion_probabilities"]
    assert [t for step in steps for t in step["completion_probabilities"]] == found
    assert [t["id"] for t in found] == whole["tokens"]
    for chosen in found:
        top = chosen["top_logprobs"]
        assert len(top) == 3
        assert {k: chosen[k] for k in top[0]} == top[0]  # greedy: the most probable token was chosen
        assert sorted((t["logprob"] for t in top), reverse=True) == [t["logprob"] for t in top]
        assert 0 < sum(math.exp(t["logprob"]) for t in top) <= 1 + 1e-6
        assert bytes(chosen["bytes"]).decode(errors="replace") == chosen["token"]
    assert (
        b"".join(bytes(t["bytes"]) for t in found)
        == inside(*options(main, 8), "hello", "--no-newline").stdout
    )
    assert "completion_probabilities" not in inside.objects(inside(*options(main, 8), "--json", "hello"))[0]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--logprobs", "3", "x"], "add --json"),
        (["--logprobs", "21", "--json", "x"], "at most 20"),
        (["--json", "--jsonl", "x"], "one of them"),
        (["--suffix", "a", "--suffix-file", "b", "x"], "one of them"),
        (["--suffix", "a", "--system", "b", "x"], "remove --system"),
        (["--output", "a"], "--input"),
        (["--input", "a", "model", "x"], "remove the prompt"),
        (["--input", "a", "x"], "there is no model or file 'x'"),
        (["--input", "a", "--suffix", ""], "remove the prompt"),
        (["--input", "a", "--json"], "--json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_exclude_each_other(inside, main, arguments, what):
    assert what in inside.one_line(inside(*options(main), *arguments), 2)


def test_fill_in_the_middle_prompts(inside, coder, model, tokens_of, tmp_path):
    before, after = "to be \n <|fim_suffix|> <|im_end|>", " that is\n"
    (pre,), (suf,), (mid,) = (tokens_of(mark, parse_special=True) for mark in MARKS[:3])
    bos = tokens_of("", add_special=True)
    # A text never means a mark.
    expected = [*bos, pre, *tokens_of(before), suf, *tokens_of(after), mid]
    assert ChatRequest(before, suffix=after).tokens(model) == expected
    assert expected.count(suf) == 1

    (tmp_path / "after").write_bytes(after.encode())
    run = options(coder)
    answer = inside(*run, "--suffix", after, before)
    assert (answer.returncode, inside.notes(answer)) == (0, b"")
    assert answer.stdout != inside(*run, "--suffix", "other", before).stdout
    assert inside(*run, "--suffix-file", tmp_path / "after", before).stdout == answer.stdout
    # Piped text keeps its trailing whitespace, and the argument continues it.
    assert inside(*run, "--suffix", after, before[6:], stdin=before[:6].encode()).stdout == answer.stdout
    whole = inside(*run, "--suffix", after, "--echo", before)
    assert whole.stdout == before.encode() + answer.stdout + after.encode()


def test_a_gap_at_the_beginning_and_the_pad_token(inside, coder, tokens_of):
    assert len(inside(*options(coder), "--suffix", "the end", "").stdout) > 10
    (pad,) = tokens_of(MARKS[3], parse_special=True)
    (answer,) = inside.objects(
        inside(*options(coder), "--suffix", "z", "--logit-bias", f"{pad}=1000", "--json", "x")
    )
    assert (answer["content"], answer["stop_type"]) == ("", "eos")


def test_a_model_without_fill_in_the_middle_tokens(inside, main):
    error = inside.one_line(inside(*options(main), "--suffix", "a", "x"), 1)
    assert "main.gguf has no fill-in-the-middle tokens" in error


def test_incomplete_characters_are_written_unchanged(inside, coder):
    """Bytes of an emoji in any order, some of them complete characters."""
    emoji = "🎉".encode()
    bias = [part for byte in emoji for part in ("--logit-bias", f"{FIRST_BYTE + byte}=1000")]
    run = ["generate", "--main", coder, "-n", 400, "--temp", 3, "--top-k", 4, "--min-p", 0, "--top-p", 1]
    run += ["--seed", 1, "--threads", 1, "--ctx", 512, *bias, "x"]
    (answer,) = inside.objects(inside(*run, "--json"))
    output = bytes(token - FIRST_BYTE for token in answer["tokens"])
    assert set(output) == set(emoji)
    assert emoji in output
    assert emoji[1:2] * 2 in output
    assert inside(*run, "--no-newline").stdout == output
    assert answer["content"] == output.decode("utf-8", "replace")
    parts = inside.objects(inside(*run, "--jsonl"))
    assert "".join(part["content"] for part in parts) == answer["content"]
