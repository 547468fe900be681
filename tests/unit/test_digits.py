"""Numbers within bounds: each of them, and no other, has a numeral."""

import itertools
import re
from decimal import Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spec_local.errors import InvalidRequest
from spec_local.grammar.digits import BOUNDS, numerals, within

ENDS = sorted(
    {sign * n for n in (0, 1, 2, 9, 10, 11, 37, 99, 100, 101, 110, 999, 1000, 1001) for sign in (1, -1)}
)
"""Around every place where the number of digits changes."""


def pattern(expression):
    """The same as a regular expression: of GBNF there are literals, classes, choices and repetitions."""
    return re.compile(re.sub(r'"([^"]*)"', lambda m: re.escape(m[1]), expression).replace(" ", ""))


def test_every_integer_of_a_range_has_one_numeral():
    texts = {str(n): n for n in range(-1200, 1201)}
    wrong = ["", "-", "-0", "00", "01", "-01", "+1", "1.0", "1e1", " 1", "0" * 30]
    for low, high in itertools.combinations_with_replacement(ENDS, 2):
        holds = pattern(numerals(low, high)).fullmatch
        assert [n for text, n in texts.items() if holds(text)] == list(range(max(low, -1200), high + 1)), (
            low,
            high,
        )
        assert not any(map(holds, wrong)), (low, high)


def test_every_decimal_of_a_range_may_have_zeros_at_its_end():
    texts = [
        f"{whole}{part}"
        for whole in range(13)
        for part in ["", *(f".{n:0{k}}" for k in (1, 2) for n in range(10**k))]
    ]
    texts += [f"-{text}" for text in texts]
    wrong = ["-0", "-0.0", "-0.00", "", ".5", "1.", "1.000", "0.001", "00.5", "01", "1e0", "1.5e0"]
    values = {text: int(Decimal(text) * 100) for text in texts if text not in wrong}
    for low, high in itertools.combinations_with_replacement(ENDS, 2):
        holds = pattern(numerals(low, high, 2)).fullmatch
        for text, value in values.items():
            assert bool(holds(text)) == (low <= value <= high), (low, high, text)
        assert not any(map(holds, wrong)), (low, high)


LARGE = st.integers(-(10**20), 10**20) | st.integers(0, 20).map(lambda k: 10**k) | st.integers(-100, 100)


