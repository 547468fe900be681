"""Timing products until it is clear whose kernels are faster, with made-up times."""

import numpy as np
import pytest

from spec_local.kernels import choice, measure
from spec_local.kernels.choice import FLOATS, PACKED


class Products:
    """A timer. Products of n tokens take n seconds with llama.cpp; the kernels' speed is that of `speeds`.

    speeds: by type, of each round in turn; other types are twice as fast.
    """

    def __init__(self, speeds):
        self.speeds, self.rounds = speeds, {}

    def __call__(self, name, sizes, rounds):
        found = np.empty((rounds, len(sizes), 2))
        of_type = self.speeds.get(name, [2.0])
        for i in range(rounds):
            done = self.rounds[name] = self.rounds.get(name, 0) + 1
            found[i, :, 1] = sizes
            found[i, :, 0] = np.array(sizes) / of_type[(done - 1) % len(of_type)]
        return found


class OtherPrograms:
    """Other programs that use these numbers of cores, one for each measurement; in the end, none."""

    def __init__(self, busy=()):
        self._busy = iter(busy)

    def __call__(self):
        return self

    def cores(self):
        return next(self._busy, 0.0)


def chosen(products, types=measure.TYPES):
    return choice.limits(measure.timed(products, types, 0.5, OtherPrograms()))


@pytest.mark.parametrize(
    ("speeds", "is_lost"),
    [
        ([0.9], True),
        ([0.985], False),  # within what repeated measurements differ
        ([0.9, 0.9, 0.9, 0.9, 1.1], True),
        ([0.5, 1.02, 1.02], False),  # another program's work
        ([1.02, 1.02, 0.1], False),
    ],
)
def test_chance_does_not_decide(speeds, is_lost):
    assert chosen(Products({"Q8_0": speeds})) == ({"Q8_0": 0} if is_lost else {})


def test_only_what_is_unclear_is_timed_again():
    products = Products({"Q6_K": [2.0, 0.5], "Q4_K": [0.5], "F16": [1.0], "BF16": [1.2, 0.9]})
    assert chosen(products) == {"Q4_K": 0}  # in the median, Q6_K is faster
    assert set(products.rounds) == {*PACKED, *FLOATS}
    assert {name: n for name, n in products.rounds.items() if n > 3} == {"Q6_K": 15, "BF16": 15}


def test_types_that_were_disturbed_are_timed_again_but_not_forever():
    products = Products({})
    busy = [9.0, *[0.0] * 15, *[9.0] * 100]
    found = measure.timed(products, measure.TYPES, 0.5, OtherPrograms(busy))
    assert set(found) == set(measure.TYPES[:15])
    assert products.rounds[measure.TYPES[0]] == 6
    assert products.rounds[measure.TYPES[15]] == 3 * 8
    assert sum(products.rounds.values()) == 3 * (16 + 8)


# Time of one, two and three tokens with the second way of reading weights, relative to the first: as measured
# on a Zen 4 with AVX-512; and for a Zen 3, which reads 23 to 27 GB/s with prefetches and 11 to 23 without.
ZEN_4 = {"Q4_K": (0.85, 0.91, 0.96), "Q8_0": (0.89, 0.87, 0.97)}
ZEN_3 = {"Q4_K": (1.5, 1.3, 1.1), "Q8_0": (1.2, 1.1, 1.0)}


@pytest.mark.parametrize(("ratios", "way"), [(ZEN_4, 1), (ZEN_3, 0)])
def test_weights_are_read_in_the_way_that_is_faster(ratios, way):
    noise = np.random.default_rng(0)

    def timer(name, sizes, rounds):
        seconds = np.ones((rounds, len(sizes), 2))
        seconds[:, :, 1] = ratios[name]
        return seconds * noise.normal(1, 0.1, (rounds, 1, 2))  # the memory's speed varies

    found = [choice.OtherReading(packed=measure.relative_time(timer, ratios)) for _ in range(100)]
    assert [other.chosen for other in found].count((way, 0)) > 95
