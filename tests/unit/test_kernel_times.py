"""Whether a session's calls contradict the times of products that the kernels were chosen with."""

from types import SimpleNamespace

import pytest

from spec_local.calibration.kernel_times import predicted, slower_than_measured
from spec_local.kernels.choice import SIZES, Times
from spec_local.policies.cost_model import CostModel

THEIRS = [1 + 0.5 * (n - 1) for n in SIZES]
FLAT = Times(sizes=SIZES, kernels=[1.0] * len(SIZES), llama_cpp=THEIRS)  # computed by the kernels
STEEP = Times(sizes=SIZES, kernels=[9.0] * len(SIZES), llama_cpp=THEIRS)  # left to llama.cpp
TIMES = {"Q4_K": FLAT, "Q6_K": STEEP}


def model(sizes, **facts):
    return SimpleNamespace(**{"is_on_gpu": False, "n_experts": 0} | facts, bytes_by_type=sizes)


def test_the_prediction_weighs_the_types_by_their_bytes():
    assert predicted(8, {"Q4_K": 100}, TIMES) == pytest.approx(1.0)
    assert predicted(8, {"Q6_K": 7}, TIMES) == pytest.approx(4.5)
    assert predicted(8, {"Q4_K": 2, "Q6_K": 1}, TIMES) == pytest.approx((2 * 1 + 4.5) / 3)


@pytest.mark.parametrize(
    ("of_4", "of_8", "slower"),
    [(1.1, 1.2, False), (2.5, 5.0, True), (1.2, 5.0, False), (0.9, 0.9, False)],
)
def test_larger_calls_that_take_too_long(of_4, of_8, slower):
    costs = CostModel({1: 0.05, 4: 0.05 * of_4, 8: 0.05 * of_8})
    assert slower_than_measured(model({"Q4_K": 95, "F32": 5}), costs, TIMES) is slower
    assert not slower_than_measured(model({"Q6_K": 95}), CostModel({1: 1.0, 4: 2.5, 8: 4.5}), TIMES)


def test_what_cannot_be_predicted_contradicts_nothing():
    slow = CostModel({1: 0.05, 4: 0.2, 8: 0.4})
    sizes = {"Q4_K": 95}
    assert slower_than_measured(model(sizes), slow, TIMES)
    assert not slower_than_measured(model(sizes), slow, {})
    assert not slower_than_measured(model({"Q4_K": 50, "IQ3_S": 50}), slow, TIMES)
    assert not slower_than_measured(model(sizes, is_on_gpu=True), slow, TIMES)
    assert not slower_than_measured(model(sizes, n_experts=8), slow, TIMES)
    assert not slower_than_measured(model(sizes), CostModel({1: 0.05}, {4: 4.0, 8: 8.0}), TIMES)
    assert not slower_than_measured(model(sizes), CostModel({1: 0.05, 8: 0.4}), TIMES)
