"""Tables, bars and paragraphs in files, and on terminals of any width."""

import re

from hypothesis import given
from hypothesis import strategies as st

from spec_local.bench.figures import Estimate
from spec_local.bench.layout import bars, document, paragraph, table

HEAD = ["variant", "tokens/s", "steps by"]
ROWS = [["plain", "10.0", ""], ["speculative", "8.0", "draft 80%, none 20%"]]


def test_a_file_has_whole_tables():
    assert table(HEAD, ROWS).splitlines() == [
        "| variant     | tokens/s | steps by            |",
        "| ----------- | -------: | ------------------- |",
        "| plain       |     10.0 |                     |",
        "| speculative |      8.0 | draft 80%, none 20% |",
    ]
    assert table(HEAD, ROWS, 48) == table(HEAD, ROWS)  # it just fits


def test_a_table_that_is_too_wide_is_divided():
    assert table(HEAD, ROWS, 47).split("\n\n") == [
        table(HEAD[:2], [row[:2] for row in ROWS]),
        table(HEAD[::2], [row[::2] for row in ROWS]),
    ]


def test_long_cells_are_wrapped():
    assert table(["", "value"], [["main", "one two three four five"]], 30).splitlines() == [
        "|      | value               |",
        "| ---- | ------------------- |",
        "| main | one two three four  |",
        "|      | five                |",
    ]


CELLS = st.text("ab %1", max_size=70)


@given(st.lists(st.lists(CELLS, min_size=4, max_size=4), min_size=1, max_size=4), st.integers(1, 120))
def test_tables_fit_and_lose_nothing(rows, width):
    found = [line for line in table(rows[0], rows[1:], width).splitlines() if line]
    assert max(map(len, found)) <= max(width, 30)
    letters = "".join("".join(row[1:]) for row in rows).replace(" ", "")
    shown = "".join(re.sub("[ |:-]", "", line.split("|", 2)[2]) for line in found)
    assert sorted(shown) == sorted(letters)


def test_a_vertical_line_in_a_cell_is_escaped():
    assert table(["a|b", "c"], []).splitlines()[0] == "| a\\|b | c   |"


def test_paragraphs():
    text = "word " * 30 + "/a/path/that-has-hyphens/and/is/longer/than/the/line/of/the/terminal"
    assert paragraph(text) == text
    lines = paragraph(text, 40).splitlines()
    assert " ".join(lines) == text
    assert max(map(len, lines[:-1])) <= 40
    assert lines[-1].startswith("/a/path")
    command = "    specdec draft quantize a --for b" * 3
    assert document(["# Title", command, table(HEAD, ROWS)], 40).split("\n\n")[1] == command


ESTIMATE = Estimate(1.5, 1.25, 2.0, 3)


def test_bars_are_as_long_as_the_terminal_allows():
    whole, shorter = (bars([("code", "", ESTIMATE)], width) for width in (100, 50))
    # 40 characters, and 50 without "    code " and " 1.50 [1.25, 2.00]"
    assert whole == "    code " + "█" * 20 + "│" + "█" * 4 + "▓" * 5 + "░" * 10 + " 1.50 [1.25, 2.00]"
    assert len(shorter) == 50
    assert bars([("code", "", ESTIMATE)], 36) == ""
