"""Alignment with a text that is repeated with changes: its continuation, its match and its substitutions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.datastore.alignment import Alignment

TEXT = [*range(100, 160)]


def aligned(text=TEXT, match=8):
    alignment = Alignment()
    alignment.offer(match, text)
    return alignment


def advance(alignment, *tokens):
    for token in tokens:
        alignment.advance(token)
    return alignment


def test_follows_the_text_to_its_end():
    alignment = aligned([1, 2, 3, 4])
    assert (alignment.match, list(alignment.continuation(9))) == (8, [1, 2, 3, 4])
    advance(alignment, 1, 2)
    assert (alignment.match, list(alignment.continuation(1))) == (10, [3])
    assert alignment.in_sync
    assert not alignment.has_diverged  # a search would find the same
    advance(alignment, 3, 4)
    assert (alignment.match, list(alignment.continuation(9))) == (0, [])
    assert not alignment.in_sync


def test_a_short_match_is_ignored():
    assert aligned(match=7).match == 0
    assert aligned(text=[]).match == 0
    assert advance(Alignment(), 1, 2, 3).match == 0


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([9, 104], [105]),  # 9 replaced 103
        ([9, 104, 105, 106], [107]),
        ([9, 8, 7, 106], [107]),  # three replaced three
        ([9, 103], [104]),  # 9 was inserted
        ([9, 8, 7, 103], [104]),  # three were inserted
        ([105], [106]),  # 103 and 104 were skipped
        ([9], []),  # no token matches yet
        ([158], []),  # too much was skipped
        ([9, 8, 7, 6, 104, 5], []),  # the last token does not match
    ],
)
def test_one_matching_token_after_a_change_gives_the_continuation(output, expected):
    alignment = advance(aligned(), 100, 101, 102, *output)
    assert (list(alignment.continuation(1)) if alignment.match else []) == expected
    assert alignment.has_diverged


def test_a_match_grows_with_each_token_and_is_more_reliable_in_place():
    replaced = [advance(aligned(), 100, 9, *TEXT[2 : 2 + n]).match for n in range(1, 5)]
    assert replaced == sorted(set(replaced))
    assert advance(aligned(), 100, 9, 8, 7, 101).match < replaced[0]


def test_the_longest_match_wins_then_the_nearest():
    text = [1, 2, 3, 50, 4, 5, 50, 6, 51, 50, 7]
    alignment = advance(aligned(text), 1, 2, 3, 40, 41, 50)
    assert alignment.continuation(1) == [6]  # three for four tokens; the others are one or seven away
    assert advance(aligned(text), 1, 2, 3, 40, 51, 50).continuation(1) == [7]


def test_resynchronizes_with_a_higher_match_than_a_search():
    alignment = advance(aligned(), 100, 9, 102, 103, 104)
    assert not alignment.in_sync
    advance(alignment, 105)
    assert alignment.in_sync
    assert alignment.has_diverged
    in_place = alignment.match
    assert in_place > 4
    assert advance(alignment, 106).match > in_place
    assert advance(aligned(), 100, 120, 121, 122, 123).match < in_place


def test_a_long_divergence_ends_the_alignment():
    assert advance(aligned(), 100, *[9] * 30, 130).match > 0
    assert advance(aligned(), 100, *[9] * 60, 130).match == 0


def test_switches_to_a_text_with_a_higher_match():
    alignment = aligned(match=9)
    alignment.offer(9, [7, 7])
    assert alignment.continuation(1) == [100]
    alignment.offer(10, [7, 7])
    assert (list(alignment.continuation(9)), alignment.match) == ([7, 7], 10)
    # After a change in place, a few matching tokens outweigh a short match elsewhere.
    alignment = advance(aligned(), 100, 9, 102, 103)
    alignment.offer(8, [7, 7])
    assert alignment.continuation(1) == [104]
    alignment.offer(20, [7, 7])
    assert alignment.continuation(1) == [7]
    assert alignment.in_sync
    assert not alignment.has_diverged
    alignment.offer(40, [])
    assert alignment.continuation(1) == [7]


def test_a_longer_part_of_the_same_text_extends_it():
    alignment = advance(aligned([1, 2, 3]), 1, 2)
    alignment.offer(9, [3, 4, 5])  # the match must reach the tokens that agreed so far
    assert list(alignment.continuation(9)) == [3]
    alignment.offer(10, [3, 4, 5])
    assert (list(alignment.continuation(9)), alignment.match) == ([3, 4, 5], 10)


def test_a_substitution_is_repeated():
    a, the, ada, love, lace, is_, was = range(7)
    text = [the, ada, love, is_, 10, 11, 12, 13, the, ada, love, was, a, ada, love, 20, the, ada, lace]
    alignment = advance(aligned(text), the, 30, 31, 32, is_, 10, 11, 12)
    # Only as a whole, and after the same token.
    assert list(alignment.continuation(99)) == [13, the, 30, 31, 32, was, a, ada, love, 20, the, ada, lace]
    assert advance(alignment, 13, the, 30, 31, 32).continuation(1) == [was]
    alignment.offer(32, [20, the, ada, love, 21])
    assert list(alignment.continuation(99)) == [20, the, 30, 31, 32, 21]


@pytest.mark.parametrize(
    "output", [[101, 102, 103, 104], [9, 100, 101, 102, 103, 104], [*range(30, 39), 105, 106, 107, 108]]
)
def test_deletions_insertions_and_long_passages_are_not_learned(output):
    alignment = advance(aligned([7, *TEXT[:9]]), 7, *output)
    alignment.offer(40, [7, *TEXT])
    assert list(alignment.continuation(99)) == [7, *TEXT]


def test_a_change_of_the_first_token_is_not_learned():
    alignment = advance(aligned([1, 2, 3, 4, 5, 6]), 9, 2, 3, 4, 5)
    alignment.offer(40, [6, 1, 2])
    assert list(alignment.continuation(99)) == [6, 1, 2]


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    output=st.lists(st.integers(0, 3), max_size=120),
    again=st.lists(st.integers(0, 3), max_size=30),
)
def test_continuations_contain_only_known_tokens(text, output, again):
    alignment = aligned(text)
    for i, token in enumerate(output):
        alignment.advance(token)
        if i % 16 == 15:
            alignment.offer(8 + i // 8, again)
        ahead = alignment.continuation(5)
        assert len(ahead) <= 5
        assert {*ahead} <= {*text, *again, *output}
        assert (alignment.match > 0) <= (len(ahead) > 0)
        assert not alignment.in_sync or alignment.match > 0
