"""Limits that end an answer with a line."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.answers.text import LineLimits, TextStream


def stream_of(parts, *limits, stops=()):
    """A stream whose tokens are the numbers of the parts; each comes a second after the last."""
    seconds = itertools.count()
    stream = TextStream([part.encode() for part in parts].__getitem__, stops)
    return LineLimits(stream, *limits, clock=lambda: float(next(seconds)))


def ended(parts, *limits):
    """The text that is let through, and whether it has ended."""
    lines = stream_of(parts, *limits)
    text = "".join(lines.feed(i) for i in range(len(parts)))
    return text + lines.finish(), lines.stopped


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
    parts = ["a\n", "\n", "b"]
    lines = stream_of(parts)
    assert [lines.feed(i) for i in range(3)] == parts
    assert not lines.stopped


def test_a_stop_string_ends_the_text_with_what_was_held_back():
    """A line break and too little indentation are part of it, as nothing shows that the line is short."""
    lines = stream_of(["a\n", " st", "op\nb"], 2, stops=["stop"])
    assert [lines.feed(i) for i in range(3)] == ["a", "", "\n "]
    assert (lines.stopped, lines.stopping_word, lines.finish()) == (True, "stop", "")
    lines = stream_of(["a\nb", "stop"], 2, stops=["stop"])
    assert [lines.feed(i) for i in range(2)] == ["a", ""]
    assert (lines.stopped, lines.stopping_word) == (True, "")


@given(st.lists(st.text("a \t\n", max_size=4)), st.integers(0, 3))
def test_how_the_text_is_divided_does_not_matter(parts, n):
    text = "".join(parts)
    assert ended(parts, n) == ended([text], n)
    found, has_ended = ended([text], n)
    assert text.startswith(found)
    assert has_ended == (found != text)
    lines = found.split("\n")[1:]
    assert all(len(line) - len(line.lstrip()) >= n for line in (lines if has_ended else lines[:-1]))
