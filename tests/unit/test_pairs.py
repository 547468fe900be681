"""Comparing vocabularies, and expected speed-ups from known costs; without model files."""

import re

import pytest

from spec_local.errors import VocabularyMismatch
from spec_local.models.pairs import MemoryNeed, advice, compare, expected_speedups
from spec_local.policies.cost_model import CostModel


class Toy:
    """A vocabulary of one-letter tokens after five special ones."""

    def __init__(self, letters, *, kind=1, bos=0, special="<abcd", eos=-1):
        self.names = [f"<{c}>".encode() for c in special] + [c.encode() for c in letters]
        self.n_tokens = len(self.names)
        self.type, self.bos, self.eos, self.eot = kind, bos, eos, -1
        self.add_bos, self.add_eos = True, False

    def text(self, token):
        return self.names[token]

    def texts(self, n):
        return self.names[:n]

    def piece(self, token):
        name = self.names[token]
        return b"" if len(name) == 3 and name.startswith(b"<") else name


LETTERS = [chr(0x4E00 + i) for i in range(400)]


def with_changes(*places):
    return [chr(0x3041 + i) if i in places else c for i, c in enumerate(LETTERS)]


def test_the_same():
    same = compare(Toy(LETTERS), Toy(LETTERS))
    assert (same.verdict, same.difference, list(same.differing_ids), same.coverage) == ("same", None, [], 1.0)


def test_padding_and_names_of_special_tokens_may_differ():
    main, draft = Toy([*LETTERS, "x", "y"]), Toy(LETTERS, special="<abcz")
    longer = compare(main, draft)
    assert longer.verdict == "same"
    assert list(longer.differing_ids) == [4, 405, 406]
    assert longer.coverage == 405 / 407
    assert compare(draft, main).coverage == 1.0


def test_nearly_the_same():
    near = compare(Toy(LETTERS), Toy(with_changes(3, 7)))
    assert near.verdict == "nearly the same"
    assert list(near.differing_ids) == [8, 12]
    assert near.difference.startswith("token 8 is ")
    assert near.coverage == 403 / 405


def test_another_bos_token_is_nearly_the_same():
    near = compare(Toy(LETTERS), Toy(LETTERS, bos=1))
    assert (near.verdict, list(near.differing_ids)) == ("nearly the same", [])
    assert near.difference == "they differ in the bos token"


@pytest.mark.parametrize(
    ("draft", "coverage"),
    [
        (Toy(with_changes(*range(5))), 400 / 405),  # more than one in a hundred differ
        (Toy(LETTERS[::-1]), 1.0),  # the same tokens with other ids
        (Toy(LETTERS[:100]), 105 / 405),
        (Toy(LETTERS, kind=2), 1.0),
    ],
)
def test_another_vocabulary(draft, coverage):
    other = compare(Toy(LETTERS), draft)
    assert other.verdict == "other"
    assert other.difference
    assert other.coverage == pytest.approx(coverage)


PAIRS = {  # name of the draft, bytes of both, coverage, advice
    "a good one": ("draft", (90, 10), 0.63, None),
    "the same file": ("main", (90, 90), 1.0, "the same file.*: give a smaller draft, or none$"),
    "a link to it": ("link", (90, 90), 1.0, "the same file"),
    "swapped": ("draft", (10, 90), 1.0, r"draft \(.*\) is larger than the main model main .*: swap them"),
    "few tokens": ("draft", (90, 10), 0.18, "has only 18% of the main model's tokens: .*the same family"),
}


@pytest.mark.parametrize(("name", "sizes", "coverage", "expected"), PAIRS.values(), ids=PAIRS.keys())
def test_advice_about_a_pair(tmp_path, name, sizes, coverage, expected):
    for each in ("main", "draft"):
        (tmp_path / each).write_bytes(b"")
    (tmp_path / "link").symlink_to("main")
    found = advice(tmp_path / "main", tmp_path / name, sizes, coverage)
    assert found is None if expected is None else re.search(expected, found)
    assert "\n" not in (found or "")


def test_nothing_in_common():
    with pytest.raises(VocabularyMismatch, match="no token in common"):
        compare(Toy("ab", special="", bos=-1), Toy("cdefg", special="", bos=-1, kind=2))


def test_expected_speedups_weigh_gain_and_cost():
    main = CostModel({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 64: 1.0})
    cheap = expected_speedups(main, CostModel({1: 0.1}), (0.0, 0.5, 0.9))
    assert [p.acceptance_rate for p in cheap] == [0.0, 0.5, 0.9]
    assert (cheap[0].draft_length, cheap[0].speedup) == (0, 1.0)
    best = max(sum(0.9**i for i in range(k + 1)) / (1 + 0.1 * k) for k in range(17))
    assert cheap[2].speedup == pytest.approx(best)
    assert 1 < cheap[1].speedup < cheap[2].speedup
    assert 0 < cheap[1].draft_length < cheap[2].draft_length
    assert all(p.draft_length == 0 for p in expected_speedups(main, CostModel({1: 1.0}), (0.5, 0.9, 0.99)))


def test_memory():
    memory = MemoryNeed(weights=5, caches=2, overhead=1, free=8)
    assert (memory.needed, memory.suffices) == (8, True)
    assert not MemoryNeed(5, 2, 2, 8).suffices
