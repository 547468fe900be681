"""The merges that produce a token."""

import math

import pytest

from spec_local.training.vocabulary_trimming import merge_sequence

ORDER = ["h e", "t h", "th e", "e r", "he r", "a a", "aa a"]


def rank(left, right):
    pair = f"{left} {right}"
    return ORDER.index(pair) if pair in ORDER else math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("th", ["th"]),
        ("her", ["he", "her"]),  # not "er", which is merged later
        ("the", []),  # "he" is merged first, and no merge joins "t" to it
        ("aaa", ["aa", "aaa"]),  # the leftmost of equal ones
        ("aaaa", []),
        ("t", []),
        ("xy", []),
        ("", []),
    ],
)
def test_the_lowest_rank_is_merged_first(text, expected):
    assert merge_sequence(text, rank) == expected
