"""The loss budget: what speculation may lose, to the hundredth of a plain step."""

import pytest

from spec_local.policies.loss_budget import LossBudget


def test_an_answer_may_lose_its_share_and_then_six_thousandths_of_the_time():
    budget = LossBudget()
    assert budget.may_lose("lookup") == budget.may_lose("draft") == pytest.approx(2.2)
    budget.settle("draft", -2.2, 0.0)
    assert budget.may_lose("draft") == pytest.approx(0.0)
    budget.settle(None, 0.0, 100.0)
    assert budget.may_lose("draft") == budget.may_lose("lookup") == pytest.approx(0.6)


def test_income_fills_the_balance_to_three_plain_steps():
    budget = LossBudget()
    budget.settle(None, 0.0, 1_000_000.0)
    assert budget.may_lose("draft") == pytest.approx(3.0)


def test_gains_may_be_lost_again_by_the_drafter_that_made_them_only():
    budget = LossBudget()
    budget.settle("lookup", 10.0, 0.0)
    assert budget.may_lose("lookup") == pytest.approx(12.2)
    assert budget.may_lose("draft") == pytest.approx(2.2)
    budget.settle("lookup", -11.0, 0.0)
    assert budget.may_lose("lookup") == budget.may_lose("draft") == pytest.approx(1.2)


def test_a_debt_allows_nothing_until_it_is_paid():
    budget = LossBudget()
    budget.settle("draft", -5.0, 0.0)
    assert budget.may_lose("draft") == 0.0
    budget.settle(None, 0.0, 2.8 / 0.006 + 1)
    assert budget.may_lose("draft") == pytest.approx(0.006)


def test_likely_candidates_are_charged_six_times_their_expected_loss():
    budget = LossBudget()
    for p_loss, allowed in ((1.0, 2.2), (0.5, 2.2), (1 / 6, 2.2), (0.05, 2.2 / 0.3), (0.01, 2.2 / 0.06)):
        assert budget.may_lose("lookup", p_loss) == pytest.approx(allowed)
    budget.settle("lookup", -1.0, 0.0, p_loss=0.05)
    assert budget.may_lose("lookup") == pytest.approx(1.9)


def test_an_answer_starts_with_at_least_the_minimum_and_at_most_the_maximum():
    budget = LossBudget()
    budget.settle("draft", -50.0)
    budget.start()
    assert budget.may_lose("draft") == pytest.approx(2.0)
    budget.settle("draft", 50.0)
    budget.start()
    assert budget.may_lose("draft") == budget.may_lose("lookup") == pytest.approx(3.0)


def test_losses_against_outdated_costs_are_forgiven():
    budget = LossBudget()
    budget.settle("draft", -50.0)
    budget.restore()
    assert budget.may_lose("draft") == pytest.approx(2.2)
    budget.settle(None, 0.0, 50.0)
    budget.restore()
    assert budget.may_lose("draft") == pytest.approx(2.5)
