"""Test answers under a grammar or a JSON schema from the command line."""

import json

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a", "b"],
}


def is_valid(text):
    value = json.loads(text)
    return list(value) == ["a", "b"] and type(value["a"]) is int and value["b"] in ("x", "é")


SMALL = ["--threads", 1, "--ctx", 512]


@pytest.mark.parametrize("source", ["text", "file", "pipe"])
def test_an_answer_is_valid_under_a_json_schema(specdec, inside, main, draft, tmp_path, source):
    text = json.dumps(SCHEMA)
    (tmp_path / "schema.json").write_text(text)
    schema = {"text": text, "file": tmp_path / "schema.json", "pipe": "/dev/stdin"}[source]
    arguments = ["generate", "--main", main, "--draft", draft, *SMALL, "--raw", "--seed", 1, "-n", 200]
    arguments += ["--policy", "fixed", "--json-schema", schema, "-f", tmp_path / "prompt"]
    done = specdec(*arguments, stdin=text.encode()) if source == "pipe" else inside(*arguments)
    assert done.returncode == 0, done
    assert is_valid(done.stdout), done


@pytest.fixture(autouse=True)
def _prompt(tmp_path):
    (tmp_path / "prompt").write_text("the people")


def test_an_answer_follows_a_grammar(inside, main, tmp_path):
    (tmp_path / "g.gbnf").write_bytes('\ufeffroot ::= "é " ("of" | "in") "\\n"'.encode())
    done = inside("generate", "--main", main, *SMALL, "--raw", "--grammar-file", tmp_path / "g.gbnf", "the")
    assert done.stdout.decode() in ("é of\n", "é in\n"), done


def test_each_turn_of_a_chat_follows_a_grammar(inside, main, tmp_path):
    (tmp_path / "g.gbnf").write_text('root ::= "yes" | "no"')
    done = inside(
        "chat", "--main", main, *SMALL, "--grammar-file", tmp_path / "g.gbnf", stdin=b"the people\nwhat\n"
    )
    assert done.returncode == 0, done
    answers = [line for line in done.stdout.decode().split() if line]
    assert len(answers) == 2
    assert set(answers) <= {"yes", "no"}


TEXT = "aaaa bbbb aaaa bbbb cccc dddd"


@pytest.fixture
def one_text(main, tmp_path):
    """The options for a grammar that allows one text."""
    (tmp_path / "g.gbnf").write_text(f'root ::= "{TEXT}"')
    return ["--main", main, *SMALL, "--raw", "--grammar-file", tmp_path / "g.gbnf"]


CUT_SHORT = {
    "by max-tokens": (["-n", 3], True),
    "by a stop text": (["--stop", "b"], True),
    "by the context": (["--ctx", 20], True),
    "not": (["-n", 300], False),
}


@pytest.mark.parametrize(("options", "cut"), CUT_SHORT.values(), ids=CUT_SHORT)
def test_the_exit_code_shows_whether_an_answer_was_cut_short(inside, one_text, options, cut):
    done = inside("generate", *one_text, *options, "hello")
    answer = done.stdout.decode()
    assert TEXT.startswith(answer)
    assert (answer != TEXT) == cut
    assert done.returncode == (3 if cut else 0)
    assert done.stderr.count(b"was cut short") == cut
    done = inside("generate", *one_text, *options, "--json", "hello")
    assert done.returncode == (3 if cut else 0)
    assert (json.loads(done.stdout)["stop_type"] == "eos") == (not cut)


def test_an_answer_that_can_only_end_is_not_cut_short(inside, one_text):
    n_tokens = len(json.loads(inside("generate", *one_text, "--seed", 1, "--json", "x").stdout)["tokens"])
    done = inside("generate", *one_text, "--seed", 1, "-n", n_tokens, "x")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, TEXT, b"")
    assert inside("generate", *one_text, "--seed", 1, "-n", n_tokens - 1, "x").returncode == 3


def test_a_chat_reports_an_answer_that_was_cut_short(inside, one_text):
    done = inside("chat", *(o for o in one_text if o != "--raw"), "-n", 3, stdin=b"hello\n")
    assert done.returncode == 0  # the conversation can continue
    assert b"was cut short" in done.stderr


def test_the_exit_code_shows_whether_answers_of_a_batch_were_cut_short(inside, one_text, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 2}, {"prompt": "c", "max_tokens": 2}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = ["generate", *one_text, "--seed", 1, "--input", prompts]
    for _ in range(2):  # the second run finds all answers
        done = inside(*batch, "--output", output)
        assert done.returncode == 3
        assert b"2 of 3 answers were cut short" in done.stderr
    stops = {each["index"]: each["stop_type"] for each in map(json.loads, output.read_bytes().splitlines())}
    assert stops == {0: "eos", 1: "limit", 2: "limit"}
    assert inside(*batch).returncode == 3  # on standard output
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "too long " * 600}) + "\n")
    assert "1 of 4 prompts failed" in inside.one_line(inside(*batch, "--output", output), 1)
    prompts.write_text(json.dumps(lines[0]) + "\n")
    assert inside(*batch).returncode == 0


def test_a_batch_without_a_grammar_may_reach_its_limit(inside, main, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    done = inside("generate", "--main", main, *SMALL, "-n", 2, "--input", tmp_path / "prompts.jsonl")
    assert (done.returncode, done.stderr) == (0, b"")


INVALID = {
    "no such file": (["--grammar-file", "absent"], "absent cannot be read (No such file or directory)"),
    "a folder": (["--grammar-file", "."], "Is a directory"),
    "no name": (["--grammar-file", ""], "cannot be read"),
    "endless": (["--grammar-file", "/dev/zero"], "larger than 1 MiB"),
    "not UTF-8": (["--grammar-file", "latin"], "is not UTF-8"),
    "no grammar": (["--grammar-file", "prompt"], "the grammar cannot be used (expecting ::="),
    "no schema": (["--json-schema", "{]"], "not JSON"),
    "no such schema": (["--json-schema", "schema.json"], "schema.json cannot be read"),
    "empty schema": (["--json-schema", ""], "cannot be read"),
    "unsupported": (["--json-schema", '{"type": "array", "uniqueItems": true}'], '"uniqueItems"'),
    "both": (["--json-schema", "{}", "--grammar-file", "prompt"], "give one of them"),
}


@pytest.mark.parametrize(("options", "reason"), INVALID.values(), ids=INVALID)
def test_an_unusable_grammar_is_a_one_line_error(inside, main, tmp_path, options, reason):
    (tmp_path / "latin").write_bytes(b'root ::= "\xe9"')
    done = inside("generate", "--main", main, *SMALL, "--raw", *options, "the", cwd=tmp_path)
    assert reason in inside.one_line(done, 2), done
