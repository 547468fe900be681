"""Cost tables: which observations count, what is said between and beyond them, and how a model is timed."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.calibration.measure import measure, measure_prefill
from spec_local.core.fake import FakeModel
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.policies.cost_model import CostModel

F16 = {1: 1.0, 2: 1.17, 4: 1.35, 8: 1.86, 16: 2.7}  # a 1.5B model on two cores; a call of one token is 1
POSITIVE = st.floats(1e-6, 1e3)
TABLES = st.dictionaries(st.integers(1, 64), POSITIVE, min_size=1, max_size=8)


def table(seconds):
    result = CostModel()
    for n, s in seconds.items():
        result.observe(n, s)
    return result


class TimedModel(FakeModel):
    """A fake model whose calls take the time that `seconds(n, number of the call)` says."""

    def __init__(self, seconds, **limits):
        super().__init__(**limits)
        self._seconds, self.now = seconds, 100.0

    def decode_tree(self, tokens, parents, n_logits=None):
        logits = super().decode_tree(tokens, parents, n_logits)
        self.now += self._seconds(len(tokens), len(self.calls))
        return logits

    def clock(self):
        return self.now


def test_sizes_that_were_seen_have_their_own_time():
    costs = table(dict(reversed(F16.items())))
    assert tuple(costs.costs) == (1, 2, 4, 8, 16)
    assert [costs.seconds(n) for n in F16] == list(F16.values())


def test_estimates_between_and_beyond():
    costs = table(F16)
    assert costs.seconds(3) == pytest.approx((1.17 + 1.35) / 2)
    assert costs.seconds(5) == pytest.approx(1.35 + (1.86 - 1.35) / 4)
    assert costs.seconds(16 + 30) == pytest.approx(2.7 + 30 * 1.7 / 15)
    assert table({4: 2.0, 8: 3.0}).seconds(1) == 2.0


def test_one_size_alone_promises_no_sharing():
    costs = table({4: 2.0})
    assert [costs.seconds(n) for n in (1, 4, 6, 8)] == [2.0, 2.0, 3.0, 4.0]


def test_beyond_a_table_that_falls_is_not_below_its_end():
    assert table({1: 3.0, 8: 2.0}).seconds(64) == 2.0


def test_a_noisy_neighbour_does_not_count():
    costs = CostModel()
    for n, outlier in [(1, 50.0), (4, 9.0)]:
        for seconds in (n, outlier, n, n, outlier):
            costs.observe(n, float(seconds))
    assert costs.seconds(1) == 1.0
    assert costs.seconds(4) == 4.0


def test_of_two_observations_the_lower_counts():
    costs = table({2: 9.0})
    costs.observe(2, 1.0)
    assert costs.seconds(2) == 1.0


def test_a_lasting_change_counts():
    costs = CostModel()
    for seconds in [1.0] * 100 + [2.0] * 4:
        costs.observe(1, seconds)
    assert costs.seconds(1) == 1.0
    costs.observe(1, 2.0)
    assert costs.seconds(1) == 2.0


def test_calls_that_take_far_too_long_count_once_they_last():
    """Five of nine are more than a median forgives, and a draft that seems dear is not asked, and so not timed, again."""
    costs = CostModel(F16)
    for seconds in [1.0, *[20.0] * 5, 1.0, *[20.0] * 5, 1.0, *[20.0] * 8]:
        costs.observe(1, seconds)
        assert costs.seconds(1) == 1.0
    costs.observe(1, 20.0)
    assert costs.seconds(1) == 20.0
    costs.observe(1, 1.0)
    assert costs.seconds(1) == 20.0  # it may be a lull
    for _ in range(4):
        costs.observe(1, 1.0)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()))


def test_all_sizes_follow_the_calls_of_one_token():
    costs = CostModel(F16)
    for _ in range(9):
        costs.observe(1, 3.0)
    assert [costs.seconds(n) for n in F16] == pytest.approx([3 * s for s in F16.values()])
    for _ in range(9):
        costs.observe(1, 0.1)
    assert [costs.seconds(n) for n in F16] == pytest.approx([0.1 * s for s in F16.values()])


def test_a_call_counts_by_those_of_one_token_around_it():
    costs = CostModel(F16)
    for n, seconds in [
        (1, 1.0),
        (8, 5.0),
        (1, 2.5),
        (1, 2.5),
    ]:  # the machine had changed before the call of 8
        costs.observe(n, seconds)
    assert costs.seconds(8) == pytest.approx(F16[8])  # the lower one of 1.86 and 5.0 / 2.5
    for n, seconds in [(1, 1.0), (8, 1.6), (1, 40.0), (1, 1.0), (1, 1.0)]:  # only noise, after it
        costs.observe(n, seconds)
    assert costs.seconds(8) == pytest.approx(F16[8])
    costs.observe(8, 1.6)
    assert costs.seconds(8) == pytest.approx(1.6)  # as it is, until the next ones are known


def test_a_call_that_none_of_one_token_follows_soon_counts_by_the_last_one():
    costs = CostModel({1: 1.0})
    for _ in range(20):
        costs.observe(8, 2.0)
    costs.observe(1, 4.0)
    costs.observe(1, 4.0)
    costs.observe(1, 4.0)
    assert costs.seconds(1) == 4.0
    assert costs.seconds(8) == 8.0


def test_odd_calls_are_in_doubt_until_two_of_one_token_came():
    costs = CostModel(F16)
    for n, seconds, in_doubt in [
        (8, 1.86, False),
        (8, 4.0, False),  # one may be noise
        (4, 3.0, True),
        (1, 2.2, True),
        (1, 2.2, False),
        (8, 4.0, False),
    ]:
        costs.observe(n, seconds)
        assert costs.is_in_doubt == in_doubt


def test_a_neighbour_who_comes_right_after_a_call_makes_it_no_cheaper():
    """Nor, by what smaller calls may cost, any other."""
    costs = table(F16)
    for n, seconds in [(1, 1.0)] * 9 + [(35, 6.3), (1, 25.0), (1, 17.0), (1, 1.0), (1, 1.0)]:
        costs.observe(n, seconds)
    assert costs.seconds(35) == pytest.approx(6.3)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()))


@pytest.mark.parametrize("seed", range(3))
def test_noise_moves_no_entry_far_however_long_it_lasts(seed):
    """Entries that are seldom met change with the others, and must not drift away."""
    rng = np.random.default_rng(seed)
    costs, n, pace = table({n: 1 + 0.25 * n for n in (1, 2, 3, 4, 5, 8, 16, 32, 64)}), 1, 1.0
    for i in range(6000):
        if i % 37 == 0:
            n = int(rng.choice([1, 1, 1, 2, 4, 8, rng.integers(1, 66)]))
        if i % 500 == 0:
            pace = float(rng.choice([1.0, 1.0, 1.5, 0.7, 3.0]))
        spike = float(rng.uniform(5, 30)) if rng.random() < 0.02 else 1.0
        costs.observe(n, (1 + 0.25 * n) * pace * spike * float(rng.lognormal(0, 0.1)))
        if i % 1000 == 999:
            costs = CostModel(costs.costs)  # kept on disk, and read again
            found = costs.first(64)[1:] / (1 + 0.25 * np.arange(1, 65)) / pace
            assert 0.25 < found.min() <= found.max() < 4.0


def test_tables_agree_however_fast_the_machine_is():
    costs = CostModel(F16)
    assert costs.agrees_with(CostModel({1: 5.0, 8: 5 * 1.5}))
    assert not costs.agrees_with(CostModel({1: 5.0, 8: 5 * 2.7}))
    assert not costs.agrees_with(CostModel({1: 5.0, 8: 5 * 1.3}))


def test_one_size_that_was_misjudged_is_corrected_alone():
    costs = table(F16 | {8: 2.6})
    for _ in range(12):
        for n, seconds in F16.items():
            costs.observe(n, seconds)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()), rel=0.01)


def test_a_size_cannot_cost_far_more_than_others_imply():
    assert table({1: 30.0, 2: 1.2, 4: 1.4}).seconds(1) == 1.2
    assert table({1: 1.0, 4: 90.0, 8: 2.0}).seconds(4) == pytest.approx(3.2)
    assert table({1: 1.0, 2: 1.2, 8: 90.0}).seconds(8) == pytest.approx(4 * 1.2 * 1.6)
    q8_0 = {1: 1.0, 2: 2.91, 4: 3.95, 7: 6.3, 8: 4.16, 16: 6.38}  # what was measured stays as it is
    assert [table(q8_0).seconds(n) for n in q8_0] == pytest.approx(list(q8_0.values()))


@settings(deadline=None)
@given(TABLES, st.integers(1, 100))
def test_all_sizes_at_once(seconds, n):
    costs = table(seconds)
    first = costs.first(n)
    assert first[0] == 0
    assert first[1:].tolist() == pytest.approx([costs.seconds(i) for i in range(1, n + 1)])
    costs.observe(1, 1e-9)
    assert costs.first(n)[1] == pytest.approx(costs.seconds(1))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), POSITIVE), min_size=1, max_size=60))
def test_a_table_survives_being_written_down(calls):
    costs = CostModel()
    for n, seconds in calls:
        costs.observe(n, seconds)
    again = CostModel(costs.costs)
    assert list(again.costs) == list(costs.costs)
    assert [again.seconds(n) for n in again.costs] == pytest.approx(list(costs.costs.values()))


def test_an_empty_table_knows_nothing():
    with pytest.raises(ValueError, match="unknown"):
        CostModel().seconds(1)


@pytest.mark.parametrize(("n", "seconds"), [(0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_impossible_observations_are_refused(n, seconds):
    costs = CostModel()
    with pytest.raises(ValueError, match="cannot take"):
        costs.observe(n, seconds)
    assert costs.costs == {}


def test_no_call_has_no_tokens():
    with pytest.raises(ValueError, match="unknown"):
        table(F16).seconds(0)


@settings(deadline=None)
@given(TABLES, st.integers(1, 200))
def test_estimates_stay_within_their_neighbours(seconds, n):
    climbing = dict(zip(sorted(seconds), sorted(seconds.values()), strict=True))
    costs = table(climbing)
    known = [
        costs.seconds(size) for size in sorted(climbing)
    ]  # of which some may be implausible, and be less
    estimate = costs.seconds(n)
    below = [s for size, s in zip(sorted(climbing), known, strict=True) if size <= n][-1:]
    above = [s for size, s in zip(sorted(climbing), known, strict=True) if size >= n][:1]
    assert estimate >= min(below + above) * (1 - 1e-12)
    if above:
        assert estimate <= max(below + above) * (1 + 1e-12)
    assert all(k <= s * (1 + 1e-12) for k, s in zip(known, climbing.values(), strict=True))


@settings(deadline=None)
@given(TABLES)
def test_costs_that_climb_give_estimates_that_climb(seconds):
    climbing = dict(zip(sorted(seconds), sorted(seconds.values()), strict=True))
    costs = table(climbing)
    estimates = [costs.seconds(n) for n in range(1, 100)]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(estimates))


@pytest.mark.parametrize("text", [[], [3, 1, 4]])
def test_measuring_leaves_the_text_alone_and_no_tree(text):
    model = TimedModel(lambda n, call: F16.get(n, 0.0), max_branches=1)
    if text:
        model.evaluate(text, 0)
    model.decode_tree([5], [-1])
    costs = measure(model, tuple(F16), clock=model.clock)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()))
    assert list(model.cached) == text
    with pytest.raises(InvalidRequest, match="parent"):
        model.decode_tree([0], [0])  # there would be a node 0, had any been left


def test_measuring_warms_up_and_interleaves():
    model = TimedModel(lambda n, call: 0.001 if call <= 2 else float(n))
    costs = measure(model, (1, 2, 4), rounds=2, clock=model.clock)
    assert sorted(model.calls[:2]) == [1, 4]
    assert model.calls[2:] == [1, 2, 4, 1, 2, 4]
    assert [costs.seconds(n) for n in (1, 2, 4)] == [1.0, 2.0, 4.0]


def test_measuring_ignores_one_disturbed_round():
    model = TimedModel(lambda n, call: n + (50.0 if 5 < call <= 8 else 0.0))
    costs = measure(model, (1, 2, 4), rounds=3, clock=model.clock)
    assert [costs.seconds(n) for n in (1, 2, 4)] == [1.0, 2.0, 4.0]
    assert len(model.calls) == 2 + 3 * 3


def test_measuring_keeps_to_its_budget_and_begins_with_what_matters():
    model = TimedModel(lambda n, call: 1.0)
    costs = measure(model, (1, 2, 4, 8, 16, 3), rounds=3, budget=6.5, clock=model.clock)
    assert tuple(costs.costs) == (1, 2, 4, 8, 16)
    assert tuple(measure(model, (1, 2, 4, 8), rounds=3, budget=0.0, clock=model.clock).costs) == (1, 2, 4)


def test_measuring_one_row_of_logits():
    model = TimedModel(lambda n, call: F16.get(n, 2.0), max_logits=1)
    assert tuple(measure(model, tuple(F16), rows=1, clock=model.clock).costs) == tuple(F16)
    assert tuple(measure(model, tuple(F16), clock=model.clock).costs) == (1,)


def test_the_rate_of_prefill():
    model = TimedModel(lambda n, call: 3.0 if call == 1 else 0.5, max_tokens=8)
    assert measure_prefill(model, model.clock) == 16
    assert list(model.cached) == []
    model.evaluate([1, 2, 3], 0)
    measure_prefill(model, model.clock)
    assert list(model.cached) == [1, 2, 3]
    full = FakeModel(n_ctx=2)
    full.evaluate([1, 2], 0)
    with pytest.raises(ContextOverflow, match="no room"):
        measure_prefill(full)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"max_tokens": 6}, (1, 2, 3, 4, 5, 6)),
        ({"max_logits": 3}, (1, 2, 3)),
        ({"n_ctx": 15}, (1, 2, 3, 4, 5)),  # 10 tokens are there already
        ({"n_ctx": 11}, (1,)),
        ({"max_branches": 1, "max_logits": 64}, (1, 2, 3, 4, 5, 8, 16, 32)),
    ],
)
def test_measuring_respects_limits(limits, sizes):
    model = TimedModel(lambda n, call: 1.0, **limits)
    for _ in range(5):
        model.evaluate([1, 2], 0)
    assert tuple(measure(model, clock=model.clock).costs) == sizes


def test_measuring_needs_room():
    model = FakeModel(n_ctx=4)
    model.evaluate([1, 2, 3, 0], 0)
    with pytest.raises(ContextOverflow, match="before prefill"):
        measure(model)


@pytest.mark.parametrize(("sizes", "rounds"), [((), 3), ((0, 1), 3), ((1,), 0)])
def test_measuring_nothing_is_refused(sizes, rounds):
    with pytest.raises(ValueError, match="cannot measure"):
        measure(FakeModel(), sizes, rounds)


def test_a_failing_call_leaves_no_tree():
    def fail(n, call):
        raise BackendError("the model failed")

    model = TimedModel(fail)
    with pytest.raises(BackendError):
        measure(model, clock=model.clock)
    with pytest.raises(InvalidRequest, match="parent"):
        FakeModel.decode_tree(model, [0], [0])


def test_the_default_clock_measures_something():
    costs = measure(FakeModel(), (1, 16), rounds=7)
    assert 0 < costs.seconds(1) < costs.seconds(16)
