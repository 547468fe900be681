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
def test_an_answer_is_valid_under_a_json_schema(specdec, main, draft, tmp_path, source):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    schema = {"text": json.dumps(SCHEMA), "file": tmp_path / "schema.json", "pipe": "/dev/stdin"}[source]
    done = specdec(
        *("generate", "--main", main, "--draft", draft, *SMALL, "--raw", "--seed", 1, "-n", 200),
        *("--policy", "fixed", "--json-schema", schema, *([] if source == "pipe" else ["the people"])),
        *(["-f", tmp_path / "prompt"] if source == "pipe" else []),
        stdin=json.dumps(SCHEMA).encode() if source == "pipe" else b"",
    )
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


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "cut"), [(["-n", 3], True), (["-n", 300], False), (["--stop", "a"], True)]
)
def test_a_cut_off_answer_is_reported(inside, main, tmp_path, command, options, cut):
    (tmp_path / "g.gbnf").write_text('root ::= "aaaa bbbb aaaa bbbb cccc dddd"')
    arguments = [command, "--main", main, *SMALL, "--grammar-file", tmp_path / "g.gbnf", *options]
    done = inside(*arguments, stdin=b"hello\n")
    assert done.returncode == 0
    assert (b"cut off before its grammar was complete" in done.stderr) == cut


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


@pytest.mark.parametrize(("options", "reason"), INVALID.values(), ids=INVALID.keys())
def test_an_unusable_grammar_is_a_one_line_error(inside, main, tmp_path, options, reason):
    (tmp_path / "latin").write_bytes(b'root ::= "\xe9"')
    done = inside("generate", "--main", main, *SMALL, "--raw", *options, "the", cwd=tmp_path)
    assert reason in inside.one_line(done, 2), done