@given(st.lists(LARGE, min_size=2, max_size=2).map(sorted), LARGE, st.integers(-2, 2), st.integers(0, 9))
def test_large_ranges_are_exact_and_small(ends, number, beside, decimals):
    low, high = ends
    expression = numerals(low, high, decimals)
    assert len(expression) < 2500
    holds = pattern(expression).fullmatch
    for n in (number, low, high, low + beside, high + beside, (low + high) // 2):
        sign, digits = "-" if n < 0 else "", str(abs(n)).zfill(decimals + 1)
        text = f"{sign}{digits[: len(digits) - decimals]}" + (f".{digits[-decimals:]}" if decimals else "")
        assert bool(holds(text)) == (low <= n <= high), text


def test_nothing_lies_in_an_empty_range():
    with pytest.raises(ValueError, match="between 3 and 2"):
        numerals(3, 2)


WITHIN = {
    "both": ("integer", {"minimum": -1, "maximum": 2}, ["-1", "0", "2"], ["-2", "3", "-0"]),
    "exclusive": ("integer", {"exclusiveMinimum": -1, "exclusiveMaximum": 2}, ["0", "1"], ["-1", "2"]),
    "the narrower": ("integer", {"minimum": 1, "exclusiveMinimum": 1, "maximum": 5, "exclusiveMaximum": 7}, ["2", "5"], ["1", "6"]),
    "the narrower, first": ("integer", {"exclusiveMinimum": 1, "minimum": 1, "exclusiveMaximum": 5, "maximum": 7}, ["2", "4"], ["1", "5"]),
    "between integers": ("integer", {"minimum": -1.5, "exclusiveMaximum": 2.5}, ["-1", "2"], ["-2", "3"]),
    "exclusive between": ("integer", {"exclusiveMinimum": -1.5, "maximum": 2.5}, ["-1", "2"], ["-2", "3"]),
    "whole floats": ("integer", {"exclusiveMinimum": 0.0, "maximum": 3.0}, ["1", "3"], ["0", "4"]),
    "open above": ("integer", {"minimum": 7}, ["7", "10", "9" * 16], ["6", "-7", "1" + "0" * 16]),
    "open below": ("integer", {"maximum": -7}, ["-7", "-10", "-" + "9" * 16], ["-6", "7", "-1" + "0" * 16]),
    "64 bits": ("integer", {"minimum": -(2**63), "maximum": 2**64 - 1}, [str(-(2**63)), str(2**64 - 1)], [str(-(2**63) - 1), str(2**64)]),
    "beyond": ("integer", {"exclusiveMinimum": 10**20 - 1}, [str(10**20)], [str(10**20 - 1), "5"]),
    "a share": ("number", {"minimum": 0, "maximum": 1}, ["0", "1", "0.5", "1.00", "0.99999999999999"], ["-0.1", "1.01", "2", "0.5e0", "-0.0"]),
    "positive": ("number", {"exclusiveMinimum": 0}, ["0.00000000000001", "12.5", "9" * 16], ["0", "0.0", "-1"]),
    "decimals": ("number", {"minimum": -2.75, "exclusiveMaximum": 0.1}, ["-2.75", "-2.7", "0.09", "0"], ["-2.76", "0.1", "0.10", "-3"]),
    "an exponent": ("number", {"maximum": 1e3}, ["1000", "-5.5", "999.99"], ["1000.1", "1001"]),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bounds", "inside", "outside"), WITHIN.values(), ids=WITHIN.keys())
def test_numbers_keep_to_the_bounds_of_a_schema(kind, bounds, inside, outside):
    holds = pattern(within(kind, bounds, "it")).fullmatch
    assert [text for text in inside + outside if holds(text)] == inside


@given(
    st.sampled_from(["exclusiveMinimum", "exclusiveMaximum"]),
    st.integers(-(10**15), 10**15),
    st.integers(0, 15),
    st.integers(1, 17),
)
def test_a_float_that_is_read_keeps_to_an_exclusive_bound(bound, digits, decimals, cut):  # fmt: skip
    value = float(Decimal(digits).scaleb(-decimals))
    assume(abs(value) < 10**15)
    try:
        holds = pattern(within("number", {bound: value}, "it")).fullmatch
    except InvalidRequest:
        return  # too long a bound
    step = Decimal(1).scaleb(-cut)
    beside = Decimal(str(value)) + (step if bound == "exclusiveMinimum" else -step)
    text = f"{beside:f}"
    if holds(text):
        assert float(text) > value if bound == "exclusiveMinimum" else float(text) < value


BAD = {
    "text": ("integer", {"minimum": "3"}, "minimum of it is no number"),
    "of an older standard": ("integer", {"exclusiveMinimum": True}, "exclusiveMinimum of it is no number"),
    "null": ("number", {"maximum": None}, "no number"),
    "infinite": ("number", {"maximum": float("inf")}, "no number"),
    "long": ("integer", {"minimum": 10**20}, "up to 20 digits"),
    "very long": ("integer", {"minimum": -(10**4000)}, "up to 20 digits"),
    "long number": ("number", {"minimum": 10**15}, "up to 15 digits"),
    "fine": ("number", {"minimum": 1e-300}, "more decimals than the 14"),
    "fine beside long": ("number", {"minimum": 0.001, "maximum": 10**13}, "minimum of it has more decimals than the 1 "),
    "none": ("integer", {"minimum": 3, "maximum": 2}, "no integer keeps to all bounds of it"),
    "none between": ("integer", {"exclusiveMinimum": 2, "exclusiveMaximum": 3}, "no integer"),
    "no number": ("number", {"exclusiveMinimum": 2, "maximum": 2}, "no number keeps"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bounds", "why"), BAD.values(), ids=BAD.keys())
def test_bounds_that_cannot_be_kept_to_are_one_line(kind, bounds, why):
    assert bounds.keys() <= BOUNDS
    with pytest.raises(InvalidRequest, match=re.escape(why)) as caught:
        within(kind, bounds, "it")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
