"""Cost models: which observations count, estimates between and beyond them, and measuring a model."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.calibration.known_costs import SIZES_ON_GPU, agree
from spec_local.calibration.measure import measure, measure_prefill, without_falls
from spec_local.calibration.tuning import SIZES, chain_plans
from spec_local.core.calls import run
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.policies.cost_model import CostModel
from spec_local.testing import FakeModel

F16 = {1: 1.0, 2: 1.17, 4: 1.35, 8: 1.86, 16: 2.7}  # a 1.5B model on two cores, in calls of one token
POSITIVE = st.floats(1e-6, 1e3)
TABLES = st.dictionaries(st.integers(1, 64), POSITIVE, min_size=1, max_size=8)


def table(seconds):
    result = CostModel()
    for n, s in seconds.items():
        result.observe(n, s)
    return result


class TimedModel(FakeModel):
    """A fake model whose calls take `seconds(n tokens, number of the call)`."""

    def __init__(self, seconds, **limits):
        super().__init__(**limits)
        self._seconds, self.now = seconds, 100.0

    def fill(self, call, rows):
        super().fill(call, rows)
        self.now += self._seconds(len(call.tokens), len(self.calls))

    def clock(self):
        return self.now


def test_observed_sizes_have_their_own_time():
    costs = table(dict(reversed(F16.items())))
    assert tuple(costs.costs) == (1, 2, 4, 8, 16)
    assert [costs.seconds(n) for n in F16] == list(F16.values())


def test_estimates_between_and_beyond_observed_sizes():
    costs = table(F16)
    assert costs.seconds(3) == pytest.approx((1.17 + 1.35) / 2)
    assert costs.seconds(5) == pytest.approx(1.35 + (1.86 - 1.35) / 4)
    assert costs.seconds(16 + 30) == pytest.approx(2.7 + 30 * 1.7 / 15)
    assert table({4: 2.0, 8: 3.0}).seconds(1) == 2.0


def test_one_size_alone_is_extrapolated_in_proportion():
    costs = table({4: 2.0})
    assert [costs.seconds(n) for n in (1, 4, 6, 8)] == [2.0, 2.0, 3.0, 4.0]


def test_estimates_beyond_falling_costs_are_constant():
    assert table({1: 3.0, 8: 2.0}).seconds(64) == 2.0


def test_outliers_do_not_count():
    costs = CostModel()
    for n, outlier in [(1, 50.0), (4, 9.0)]:
        for seconds in (n, outlier, n, n, outlier):
            costs.observe(n, float(seconds))
    assert costs.seconds(1) == 1.0
    assert costs.seconds(4) == 4.0


def test_the_lower_of_two_observations_counts():
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


def test_disturbed_calls_count_only_if_they_last():
    """A median does not tolerate five of nine, and a draft model that seems expensive is not timed again."""
    costs = CostModel(F16)
    for seconds in [1.0, *[20.0] * 5, 1.0, *[20.0] * 5, 1.0, *[20.0] * 8]:
        costs.observe(1, seconds)
        assert costs.seconds(1) == 1.0
    costs.observe(1, 20.0)
    assert costs.seconds(1) == 20.0
    costs.observe(1, 1.0)
    assert costs.seconds(1) == 20.0  # one fast call may be an exception
    for _ in range(4):
        costs.observe(1, 1.0)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()))


def test_all_sizes_scale_with_one_token_calls():
    costs = CostModel(F16)
    for _ in range(9):
        costs.observe(1, 3.0)
    assert [costs.seconds(n) for n in F16] == pytest.approx([3 * s for s in F16.values()])
    for _ in range(9):
        costs.observe(1, 0.1)
    assert [costs.seconds(n) for n in F16] == pytest.approx([0.1 * s for s in F16.values()])


def test_calls_are_relative_to_the_one_token_calls_around_them():
    costs = CostModel(F16)
    for n, seconds in [
        (1, 1.0),
        (8, 5.0),
        (1, 2.5),
        (1, 2.5),
    ]:  # the machine slowed down before the call of 8
        costs.observe(n, seconds)
    assert costs.seconds(8) == pytest.approx(F16[8])  # the lower one of 1.86 and 5.0 / 2.5
    for n, seconds in [(1, 1.0), (8, 1.6), (1, 40.0), (1, 1.0), (1, 1.0)]:  # noise after it
        costs.observe(n, seconds)
    assert costs.seconds(8) == pytest.approx(F16[8])
    costs.observe(8, 1.6)
    assert costs.seconds(8) == pytest.approx(1.6)  # relative to the usual time until the next calls are known


def test_calls_without_a_one_token_call_soon_after_are_relative_to_the_last_one():
    costs = CostModel({1: 1.0})
    for _ in range(20):
        costs.observe(8, 2.0)
    costs.observe(1, 4.0)
    costs.observe(1, 4.0)
    costs.observe(1, 4.0)
    assert costs.seconds(1) == 4.0
    assert costs.seconds(8) == 8.0


def test_a_disturbance_right_after_a_call_does_not_make_it_cheaper():
    """Nor other sizes, through what smaller calls imply."""
    costs = table(F16)
    for n, seconds in [(1, 1.0)] * 9 + [(35, 6.3), (1, 25.0), (1, 17.0), (1, 1.0), (1, 1.0)]:
        costs.observe(n, seconds)
    assert costs.seconds(35) == pytest.approx(6.3)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()))


@pytest.mark.parametrize("seed", range(3))
def test_long_noise_does_not_move_costs_far(seed):
    """Rarely observed sizes scale with the others, and must not drift."""
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
            costs = CostModel(costs.costs)  # as written to disk and loaded
            found = costs.first(64)[1:] / (1 + 0.25 * np.arange(1, 65)) / pace
            assert 0.25 < found.min() <= found.max() < 4.0


def test_agreement_does_not_depend_on_the_speed_of_the_machine():
    costs = CostModel(F16)
    assert agree(costs, CostModel({1: 5.0, 8: 5 * 1.5}))
    assert not agree(costs, CostModel({1: 5.0, 8: 5 * 2.7}))
    assert not agree(costs, CostModel({1: 5.0, 8: 5 * 1.3}))


def test_a_wrong_cost_of_one_size_is_corrected_alone():
    costs = table(F16 | {8: 2.6})
    for _ in range(12):
        for n, seconds in F16.items():
            costs.observe(n, seconds)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()), rel=0.01)


def test_a_size_costs_no_more_than_others_imply():
    assert table({1: 30.0, 2: 1.2, 4: 1.4}).seconds(1) == 1.2
    assert table({1: 1.0, 4: 90.0, 8: 2.0}).seconds(4) == pytest.approx(3.2)
    assert table({1: 1.0, 2: 1.2, 8: 90.0}).seconds(8) == pytest.approx(4 * 1.2 * 1.6)
    q8_0 = {1: 1.0, 2: 2.91, 4: 3.95, 7: 6.3, 8: 4.16, 16: 6.38}  # real measurements stay unchanged
    assert [table(q8_0).seconds(n) for n in q8_0] == pytest.approx(list(q8_0.values()))


@given(TABLES, st.integers(1, 100))
def test_all_sizes_at_once(seconds, n):
    costs = table(seconds)
    first = costs.first(n)
    assert first[0] == 0
    assert first[1:].tolist() == pytest.approx([costs.seconds(i) for i in range(1, n + 1)])
    costs.observe(1, 1e-9)
    assert costs.first(n)[1] == pytest.approx(costs.seconds(1))


@given(st.lists(st.tuples(st.integers(1, 64), POSITIVE), min_size=1, max_size=60))
def test_costs_can_be_saved_and_loaded(calls):
    costs = CostModel()
    for n, seconds in calls:
        costs.observe(n, seconds)
    again = CostModel(costs.costs)
    assert list(again.costs) == list(costs.costs)
    assert [again.seconds(n) for n in again.costs] == pytest.approx(list(costs.costs.values()))


ESTIMATES = {2: 1.2, 4: 1.5, 8: 2.5, 64: 16.0}


def test_estimates_count_until_a_size_is_observed():
    costs = CostModel({1: 2.0}, ESTIMATES)
    assert [costs.seconds(n) for n in (1, *ESTIMATES)] == pytest.approx([2.0, 2.4, 3.0, 5.0, 32.0])
    assert costs.estimates == ESTIMATES
    costs.observe(8, 5.0)  # as estimated
    assert [costs.seconds(n) for n in ESTIMATES] == pytest.approx([2.4, 3.0, 5.0, 32.0])
    assert costs.estimates == {2: 1.2, 4: 1.5, 64: 16.0}
    for seconds in (2.0, 2.0, *[1.0] * 9):
        costs.observe(1, seconds)  # estimates follow the speed of the machine, too
    assert costs.seconds(4) == pytest.approx(1.5)
    costs.drop_estimates()
    assert list(costs.costs) == [1, 8]


@pytest.mark.parametrize(("excess", "error"), [(3.0, 2.0), (0.75, 0.5), (60.0, 3.0), (0.0, 1 / 3)])
def test_an_error_of_an_estimate_corrects_those_near_it(excess, error):
    costs = CostModel({1: 1.0}, ESTIMATES)
    costs.observe(8, 1.0 + excess)
    assert costs.seconds(4) == pytest.approx(1.0 + error**0.7 * 0.5)
    assert costs.seconds(64) == pytest.approx(1.0 + error ** (0.7**3) * 15.0)


def test_costs_without_observations_are_unknown():
    with pytest.raises(ValueError, match="unknown"):
        CostModel().seconds(1)


@pytest.mark.parametrize(("n", "seconds"), [(0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_invalid_observations_are_rejected(n, seconds):
    costs = CostModel()
    with pytest.raises(ValueError, match="cannot take"):
        costs.observe(n, seconds)
    assert costs.costs == {}


def test_the_cost_of_no_tokens_is_unknown():
    with pytest.raises(ValueError, match="unknown"):
        table(F16).seconds(0)


@given(TABLES, st.integers(1, 200))
def test_estimates_lie_between_neighbouring_sizes(seconds, n):
    rising = dict(zip(sorted(seconds), sorted(seconds.values()), strict=True))
    costs = table(rising)
    known = [costs.seconds(size) for size in sorted(rising)]  # implausible ones are reduced
    estimate = costs.seconds(n)
    below = [s for size, s in zip(sorted(rising), known, strict=True) if size <= n][-1:]
    above = [s for size, s in zip(sorted(rising), known, strict=True) if size >= n][:1]
    assert estimate >= min(below + above) * (1 - 1e-12)
    if above:
        assert estimate <= max(below + above) * (1 + 1e-12)
    assert all(k <= s * (1 + 1e-12) for k, s in zip(known, rising.values(), strict=True))


@given(TABLES)
def test_estimates_rise_if_costs_rise(seconds):
    rising = dict(zip(sorted(seconds), sorted(seconds.values()), strict=True))
    costs = table(rising)
    estimates = [costs.seconds(n) for n in range(1, 100)]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(estimates))


@pytest.mark.parametrize("history", [[], [3, 1, 4]])
def test_measuring_keeps_the_history_and_leaves_no_tree(history):
    model = TimedModel(lambda n, call: F16.get(n, 0.0), max_branches=1)
    if history:
        run(model.call(history, n_logits=0))
    run(model.call([5], [-1]))
    costs = measure(model, tuple(F16), clock=model.clock)
    assert [costs.seconds(n) for n in F16] == pytest.approx(list(F16.values()))
    assert list(model.cached) == history
    with pytest.raises(InvalidRequest, match="parent"):
        run(model.call([0], [0]))  # no node 0


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


def test_measuring_respects_its_budget_and_starts_with_the_first_sizes():
    model = TimedModel(lambda n, call: 1.0)
    costs = measure(model, (1, 2, 4, 8, 16, 3), rounds=3, budget=6.5, clock=model.clock)
    assert tuple(costs.costs) == (1, 2, 4, 8, 16)
    assert tuple(measure(model, (1, 2, 4, 8), rounds=3, budget=0.0, clock=model.clock).costs) == (1, 2, 4)


def test_a_measurement_can_be_stopped():
    model = TimedModel(lambda n, call: 1.0)
    costs = measure(model, (1, 2, 4, 8), clock=model.clock, stopped=lambda: len(model.calls) >= 4)
    assert model.calls == [1, 4, 1, 2] or model.calls == [4, 1, 1, 2]
    assert list(costs.costs) == [1, 2]


def disturbed(costs, slow, until):
    """Seconds of calls; those of some sizes take six times as long up to the call of a number."""
    return lambda n, call: costs[n] * (6.0 if n in slow and call <= until else 1.0)


def measured(seconds, sizes, **options):
    """The costs after three rounds, the sizes that were measured again, and what was logged."""
    model, lines = TimedModel(seconds, max_tokens=64, max_logits=64), []
    costs = measure(model, sizes, 3, clock=model.clock, log=lines.append, **options)
    return costs, model.calls[2 + 3 * len(sizes) :], lines


STEPS = {1: 1.0, 4: 1.4, 8: 2.0, 16: 3.0, 64: 8.0}


@pytest.mark.parametrize(("until", "n_again"), [(17, 1), (19, 2), (23, 3), (1, 0)])
def test_sizes_slower_than_larger_ones_are_measured_again(until, n_again):
    """A disturbance that only hits calls of 8 tokens, of which there are three among the first 17."""
    costs, again, lines = measured(disturbed(STEPS, {8}, until), tuple(STEPS))
    assert again == [1, 8] * 3 * n_again
    assert [costs.seconds(n) for n in STEPS] == pytest.approx(list(STEPS.values()))
    assert lines == [
        f"the times of 1 of 5 call sizes are unclear: measuring them again ({n} of at most 3)"
        for n in range(1, n_again + 1)
    ]


def test_what_remains_impossible_is_reduced():
    costs, again, lines = measured(disturbed(STEPS, {8, 64}, 1000), tuple(STEPS))
    assert again == [1, 8] * 9
    assert costs.seconds(8) == STEPS[16]  # not 6 · 2
    assert [costs.seconds(n) for n in (1, 4, 16)] == pytest.approx([STEPS[n] for n in (1, 4, 16)])
    assert len(lines) == 4
    assert lines[-1].startswith(
        "calls of 8 tokens still seem slower than calls of twice as many, which is impossible"
    )
    assert "\n" not in "".join(lines)


def test_repetitions_are_bounded_by_the_budget():
    seconds = disturbed(STEPS, {8}, 1000)
    whole = 3 * sum(seconds(n, 1) for n in STEPS)
    _, again, lines = measured(seconds, tuple(STEPS), budget=whole + 30)
    assert 2 <= len(again) < 6
    assert len(lines) == 2
    assert not measured(seconds, tuple(STEPS), budget=whole - 1)[1]


def test_kernels_with_tiles_may_be_slower_with_a_few_tokens_less():
    q8_0 = {1: 1.0, 2: 2.91, 4: 3.95, 7: 6.3, 8: 4.16, 16: 6.38}
    costs, again, lines = measured(lambda n, call: q8_0[n], tuple(q8_0), precision=0.1)
    assert again == [1, 7] * 9
    assert [costs.seconds(n) for n in q8_0] == pytest.approx(list(q8_0.values()))
    assert len(lines) == 3  # the times are steady, and nothing is impossible


def test_imprecise_times_are_measured_again():
    def noisy(until):
        return lambda n, call: STEPS[n] * (1 + 0.25 * (call % 4) * (n == 16 and call <= until))

    costs, again, lines = measured(noisy(17), tuple(STEPS), precision=0.1)
    assert again[:2] == [1, 16]
    assert len(again) < 18
    assert costs.seconds(16) == STEPS[16]
    assert "close other programs" not in "".join(lines)
    costs, again, lines = measured(noisy(1000), tuple(STEPS), precision=0.05)
    assert len(again) == 18
    assert lines[-1].startswith("equal calls still take different times")
    assert measured(noisy(1000), tuple(STEPS))[1:] == ([], [])  # a quick measurement is not precise


def test_costs_without_falls():
    assert without_falls({1: 2.0, 8: 3.0, 12: 2.5, 64: 1.5}) == {1: 1.5, 8: 1.5, 12: 1.5, 64: 1.5}
    assert without_falls({8: 3.0, 1: 1.0, 7: 4.0, 15: 3.5}) == {1: 1.0, 7: 3.5, 8: 3.0, 15: 3.5}
    assert without_falls({7: 4.0, 8: 3.0}, {7}) == {7: 3.0, 8: 3.0}


@given(TABLES)
def test_twice_as_many_tokens_are_never_faster(seconds):
    costs = without_falls(seconds)
    assert list(costs) == sorted(seconds)
    for n, m in itertools.combinations(costs, 2):
        assert costs[n] <= seconds[n]
        assert m < 2 * n or costs[n] <= costs[m]
    assert without_falls(costs) == costs
    smooth = list(without_falls(seconds, seconds).values())
    assert smooth == sorted(smooth)


# Kernels for up to eight tokens, and others, in calls of one token.
JUMP = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 9: 2.2, 16: 2.3, 32: 3.4, 65: 6.0}


@pytest.mark.parametrize(("sizes", "budget"), [(SIZES, math.inf), (SIZES_ON_GPU, 1.5)])
@pytest.mark.parametrize(("rate", "longest"), [(0.8, 7), (0.9, 7), (0.99, 16)])
def test_a_jump_between_kernels_is_where_it_is(sizes, budget, rate, longest):
    """Drafts end before it, unless they are good enough for the kernels beyond."""

    def seconds(n, call=0):
        return 0.05 * float(np.interp(n, list(JUMP), list(JUMP.values())))

    model = TimedModel(seconds, max_tokens=65, max_logits=65)
    costs = measure(model, sizes, budget=budget, clock=model.clock)
    assert [costs.seconds(n) for n in range(1, 17)] == pytest.approx([seconds(n) for n in range(1, 17)])
    (plan,) = chain_plans(costs, CostModel({1: 0.0001}), [rate])
    assert len(plan.parents) == longest


# Measured on lavapipe, in processor time: 1 to 16 tokens of an F16 model, whose kernels change at 2 and at 9.
LAVAPIPE = (1.0, 2.76, 2.95, 3.57, 4.27, 4.96, 6.2, 6.14, 6.38, 6.94, 7.21, 7.48, 7.85, 8.55, 9.02, 8.99)


@pytest.mark.parametrize("sizes", [SIZES, SIZES_ON_GPU])
def test_sizes_between_those_that_are_timed_cost_what_they_take(sizes):
    model = TimedModel(lambda n, call: LAVAPIPE[n - 1] if n <= 16 else 0.56 * n, max_tokens=65, max_logits=65)
    costs = measure(model, sizes, clock=model.clock)
    assert [costs.seconds(n) for n in range(1, 17)] == pytest.approx(LAVAPIPE, rel=0.12)


def test_measuring_one_row_of_logits():
    model = TimedModel(lambda n, call: F16.get(n, 2.0), max_logits=1)
    assert tuple(measure(model, tuple(F16), n_logits=1, clock=model.clock).costs) == tuple(F16)
    assert tuple(measure(model, tuple(F16), clock=model.clock).costs) == (1,)


class ExpertsModel(TimedModel):
    """Calls take as many seconds as they have different tokens: each token uses an expert of its own."""

    def fill(self, call, rows):
        super().fill(call, rows)
        self.now += len(set(call.tokens))


def test_calls_evaluate_the_given_text():
    text = [*range(40), *range(20)]  # its last tokens were there before
    model = ExpertsModel(lambda n, call: 0.0, n_vocab=40, max_tokens=64, max_logits=64)
    costs = measure(model, (1, 2, 8, 64), text=text, clock=model.clock)
    assert [costs.seconds(n) for n in (1, 2, 8, 64)] == [1.0, 2.0, 8.0, 40.0]
    assert measure_prefill(model, text, model.clock) == pytest.approx(64 / 40)
    repeated = measure(model, (1, 2, 8, 64), clock=model.clock)
    assert repeated.seconds(64) == 1.0


def test_prompt_processing_speed():
    model = TimedModel(lambda n, call: 3.0 if call == 1 else 0.5, max_tokens=8)
    assert measure_prefill(model, clock=model.clock) == 16
    assert list(model.cached) == []
    run(model.call([1, 2, 3], n_logits=0))
    measure_prefill(model, clock=model.clock)
    assert list(model.cached) == [1, 2, 3]
    full = FakeModel(n_ctx=2)
    run(full.call([1, 2], n_logits=0))
    with pytest.raises(ContextOverflow, match="no room"):
        measure_prefill(full)


class AsynchronousModel(TimedModel):
    """As on a GPU: reading logits waits for this call, and for those before it."""

    late = 0.0

    def fill(self, call, rows):
        started = self.now
        super().fill(call, rows)
        self.late += self.now - started
        self.now = started
        if call.n_logits:
            self.now, self.late = started + self.late, 0.0


def test_prompt_processing_on_a_gpu_is_timed_to_its_end():
    model = AsynchronousModel(lambda n, call: 0.5, max_tokens=8)
    assert measure_prefill(model, clock=model.clock) == 16


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"max_tokens": 6}, (1, 2, 3, 4, 5, 6)),
        ({"max_logits": 3}, (1, 2, 3)),
        ({"n_ctx": 15}, (1, 2, 3, 4, 5)),  # 10 tokens are used
        ({"n_ctx": 11}, (1,)),
        ({"max_branches": 1, "max_logits": 64}, (1, 2, 3, 4, 5, 8, 16, 32)),
    ],
)
def test_measuring_respects_limits(limits, sizes):
    model = TimedModel(lambda n, call: 1.0, **limits)
    for _ in range(5):
        run(model.call([1, 2], n_logits=0))
    assert tuple(measure(model, clock=model.clock).costs) == sizes


def test_measuring_needs_room():
    model = FakeModel(n_ctx=4)
    run(model.call([1, 2, 3, 0], n_logits=0))
    with pytest.raises(ContextOverflow, match="before prefill"):
        measure(model)


@pytest.mark.parametrize(("sizes", "rounds"), [((), 3), ((0, 1), 3), ((1,), 0)])
def test_measuring_nothing_is_rejected(sizes, rounds):
    with pytest.raises(ValueError, match="cannot measure"):
        measure(FakeModel(), sizes, rounds)


def test_a_failing_call_leaves_no_tree():
    def fail(n, call):
        raise BackendError("the model failed")

    model = TimedModel(fail)
    with pytest.raises(BackendError):
        measure(model, clock=model.clock)
    with pytest.raises(InvalidRequest, match="parent"):
        run(FakeModel.call(model, [0], [0]))


def test_the_default_clock():
    costs = measure(FakeModel(), (1, 16), rounds=7)
    assert 0 < costs.seconds(1) < costs.seconds(16)
