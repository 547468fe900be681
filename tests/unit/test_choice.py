"""The choice among options: most expected tokens per second."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.policies.choice import ExpectedStep, best_chain, best_prefix
from spec_local.policies.cost_model import CostModel


def test_a_rate_is_tokens_per_second():
    assert ExpectedStep(3.0, 1.5).rate == 2.0


@settings(max_examples=200)
@given(
    values=st.lists(st.floats(0.0, 1.0), max_size=8),
    seconds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9),
)
def test_the_best_prefix_is_the_best_of_all(values, seconds):
    values = sorted(values, reverse=True)
    step = best_prefix(np.array(values), np.array(seconds))
    sizes = range(min(len(values), len(seconds) - 1) + 1)
    rates = [(1.0 + sum(values[:n])) / seconds[n] for n in sizes]
    assert step.rate == pytest.approx(max(rates))
    assert (step.tokens, step.seconds) == (pytest.approx(1.0 + sum(values[: step.n])), seconds[step.n])


def test_of_equals_the_smallest_size_is_taken():
    assert best_prefix(np.array([1.0, 1.0]), np.array([1.0, 2.0, 3.0])).n == 0


def test_sizes_beyond_a_step_in_the_costs_are_considered():
    """One token does not pay, three do."""
    assert best_prefix(np.array([0.9, 0.8, 0.7]), np.array([1.0, 2.0, 2.0, 2.0])).n == 3


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("n_unread", [1, 7])
def test_the_best_chain_is_the_best_of_all_lengths(acceptance, n_unread):
    main, draft = CostModel({1: 1.0, 8: 1.4, 9: 3.0}), CostModel({1: 0.1, 8: 0.3})
    steps = [
        (
            sum(acceptance**i for i in range(n + 1)),
            draft.seconds(n_unread) + (n - 1) * draft.seconds(1) + main.seconds(n + 1),
        )
        for n in range(1, 17)
    ]
    step = best_chain(acceptance, main, draft, 16, n_unread, least=1)
    assert step.rate == pytest.approx(max(tokens / seconds for tokens, seconds in steps))
    assert (step.tokens, step.seconds) == pytest.approx(steps[step.n - 1])
    or_none = best_chain(acceptance, main, draft, 16, n_unread)
    assert or_none.rate == pytest.approx(max(1.0, step.rate))
    assert or_none.n == (step.n if step.rate > 1.0 else 0)


def test_without_a_draft_model_draft_tokens_cost_only_their_verification():
    step = best_chain(0.5, CostModel({1: 1.0, 2: 1.0, 3: 9.0}), None, 2)
    assert (step.tokens, step.seconds, step.n) == (1.5, 1.0, 1)
