"""The acceptance model: calibrated confidence, a recent rate whose evidence decays, and what teaches them."""

import numpy as np
import pytest

from spec_local.core.proposal import ROOT, Proposal
from spec_local.policies.acceptance_model import AcceptanceModel, Calibration, RecentRate, outcomes


def test_calibration_starts_at_its_prior_and_bins_begin_at_their_edges():
    calibration = Calibration((0.3, 0.6), (0.2, 0.5, 0.8))
    assert [calibration.rate(x) for x in (0.0, 0.29, 0.3, 0.59, 0.6, 1.0)] == [0.2, 0.2, 0.5, 0.5, 0.8, 0.8]
    for i in range(50):
        calibration.observe((0.1, 0.4, 0.9)[i % 3], i % 4 > 0)
    xs = np.array([0.0, 0.3, 0.5, 0.9])
    assert calibration.rates(xs).tolist() == [calibration.rate(x) for x in xs]


@pytest.mark.parametrize("accepted", [True, False])
def test_calibration_follows_what_is_observed(accepted):
    """Most in the bin of the observation, and never to certainty."""
    calibration, before = Calibration((0.5,), (0.5, 0.5)), (0.5, 0.5)
    moved = []
    for _ in range(500):
        calibration.observe(0.7, accepted)
        after = calibration.rate(0.1), calibration.rate(0.7)
        assert 0 < min(after) <= max(after) < 1
        moved.append([abs(a - b) for a, b in zip(after, before, strict=True)])
    assert moved[0][1] < moved[9][1] < moved[-1][1]
    assert moved[-1][0] < moved[-1][1]
    assert abs(calibration.rate(0.7) - accepted) < 0.12


def test_calibration_estimates_frequencies_and_forgets():
    calibration = Calibration((0.5,), (0.5, 0.5), memory=40.0)
    generator = np.random.default_rng(0)
    for rate in (0.9, 0.2):
        found = []
        for _ in range(600):
            calibration.observe(0.9, bool(generator.random() < rate))
            found.append(calibration.rate(0.9))
        assert np.mean(found[100:]) == pytest.approx(rate, abs=0.05)


@pytest.mark.parametrize("prior", [(), (0.5,), (0.5, 0.5, 0.5)])
def test_calibration_needs_a_prior_for_each_bin(prior):
    with pytest.raises(ValueError, match="2 bins"):
        Calibration((0.5,), prior)


def test_a_recent_rate_is_a_beta_distribution():
    rate = RecentRate(4.0, 1.0, memory=1e9)
    assert rate.mean == pytest.approx(0.8)
    assert rate.upper == pytest.approx(0.8 + np.sqrt(0.8 * 0.2 / 6.0))
    for accepted in (True, False, False):
        rate.observe(accepted)
    assert rate.mean == pytest.approx(5.0 / 8.0)
    assert rate.upper == pytest.approx(5.0 / 8.0 + np.sqrt(15.0 / 64.0 / 9.0))


def test_a_recent_rate_remembers_so_many_observations():
    rate = RecentRate(4.0, 1.0, memory=32.0)
    for _ in range(1_000):
        rate.observe(False)
    assert rate.mean == pytest.approx(4.0 / (5.0 + 32.0))


def test_evidence_decays_while_nothing_is_observed():
    """So a draft model that disappointed is tried again: after 128 plain steps evidence counts 1/e."""
    rate = RecentRate(4.0, 1.0, memory=32.0)
    for _ in range(1_000):
        rate.observe(False)
    low = rate.upper
    rate.forget(128)
    assert rate.mean == pytest.approx(4.0 / (5.0 + 32.0 / np.e), rel=0.01)
    rate.forget(2_000)
    assert low < 0.2 < 0.95 < rate.upper == pytest.approx(RecentRate(4.0, 1.0, 32.0).upper)


def test_draft_tokens_after_a_rejection_are_not_observed():
    model = AcceptanceModel()
    model.observe_draft([1, 2, 3], [1, 9, 3], [0.99, 0.7, 0.1])
    fresh = AcceptanceModel()
    fresh.draft.observe(0.99, True)
    fresh.draft.observe(0.7, False)
    xs = np.linspace(0, 1, 30)
    assert model.draft.rates(xs).tolist() == fresh.draft.rates(xs).tolist()
    assert model.recent.mean == pytest.approx((4.0 + 31 / 32) / (5.0 + 63 / 32))


def test_recycling_observes_one_outcome_for_each_node_reached():
    """The likeliest child of each accepted node, over about a thousand tokens."""
    model = AcceptanceModel()
    tree = Proposal([1, 2, 3, 4], [ROOT, ROOT, 0, 0], source="recycling", confidence=[0.5, 0.3, 0.5, 0.2])
    model.observe_lookups([tree], [1, 3, 7])
    assert model.recycled.mean == pytest.approx(4.0 / 7.0, rel=1e-3)
    model.observe_lookups([tree], [2, 3])
    assert model.recycled.mean == pytest.approx(4.0 / 8.0, rel=1e-3)
    for _ in range(20_000):
        model.recycled.observe(False)
    assert model.recycled.mean == pytest.approx(2.0 / 1_005.0, rel=0.01)


@pytest.mark.parametrize(
    ("parents", "output", "expected"),
    [
        (range(-1, 2), [1, 2, 3], [(0, True), (1, True), (2, True)]),
        (range(-1, 2), [1, 9, 3], [(0, True), (1, False)]),
        (range(-1, 2), [1], [(0, True)]),  # what would have followed is unknown
        (range(-1, 2), [9], [(0, False)]),
        ([ROOT, ROOT, 1], [2, 3], [(0, False), (1, True), (2, True)]),
        ([ROOT, ROOT, 1], [2], [(0, False), (1, True)]),
        ([ROOT, ROOT, 1], [9, 3], [(0, False), (1, False)]),
    ],
)
def test_outcomes_of_candidates(parents, output, expected):
    assert list(outcomes(Proposal([1, 2, 3], parents, source="x", confidence=[0.5] * 3), output)) == expected
