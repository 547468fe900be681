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
    budget.settle(None, 0.0, 300.0)
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


def test_an_answer_starts_with_little_of_what_the_last_ones_gained(budget):
    budget.settle("draft", 50.0)
    budget.start()
    assert START < budget.may_lose("draft") == budget.may_lose("lookup") < 2 * START


@pytest.mark.parametrize("n_rows", [1, 4])
@pytest.mark.parametrize("length", [10, 64, 1000])
def test_however_short_its_answers_a_session_loses_less_than_a_hundredth(length, n_rows):
    """All of what may be lost is lost, again and again, after the first 200 calls."""
    first, lost, elapsed = LossBudget(), 0.0, 0.0
    rows = [first, *(first.of_another_row() for _ in range(n_rows - 1))]
    while elapsed < 20_000:
        for budget in rows:
            budget.start()
        for _ in range(length):
            for budget in rows:
                if (reading := budget.may_invest) > 0:
                    budget.invest(reading / n_rows)
                    lost, elapsed = lost + reading / n_rows, elapsed + reading / n_rows
                loss = budget.may_lose("draft")
                budget.settle("draft", -loss, 1.0 + loss, n_rows=n_rows)
                lost, elapsed = lost + loss / n_rows, elapsed + (1.0 + loss) / n_rows
        assert lost <= max(2 * START, 0.01 * elapsed) + 0.1


def test_reading_costs_no_step_its_draft_and_what_it_loses_is_the_sessions(budget):
    reading = budget.may_invest
    budget.invest(reading + START)
    assert (budget.may_lose("draft"), budget.may_invest) == (START, -START)
    budget.settle("draft", 1.0, 0.0)
    budget.start()
    assert budget.may_lose("draft") == budget.may_lose("lookup") == pytest.approx(1.0)
    assert budget.may_invest == 0.0


def test_gains_allow_more_reading_but_not_without_end(budget):
    before = budget.may_invest
    budget.settle("draft", 5.0, 0.0)
    assert budget.may_invest == before  # they may not last
    budget.start()
    more = budget.may_invest
    budget.settle("draft", 1000.0, 0.0)
    budget.start()
    assert before + 5 <= more < budget.may_invest < 50


def test_losses_against_outdated_costs_are_forgiven(budget):
    budget.settle("draft", -50.0)
    budget.restore()
    assert budget.may_lose("draft") == START
    budget.settle(None, 0.0, 1000.0)
    more = budget.may_lose("draft")
    budget.restore()
    assert budget.may_lose("draft") == more > START
