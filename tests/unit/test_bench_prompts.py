"""The prompts of a benchmark: built in, from a file, and errors in a file."""

import re
from collections import Counter

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
