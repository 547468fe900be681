"""The speed-up that is expected of a head, for made-up costs."""

from types import SimpleNamespace

import pytest

from spec_local.training.measurement import expected_gain


def gain(seconds, head_seconds, acceptance):
    """The gain of a head, from the seconds of calls with 1, 2, … tokens and of a call of the head."""
    calls = SimpleNamespace(seconds=seconds), SimpleNamespace(seconds=lambda n: head_seconds)
    return expected_gain(calls, acceptance)


def test_the_gain_is_tokens_per_step_over_cost_per_step():
    """0.5 and then 0.8 of the draft tokens are accepted; every token costs 0.1 more, the head 0.05."""
    found = gain(lambda n: 2 * (0.9 + 0.1 * n), 2 * 0.05, [0.5, 0.8])
    tokens, product, best = 1.0, 1.0, []
    for k in range(1, 8):
        product *= 0.5 if k == 1 else 0.8
        tokens += product
        best.append(tokens / (1 + 0.15 * k))
    assert found.cost == pytest.approx(0.05)
    assert found.speedup == pytest.approx(max(best))
    assert found.n_draft == 1 + best.index(max(best)) > 2
    assert found.rate == pytest.approx(max(best) / 2)


def test_a_head_that_costs_more_than_it_brings():
    found = gain(lambda n: float(n), 0.5, [0.5])
    assert (found.n_draft, found.speedup) == (1, pytest.approx(1.5 / 2.5))


def test_there_is_a_limit():
    assert gain(lambda n: 1.0, 0.0, [1.0]).n_draft < 100
