"""What a tokenizer joins on its way to a token."""

import math

import pytest

from spec_local.training.trimming import joined

ORDER = ["h e", "t h", "th e", "e r", "he r", "a a", "aa a"]


def rank(left, right):
    pair = f"{left} {right}"
    return ORDER.index(pair) if pair in ORDER else math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("th", ["th"]),
        ("her", ["he", "her"]),  # and not "er", which is joined later
        ("the", []),  # "he" comes first, and then nothing joins "t" with it
        ("aaa", ["aa", "aaa"]),  # of equal ones the first
        ("aaaa", []),
        ("t", []),
        ("xy", []),
        ("", []),
    ],
)
def test_the_lowest_are_joined_first(text, expected):
    assert joined(text, rank) == expected
