"""The loss budget: what speculation may lose, and what fills it again."""

import pytest

from spec_local.policies.loss_budget import LossBudget

RISK = LossBudget().may_lose("draft")  # what one step may lose at first


@pytest.fixture
def budget():
    return LossBudget()


def exhausted(budget, kind="draft"):
    """Lose all that may be lost at once; returns how much that was."""
    lost = 0.0
    while (risk := budget.may_lose(kind)) > 0.0:
        budget.settle(kind, -risk, 0.0)
        lost += risk
    return lost


def test_all_drafters_lose_from_one_balance_which_time_fills(budget):
    assert budget.may_lose("lookup") == RISK > 1
    assert RISK < exhausted(budget) < 2 * RISK
    assert budget.may_lose("draft") == budget.may_lose("lookup") == 0.0
    budget.settle(None, 0.0, 300.0)
    assert 0 < budget.may_lose("draft") == budget.may_lose("lookup") < 1  # less than a hundredth of the time
    budget.settle(None, 0.0, 1_000_000.0)
    assert budget.may_lose("draft") == RISK < exhausted(budget) <= 2 * RISK


def test_gains_may_be_lost_again_by_the_drafter_that_made_them_only(budget):
    budget.settle("lookup", 10.0, 0.0)
    assert budget.may_lose("lookup") == pytest.approx(RISK + 10)
    assert budget.may_lose("draft") == RISK
    assert exhausted(budget, "lookup") > 10
    assert budget.may_lose("draft") == 0.0


def test_a_debt_allows_nothing_until_it_is_paid(budget):
    budget.settle("draft", -2 * RISK, 0.0)
    budget.settle(None, 0.0, 300.0)
    assert budget.may_lose("draft") == budget.may_invest == 0.0
    budget.settle(None, 0.0, 1000.0)
    assert budget.may_lose("draft") > 0.0 < budget.may_invest


def test_likely_candidates_are_charged_more_than_their_expected_loss_but_not_the_whole(budget):
    usual, likely, certain = (budget.may_lose("lookup", p_loss) for p_loss in (0.5, 0.05, 0.01))
    assert RISK == usual < likely < certain
    budget.settle("lookup", -10.0, 0.0, p_loss=0.01)
    assert exhausted(budget) > exhausted(LossBudget()) - 1


def test_an_answer_starts_with_little_of_what_the_last_ones_gained(budget):
    budget.settle("draft", 50.0)
    budget.start()
    assert budget.may_lose("draft") == budget.may_lose("lookup") == RISK


@pytest.mark.parametrize("n_parallel", [1, 4])
@pytest.mark.parametrize("length", [10, 64, 1000])
def test_however_short_its_answers_a_session_loses_less_than_a_hundredth(length, n_parallel):
    """Every step and every reading loses all that it may; what counts is the time of shared calls."""
    first, lost, elapsed = LossBudget(), 0.0, 0.0
    at_first = LossBudget().may_invest + exhausted(LossBudget())
    budgets = [first, *(first.of_another_answer() for _ in range(n_parallel - 1))]
    while elapsed < 20_000:
        for budget in budgets:
            budget.start()
        for number in range(length):
            for budget in budgets:
                reading = budget.may_invest if number == 0 else 0.0
                budget.invest(reading)
                loss = budget.may_lose("draft")
                budget.settle("draft", -loss, 1.0 + loss, n_parallel=n_parallel)
                lost += reading + loss / n_parallel
                elapsed += reading + (1.0 + loss) / n_parallel
        assert lost <= at_first + 0.1 * n_parallel + 0.01 * elapsed
    assert lost > 0.005 * elapsed


def test_reading_costs_no_step_its_draft_and_gains_repay_it_first(budget):
    reading = budget.may_invest
    budget.invest(reading + 1.0)
    assert (budget.may_lose("draft"), budget.may_invest) == (RISK, 0.0)
    budget.start()
    assert budget.may_invest == 0.0
    budget.invest(1.0)
    budget.settle("draft", 3.0, 0.0)
    budget.start()
    assert 0.0 <= budget.may_invest < 1.0
    assert exhausted(budget) > exhausted(LossBudget())


def test_gains_allow_more_reading_but_not_without_end(budget):
    before = budget.may_invest
    budget.settle("draft", 5.0, 0.0)
    assert budget.may_invest == before  # they may not last
    budget.start()
    more = budget.may_invest
    budget.settle("draft", 1000.0, 0.0)
    budget.start()
    assert before < more < budget.may_invest < 50


def test_models_that_gained_in_earlier_sessions_may_read_at_once(budget):
    before = budget.may_invest
    budget.trust()
    assert budget.may_invest > before


def test_losses_against_outdated_costs_are_forgiven(budget):
    budget.settle("draft", -50.0)
    budget.restore()
    assert budget.may_lose("draft") == RISK
    before = exhausted(budget)
    budget.settle(None, 0.0, 1_000_000.0)
    budget.restore()
    assert exhausted(budget) > before
