"""Synthetic training prompts, held-out topics, and prompts and passages from files."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from spec_local.bench.prompts import load
from spec_local.errors import InvalidRequest
from spec_local.training import prompts
from spec_local.training.prompts import MAX_PASSAGE, read_user_texts, split_passages, synthetic_prompt

NEED_A_TEXT = {"summarising", "translation", "extraction", "retrieval answer"}
PROSE = [
    f"The barge number {i} left the quay of {{town}} with a load of peat and two sleepy dogs."
    for i in range(300)
]
CODE = "Here you are:\n\n```python\ndef area(r):\n    return 3.14 * r * r\n```\n\nIt is simple."


@pytest.fixture(scope="module")
def many():
    return [synthetic_prompt(7, i) for i in range(4000)]


@pytest.fixture(scope="module")
def texts_of_the_grammar():
    grammar = prompts._grammar()
    return [
        text
        for lists in (grammar.templates, grammar.phrases)
        for entries in lists.values()
        for text in entries
    ]


def test_each_block_of_eight_has_every_category_of_the_benchmark(many):
    expected = Counter(p.category for p in load()).keys()
    blocks = [[q.category for q in many[at : at + 8]] for at in range(0, len(many), 8)]
    assert all(set(block) == expected and len(block) == 8 for block in blocks)
    assert len({tuple(block) for block in blocks}) > 450  # shuffled


def test_prompts_are_reproducible_in_another_process(many):
    script = (
        "from spec_local.training.prompts import synthetic_prompt\n"
        "for i in (0, 12345): print(synthetic_prompt(7, i))\n"
        f"print([synthetic_prompt(7, i, {PROSE[:100]}).held_out for i in range(400)])\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    held_out = [synthetic_prompt(7, i, PROSE[:100]).held_out for i in range(400)]
    assert output.splitlines() == [str(each) for each in (many[0], synthetic_prompt(7, 12345), held_out)]
    assert [synthetic_prompt(7, i) for i in range(3000, 3040)] == many[3000:3040]
    assert synthetic_prompt(8, 0) != synthetic_prompt(7, 0)


def test_duplicates_are_rare(many):
    # k uniform draws of n prompts hold about k²/2n pairs: n = 100,000 would give 80.
    assert len(many) - len({q.text for q in many}) < 80


def test_prompts_have_no_unfilled_slots(many):
    names = "|".join([*prompts._grammar().phrases, *prompts._grammar().topics])
    for q in many:
        assert not re.search(rf"\{{({names}|\d+-\d+)(#\w+)?([*/]\d+)?\}}", q.text), q.text
        assert q.text == q.text.strip()
        assert q.text.count("```") % 2 == 0
        assert 2 < len(q.text.split()) < 450
    assert sum(len(q.text.split()) > 60 for q in many) > len(many) / 4
    assert any(re.search(r"\{ ?name, price", q.text) for q in many)  # braces in code are not slots


def test_slots_and_lists_match(texts_of_the_grammar):
    slots = {slot for text in texts_of_the_grammar for slot in re.findall(r"\{([a-z_]+)[}#*/]", text)}
    assert slots == {*prompts._grammar().phrases, *prompts._grammar().topics}


def test_held_out_topics_never_occur_in_training_prompts(many):
    """Short topics are not checked, as they are also parts of other words."""
    assert 0.03 < sum(q.held_out for q in many) / len(many) < 0.07
    assert {q.category for q in many if q.held_out} == {q.category for q in many}
    train, evaluation = (
        "\n".join(q.text.lower() for q in many if q.held_out == held_out) for held_out in (False, True)
    )
    seen = 0
    for name, (training, held_out) in prompts._grammar().topics.items():
        assert len(held_out) == (len(training) + len(held_out) + 10) // 20 >= 1, name
        for topic in held_out:
            if len(topic) > 14:
                assert topic.lower() not in train
                seen += topic.lower() in evaluation
        assert not any(topic.lower() in evaluation for topic in training if len(topic) > 14)
    assert seen > 10


def _runs(text, length=8):
    """All sequences of `length` words, with numbers and dates replaced by 0."""
    words = re.findall(r"\w+", re.sub(r"\d+(\W+\d+)*", "0", text.lower()))
    return {" ".join(words[at : at + length]) for at in range(len(words) - length + 1)}


def test_no_prompt_resembles_the_benchmark(many, texts_of_the_grammar):
    benchmark = set().union(*(_runs(p.text) for p in load()))
    topics = [topic for sides in prompts._grammar().topics.values() for side in sides for topic in side]
    for text in [*texts_of_the_grammar, *topics, *(q.text for q in many)]:
        assert _runs(text) & benchmark == set()
    assert not {p.text for p in load()} & {q.text for q in many}


def test_half_of_the_prompts_that_need_a_text_are_about_passages():
    generated = [synthetic_prompt(1, i, [*PROSE, CODE]) for i in range(1600)]
    for category in sorted(NEED_A_TEXT):
        texts = [q.text for q in generated if q.category == category]
        assert 0.4 < sum("sleepy dogs" in text for text in texts) / len(texts) < 0.6
        assert not any("def area" in text for text in texts)
    for q in generated:
        if "sleepy dogs" in q.text:
            assert q.text.count("sleepy dogs") == 1
            assert q.category in NEED_A_TEXT
            assert "the quay of {town} with" in q.text  # braces in passages are not slots


def test_code_of_passages_is_used_for_code_editing():
    generated = [synthetic_prompt(1, i, [CODE]) for i in range(800)]
    edits = [q.text for q in generated if "def area" in q.text]
    assert 30 < len(edits) < 70
    assert {q.category for q in generated if "def area" in q.text} == {"code editing"}
    assert all("```python\ndef area(r):\n    return 3.14 * r * r\n```" in text for text in edits)
    assert not any("Here you are" in text or "It is simple" in text for text in edits)


def test_a_passage_is_held_out_in_all_prompts_or_in_none():
    held_out: dict[str, set[bool]] = {}
    for i in range(4000):
        q = synthetic_prompt(2, i, PROSE)
        if found := re.search(r"The barge number \d+", q.text):
            held_out.setdefault(found[0], set()).add(q.held_out)
    assert len(held_out) > 250
    assert {len(sides) for sides in held_out.values()} == {1}
    assert 3 <= sum(True in sides for sides in held_out.values()) <= 30


def test_prompts_in_files_are_used_verbatim(tmp_path):
    (tmp_path / "a.toml").write_text('[[prompt]]\ncategory = "x"\nname = "y"\ntext = "Why?"\n')
    (tmp_path / "b.jsonl").write_text('{"category": "x", "name": "z", "text": "When?"}\n')
    found = read_user_texts([tmp_path])
    assert [(q.category, q.text) for q in found.prompts] == [("x", "Why?"), ("x", "When?")]
    assert (found.passages, found.skipped) == ([], {})
    lines = "".join(f'{{"category": "x", "name": "{i}", "text": "Why {i}?"}}\n' for i in range(1000))
    (tmp_path / "b.jsonl").write_text(lines)
    many = read_user_texts([tmp_path / "b.jsonl"]).prompts
    assert 25 < sum(q.held_out for q in many) < 80
    assert read_user_texts([tmp_path / "b.jsonl"]).prompts == many
    (tmp_path / "a.toml").write_text('[[prompt]]\ncategory = "x"\n')
    with pytest.raises(InvalidRequest, match="prompt 1 has category"):
        read_user_texts([tmp_path])


def test_other_files_become_passages(tmp_path):
    (tmp_path / "novel.txt").write_text("\n\n".join(PROSE), encoding="utf-8-sig")
    (tmp_path / "settings.toml").write_text("\n".join(f"key_{i} = {i}" for i in range(40)))
    (tmp_path / "m.py").write_text(
        "\n\n".join(f"    def f{i}(x):\n        return x + {i}" for i in range(100))
    )
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"Gr\xf6\xdfe " * 50)
    (tmp_path / "short.txt").write_text("Hello.")
    (tmp_path / "large.txt").write_text("word " * 300_000)
    (tmp_path / ".hidden").write_text("\n".join(PROSE))
    found = read_user_texts([tmp_path])
    assert {why: [p.name for p in paths] for why, paths in found.skipped.items()} == {
        "not UTF-8 text": ["image.png", "latin.txt"],
        "larger than 1 MiB": ["large.txt"],
        "almost empty": ["short.txt"],
    }
    assert found.prompts == []
    kinds = Counter(passage.split("\n")[0] for passage in found.passages if passage.startswith("```"))
    assert set(kinds) == {"```python", "```toml"}
    prose = [passage for passage in found.passages if not passage.startswith("```")]
    assert "\n\n".join(prose) == "\n\n".join(PROSE)
    code = "\n\n".join(
        p.removeprefix("```python\n").removesuffix("\n```") for p in found.passages if "def" in p
    )
    assert code == (tmp_path / "m.py").read_text()
    assert any("return x + " in synthetic_prompt(1, i, found.passages).text for i in range(200))
    with pytest.raises(InvalidRequest, match="does not exist"):
        read_user_texts([tmp_path / "absent"])


@pytest.mark.parametrize("joint", ["\n\n", "\n", " "])
def test_long_texts_are_split_at_natural_boundaries(joint):
    text = joint.join(PROSE)
    parts = split_passages(text)
    assert all(MAX_PASSAGE / 2 < len(part) <= MAX_PASSAGE for part in parts[:-1])
    assert all(part.startswith("The barge number") for part in parts)
    assert sum(part.count("sleepy dogs") for part in parts) == len(PROSE)


def test_texts_without_boundaries_are_split_anywhere_and_short_ones_dropped():
    parts = split_passages("x" * (2 * MAX_PASSAGE + 200))
    assert [len(part) for part in parts] == [MAX_PASSAGE, MAX_PASSAGE, 200]
    assert split_passages("A line.\n\n") == []
