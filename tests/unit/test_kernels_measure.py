"""The products left to llama.cpp, decided from made-up measurements."""

import pytest

from spec_local.kernels.measure import FLOAT_SIZES, FLOATS, PACKED, PACKED_SIZES, decide


def rounds_of(speeds):
    """A measurement whose rounds alternate between the speeds of a type and a number of tokens."""

    def measure(name, sizes, rounds):
        return [[speeds(name, n)[i % len(speeds(name, n))] for i in range(rounds)] for n in sizes]

    return measure


@pytest.mark.parametrize(
    ("slow", "limits"),
    [
        (set(), {}),
        ({("Q4_K", 64)}, {"Q4_K": 0}),  # the layout is the same for all sizes
        ({("F16", 16), ("F16", 48)}, {"F16": 12}),
        ({("BF16", 1), ("Q2_K", 1), ("F32", 64)}, {"Q2_K": 0, "BF16": 0, "F32": 48}),
        (
            {(name, n) for name in (*PACKED, *FLOATS) for n in (*PACKED_SIZES, *FLOAT_SIZES)},
            dict.fromkeys((*PACKED, *FLOATS), 0),
        ),
    ],
)
def test_the_limits(slow, limits):
    assert decide(rounds_of(lambda *case: [0.9 if case in slow else 1.2])) == limits


@pytest.mark.parametrize(
    ("speeds", "is_lost"),
    [
        ([0.97], True),
        ([0.985], False),  # within what is allowed
        ([0.9, 0.9, 0.9, 0.9, 1.1], True),
        ([0.5, 1.02, 0.5, 1.02, 0.5], False),  # another program's work: not all rounds agree
        ([1.0, 1.0, 0.1], False),
    ],
)
def test_chance_does_not_decide(speeds, is_lost):
    assert decide(rounds_of(lambda name, n: speeds if name == "Q8_0" else [2.0])) == (
        {"Q8_0": 0} if is_lost else {}
    )


def test_a_clear_gain_is_measured_once():
    calls = []

    def speeds(name, sizes, rounds):
        calls.append((name, rounds))
        return [[3.0 if n != 4 or name != "Q6_K" else 1.0] * rounds for n in sizes]

    assert decide(speeds) == {}
    names = [name for name, _ in calls]
    assert sorted(names) == sorted([*PACKED, *FLOATS, "Q6_K"])
    assert [rounds for name, rounds in calls if name == "Q6_K"] == [3, 15]
