"""The prompts of a benchmark: built in, from a file or a folder, and errors in them."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from spec_local.bench.prompts import Prompt, load, select
from spec_local.errors import InvalidRequest

PROMPTS = [
    Prompt("code", "a", "1"),
    Prompt("prose", "b", "2"),
    Prompt("code", "c", "3"),
    Prompt("code", "d", "4"),
]


def test_built_in_prompts():
    built_in = load()
    assert Counter(p.category for p in built_in).most_common() == [
        (c, 8) for c in dict.fromkeys(p.category for p in built_in)
    ]
    assert len({p.category for p in built_in}) == 8
    assert all(p.text == p.text.strip() and len(p.text) > 40 for p in built_in)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "p.toml",
            '[[prompt]]\ncategory = "x"\nname = "y"\ntext = """\nzwei\nZeilen, größer\n"""\n',
            [Prompt("x", "y", "zwei\nZeilen, größer")],
        ),
        (
            "p.jsonl",
            '{"category": "x", "name": "y", "text": "z"}\n\n{"name": "w", "category": "x", "text": "v"}\n',
            [Prompt("x", "y", "z"), Prompt("x", "w", "v")],
        ),
        (
            "p.txt",
            "first\n\n  third \n",
            [Prompt("lines", "line-1", "first"), Prompt("lines", "line-3", "third")],
        ),
        ("p", "one\n", [Prompt("lines", "line-1", "one")]),
    ],
)
def test_files(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert load(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("p.toml", "", "has no prompts"),
        ("p.txt", " \n\n", "has no prompts"),
        ("p.jsonl", "\n", "has no prompts"),
        ("p.toml", "[[prompt]\n", "line 1, Expected"),
        ("p.toml", "title = 1\n", "more than [[prompt]] tables"),
        ("p.toml", "prompt = 1\n", "more than [[prompt]] tables"),
        ("p.toml", '[[prompt]]\ncategory = "x"\ntext = "z"\n', "prompt 1 has category, text"),
        ("p.toml", "[[prompt]]\n", "prompt 1 has nothing"),
        ("p.toml", '[[prompt]]\ncategory = "x"\nname = "y"\ntext = " "\n', "prompt 1 has no text"),
        ("p.toml", '[[prompt]]\ncategory = "x"\nname = 7\ntext = "z"\n', "prompt 1 has no name"),
        ("p.jsonl", '\n{"category"\n', "line 2 is not valid JSON"),
        ("p.jsonl", "[1]\n", "line 1 has list"),
        ("p.jsonl", '{"category": "x", "name": "y", "text": "z"}\n' * 2, "two prompts named x/y"),
        ("p.jsonl", '{"category": "x", "name": "y", "text": "z", "id": 1}', "has category, name, text, id"),
        ("p.jsonl", '{"question_id": 1, "turns": []}', "line 1 has no turns"),
        ("p.jsonl", '{"question_id": 1, "turns": "x"}', "line 1 has no turns"),
        ("p.jsonl", '{"question_id": 1, "turns": null}', "line 1 has no turns"),
        ("p.jsonl", '{"question_id": 1, "turns": ["x", " "]}', "line 1 has no turns"),
        ("p.jsonl", '{"question_id": 1, "messages": [1]}', "messages that are not the user's"),
        (
            "p.jsonl",
            '{"question_id": 1, "messages": [{"role": "system", "content": "x"}]}',
            "messages that are not the user's",
        ),
        ("p.jsonl", '{"turns": ["x"]}', "line 1 has no question_id"),
        ("p.jsonl", '{"question_id": true, "turns": ["x"]}', "line 1 has no question_id"),
        ("p.jsonl", '{"question_id": 1, "category": 2, "turns": ["x"]}', "line 1 has no category"),
        ("p.jsonl", '{"question_id": 1, "turns": ["x"]}\n' * 2, "two prompts named p/1"),
        (
            "p.jsonl",
            '{"question_id": 1, "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}',
            "run SPEED-Bench's prepare_data.py",
        ),
        ("p.txt", b"Gr\xf6\xdfe", "is not UTF-8 (byte 2)"),
    ],
)
def test_errors_in_a_file(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidRequest) as error:
        load(tmp_path / name)
    message = str(error.value)
    assert what in message
    assert f"{tmp_path / name}" in message
    assert "\n" not in message
    assert re.search("[:;] ", message)  # what to do


def test_conversations_of_public_sets(tmp_path):
    entries = [
        {"question_id": 81, "category": "writing", "turns": ["Write.\n", "Again."], "reference": ["r"]},
        {"question_id": "a1", "category": "qa", "turns": ["Who?"], "source": "s", "multiturn": False},
        {"question_id": 0, "category": "", "turns": ["What?"]},
        {"name": "x", "category": None, "messages": [{"role": "user", "content": c} for c in "abc"]},
    ]
    path = tmp_path / "stories.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    found = load(path)
    assert found == [
        Prompt("writing", "81", "Write.\n", ("Again.",)),  # exactly as it is
        Prompt("qa", "a1", "Who?"),
        Prompt("stories", "0", "What?"),
        Prompt("stories", "x", "a", ("b", "c")),
    ]
    assert [prompt.n_turns for prompt in found] == [2, 1, 1, 3]
    assert found[3].turn(1) is found[3]
    assert [str(found[3].turn(n)) for n in (2, 3)] == ["stories/x turn 2", "stories/x turn 3"]
    assert (found[3].turn(2).text, found[3].turn(2).later) == ("b", ("c",))


def test_a_folder_of_sets(tmp_path, monkeypatch):
    line = '{"question_id": 1, "category": "math", "turns": ["2 + 2?"]}'
    for name in ("gsm8k", "alpaca"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text(line)
    (tmp_path / "judge_prompts.jsonl").write_text('{"name": "no prompt"}')
    assert load(tmp_path) == [Prompt(name, "1", "2 + 2?") for name in ("alpaca", "gsm8k")]
    assert load(tmp_path / "gsm8k/question.jsonl") == [Prompt("math", "1", "2 + 2?")]
    monkeypatch.chdir(tmp_path / "alpaca")  # its name is not in the path
    Path("question.jsonl").write_text(line.replace("math", ""))
    assert load(Path("question.jsonl")) == [Prompt("alpaca", "1", "2 + 2?")]


def test_a_folder_of_files(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"question_id": 1, "turns": ["x"]}')
    (tmp_path / "a.jsonl").write_text('{"category": "c", "name": "1", "text": "y"}')
    (tmp_path / "notes.txt").write_text("no prompt")
    assert load(tmp_path) == [Prompt("a", "1", "y"), Prompt("b", "1", "x")]
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"b\.jsonl, line 1 has nothing: give "):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"empty has no prompts: .* or a folder of NAME/question.jsonl"):
        load(tmp_path / "empty")


def test_a_missing_file(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load(tmp_path / "absent.toml")


def test_selection():
    names = lambda *args: "".join(p.name for p in select(PROMPTS, *args))  # noqa: E731
    assert names() == "acdb"  # category by category
    assert names(["code"]) == "acd"
    assert names(["prose", "code"], 1) == "ab"
    assert names((), 2) == "acb"
    with pytest.raises(InvalidRequest, match="'verse': give code, prose"):
        select(PROMPTS, ["code", "verse"])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["chat"], ["chat"]),
        (["code"], ["code writing", "code editing"]),
        (["writ"], ["code writing"]),
        (["Answer"], ["retrieval answer"]),
        (["maths", "trans"], ["translation", "maths"]),
    ],
)
def test_a_part_of_a_category_selects_it(given, found):
    prompts = select(load(), given, 1)
    assert [prompt.category for prompt in prompts] == found


@pytest.mark.parametrize("given", ["poetry", "", "  "])
def test_an_unknown_category_lists_all(given):
    with pytest.raises(InvalidRequest, match="chat, code writing, code editing"):
        select(load(), [given])


def test_a_whole_name_is_that_category_only():
    prompts = [Prompt("code", "a", "x"), Prompt("code editing", "b", "y")]
    assert select(prompts, ["code"]) == prompts[:1]
