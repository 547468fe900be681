"""The loss budget: what speculation may lose, and what fills it again."""

import pytest

from spec_local.policies.loss_budget import LossBudget

START = LossBudget().may_lose("draft")


@pytest.fixture
def budget():
    return LossBudget()


def test_all_drafters_lose_from_one_balance_which_time_fills(budget):
    assert budget.may_lose("lookup") == START > 1
    budget.settle("draft", -START, 0.0)
    assert budget.may_lose("draft") == budget.may_lose("lookup") == pytest.approx(0.0)
    budget.settle(None, 0.0, 100.0)
    assert 0 < budget.may_lose("draft") == budget.may_lose("lookup") < 1  # less than a hundredth of the time
    budget.settle(None, 0.0, 1_000_000.0)
    assert START < budget.may_lose("draft") < 2 * START


def test_gains_may_be_lost_again_by_the_drafter_that_made_them_only(budget):
    budget.settle("lookup", 10.0, 0.0)
    assert budget.may_lose("lookup") == pytest.approx(START + 10)
    assert budget.may_lose("draft") == START
    budget.settle("lookup", -11.0, 0.0)
    assert budget.may_lose("lookup") == budget.may_lose("draft") == pytest.approx(START - 1)


def test_a_debt_allows_nothing_until_it_is_paid(budget):
    budget.settle("draft", -START - 2, 0.0)
    budget.settle(None, 0.0, 100.0)
    assert budget.may_lose("draft") == 0.0
    budget.settle(None, 0.0, 1000.0)
    assert budget.may_lose("draft") > 0.0


def test_likely_candidates_are_charged_more_than_their_expected_loss_but_not_the_whole(budget):
    usual, likely, certain = (budget.may_lose("lookup", p_loss) for p_loss in (0.5, 0.05, 0.01))
    assert START == usual < likely < certain
    budget.settle("lookup", -1.0, 0.0, p_loss=0.05)
    assert START - 1 < budget.may_lose("lookup") < START - 0.05


@pytest.mark.parametrize("gain", [-50.0, 50.0])
def test_an_answer_starts_without_the_gains_and_debts_of_the_last(budget, gain):
    budget.settle("draft", gain)
    budget.start()
    assert budget.may_lose("draft") == budget.may_lose("lookup") == pytest.approx(START, rel=0.5)


def test_losses_against_outdated_costs_are_forgiven(budget):
    budget.settle("draft", -50.0)
    budget.restore()
    assert budget.may_lose("draft") == START
    budget.settle(None, 0.0, 50.0)
    more = budget.may_lose("draft")
    budget.restore()
    assert budget.may_lose("draft") == more > START
