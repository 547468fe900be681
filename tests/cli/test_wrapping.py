"""Test line breaks between words: only spaces become line breaks, and no line is longer than it must be."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from specdec_cli.wrapping import Wrapped

WORDS = ["a", "word", "some", "longer", "extraordinarily", "é", "日本", "x" * 40, "🎉", "-", "```", "2,5"]
TEXTS = st.lists(
    st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", " ", " ", "\n", "\n\n", "  ", "\t"])), max_size=40
).map(lambda pairs: "".join(map("".join, pairs)))


def wrapped(text, width, cuts=()):
    """Return the text as it is written in parts that end at these places."""
    out = []
    write = Wrapped(lambda part, style: out.append(part), lambda: width)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(borders):
        write(text[start:end])
    write.flush()
    return "".join(out)


def test_lines_break_between_words():
    text = "The quick brown fox jumps over the lazy dog and runs away, as foxes do."
    assert wrapped(text, 30, range(len(text))) == (
        "The quick brown fox jumps over\nthe lazy dog and runs away, as\nfoxes do."
    )


def test_code_and_indentation_are_kept():
    text = "Here:\n```python\n" + "x = 1 " * 20 + "\n```\n    " + "y " * 20
    seen = wrapped(text, 30)
    assert "x = 1 " * 20 in seen
    assert "\n    y y" in seen
    assert max(map(len, seen.partition("```\n")[2].splitlines())) <= 30


def test_wide_characters_break_anywhere():
    assert wrapped("日本語のテキスト", 8) == "日本語の\nテキスト"


def test_a_word_is_shown_before_it_is_complete_where_it_surely_fits():
    out = []
    write = Wrapped(lambda part, style: out.append(part), lambda: 80)
    write("The qui")
    assert "".join(out) == "The qui"
    write = Wrapped(lambda part, style: out.append(part), lambda: 20)
    write(" and the qui")
    assert not "".join(out).endswith("qui")  # "quintessential" would not fit


def test_styles_stay_with_their_text():
    out = []
    write = Wrapped(lambda part, style: out.append((part, style)), lambda: 12)
    write("one ")
    write("two th", "green")
    write("ree four")
    write.flush()
    chars = [(char, style) for part, style in out for char in part]
    assert "".join(char for char, _ in chars) == "one two\nthree four"
    assert {style for char, style in chars if char in "tw"} == {"green"}


def test_control_characters_are_made_visible_before_they_are_measured():
    assert wrapped("ab \x1b[31mcd", 14) == "ab\n\\u001b[31mcd"


@given(TEXTS, st.integers(8, 60), st.lists(st.integers(0, 300), max_size=20))
def test_only_spaces_become_line_breaks(text, width, cuts):
    seen = wrapped(text, width, cuts)
    squeeze = lambda s: re.sub(r"\s+", "", s)  # noqa: E731
    assert squeeze(seen) == squeeze(text)
    if "```" not in text:
        for line in seen.split("\n"):
            longest = max(map(cell_len, line.split()), default=0)
            assert cell_len(line.replace("\t", " " * 8).rstrip()) <= width or longest > min(24, width)


@given(TEXTS, st.integers(40, 60), st.lists(st.integers(0, 300), max_size=20))
def test_the_parts_do_not_matter(text, width, cuts):
    assert wrapped(text, width, cuts) == wrapped(text, width)


def test_a_very_narrow_terminal():
    assert wrapped("a bc 日本", 2) == "a\nbc\n日\n本"
