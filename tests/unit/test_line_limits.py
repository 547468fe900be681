"""Limits that end an answer with a line."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.answers.line_limits import LineLimits


def ended(parts, *limits):
    """The text that is let through, and whether it has ended; each part comes a second after the last."""
    seconds = itertools.count()
    lines = LineLimits(*limits, clock=lambda: float(next(seconds)))
    text = "".join(lines.feed(part) for part in parts)
    return text + lines.finish(), lines.ended


@pytest.mark.parametrize(
    ("text", "wanted", "has_ended"),
    [
        ("a\n  b\n   c", "a\n  b\n   c", False),
        ("a\n  b\n c\n  d", "a\n  b", True),
        ("a\n\tb\n\t\tc", "a", True),
        ("a\n \tb\n\n  c", "a\n \tb", True),  # as in llama.cpp's server, an empty line is not indented
        ("a\n ", "a\n ", False),  # it may go on
        ("\n\n", "", True),
        ("a", "a", False),
        ("", "", False),
    ],
)
def test_lines_are_indented(text, wanted, has_ended):
    assert ended([text], 2) == (wanted, has_ended)
    assert ended(text, 2) == (wanted, has_ended)


def test_the_time_ends_the_text_at_a_line_break():
    assert ended(["a\n", "b\n", "c", "d\n", "e"], 0, 2.5) == ("a\nb\ncd", True)
    assert ended(["a\n", "b"], 0, 5) == ("a\nb", False)
    assert ended("abcdefgh", 0, 2) == ("abcdefgh", False)  # at least one line
    assert ended(["a\n", " ", " b"], 2, 1.5) == ("a", True)


def test_without_limits_all_text_comes_at_once():
    lines = LineLimits()
    assert [lines.feed(part) for part in ("a\n", "\n", "b")] == ["a\n", "\n", "b"]
    assert not lines.ended


@given(st.lists(st.text("a \t\n", max_size=4)), st.integers(0, 3))
def test_how_the_text_is_divided_does_not_matter(parts, n):
    text = "".join(parts)
    assert ended(parts, n) == ended([text], n)
    found, has_ended = ended([text], n)
    assert text.startswith(found)
    assert has_ended == (found != text)
    lines = found.split("\n")[1:]
    assert all(len(line) - len(line.lstrip()) >= n for line in (lines if has_ended else lines[:-1]))
