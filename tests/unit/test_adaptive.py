"""The adaptive policy step by step: each of its constants has a test that fails if it is halved."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from spec_local.core.proposal import Limit
from spec_local.lookups.base import Candidates
from spec_local.policies import adaptive
from spec_local.policies.adaptive import Adaptive
from spec_local.policies.base import Offer
from spec_local.policies.choice import best_chain
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Experience
from spec_local.policies.planner import Plan
from spec_local.policies.sharing import RowCosts

FLAT = {1: 1.0, 64: 1.0}
FREE = {1: 0.001, 64: 0.064}
LIMIT = Limit(64, 64, 1)


@dataclass
class Output:
    """A draft output whose call read some tokens."""

    n_read: int = 1
    confidence: float = 1.0


class Clock:
    """Seconds that only a test advances."""

    now = 0.0

    def __call__(self):
        return self.now


def make(main=FLAT, draft=FREE, experience=None, **options):
    clock = Clock()
    policy = Adaptive(
        CostModel(main), CostModel(draft) if draft else None, experience, clock=clock, **options
    )
    return policy, clock


def step(policy, clock, offer, n_drafted, n_accepted, seconds=1.0):
    """Run one step with n_drafted tokens from the draft model; return the chosen source."""
    source = policy.choose(offer)
    n = 0
    if source == "draft":
        for _ in range(n_drafted):
            if not policy.should_continue() or not policy.should_draft(Output()):
                break
            n += 1
        n = policy.truncate(n)
    policy.on_drafted()
    clock.now += seconds
    output = [0] * min(n, n_accepted) + [1]
    policy.observe([0] * n, output, n)
    return source


def test_at_most_sixteen_calls_a_step():
    policy, _ = make()
    policy.choose(Offer(LIMIT, n_unread=1))
    n = 0
    while policy.should_continue() and policy.should_draft(Output()):
        n += 1
    assert n == 16


@pytest.mark.parametrize("may_truncate", [False, True])
def test_a_head_may_draft_few_tokens_only(may_truncate):
    policy, _ = make(max_draft=3, may_truncate=may_truncate)
    policy.choose(Offer(LIMIT, n_unread=1))
    n = 0
    while policy.should_continue() and policy.should_draft(Output()):
        n += 1
    assert n == 3


def test_a_head_whose_few_tokens_cannot_repay_a_call_is_not_asked():
    main, draft = {1: 1.0, 2: 2.5, 64: 2.5}, {1: 0.1, 64: 0.1}
    sources = []
    for max_draft in (1, 16):
        experience = Experience()
        policy, _ = make(main, draft, experience, max_draft=max_draft)
        sources.append(policy.choose(Offer(LIMIT, n_unread=1)))
        assert (experience.answers.gain > 0) == (max_draft == 16)
    assert sources == ["none", "draft"]


def test_a_plain_step_follows_thirty_two_speculative_ones():
    policy, clock = make()
    sources = [step(policy, clock, Offer(LIMIT, n_unread=1), 2, 2) for _ in range(33)]
    assert sources == ["draft"] * 32 + ["none"]


def test_after_three_usual_plain_steps_seven_may_be_skipped():
    policy, clock = make(draft=None)
    skippable = []
    for _ in range(4):
        step(policy, clock, Offer(LIMIT), 0, 0)
        skippable.append(policy.n_skippable)
    assert skippable == [0, 0, 7, 7]


def test_an_unusual_step_and_the_one_after_it_are_timed():
    policy, clock = make(draft=None)
    timed = []
    policy._main.observe = lambda n, seconds: timed.append(seconds)
    for seconds in (1.0, 1.0, 1.0, 1.1, 1.1, 3.0, 1.1, 1.1):
        step(policy, clock, Offer(LIMIT), 0, 0, seconds)
    assert timed == pytest.approx([1.0, 1.0, 3.0, 1.1])


def test_one_of_eight_usual_plain_steps_is_timed():
    policy, clock = make(draft=None)
    n_timed = [0]
    policy._main.observe = lambda n, seconds: n_timed.append(1)
    for _ in range(2 + 80):
        step(policy, clock, Offer(LIMIT), 0, 0)
    assert sum(n_timed) == 2 + 10


@pytest.mark.parametrize(("n_read", "observed"), [(64, True), (65, False)])
def test_long_draft_calls_are_not_observed(n_read, observed):
    policy, _ = make()
    observed_sizes = []
    policy._draft.observe = lambda n, seconds: observed_sizes.append(n)
    policy.choose(Offer(LIMIT, n_unread=1))
    policy.should_continue()
    policy.should_draft(Output(n_read))
    assert observed_sizes == [n_read] * observed


@pytest.mark.parametrize(("n_unread", "source"), [(16, "draft"), (17, "none")])
def test_a_trial_reads_at_most_sixteen_tokens(n_unread, source):
    """Unless the rest of the answer is expected to repay more."""
    policy, _ = make(max_tokens=0)
    assert policy.choose(Offer(LIMIT, n_unread=n_unread)) == source
    policy, _ = make()
    assert policy.choose(Offer(LIMIT, n_unread=n_unread)) == "draft"


def test_an_untried_draft_model_is_expected_to_have_85_percent_accepted():
    main, draft = {1: 1.0, 64: 5.0}, {1: 0.1, 64: 1.0}
    experience = Experience()
    make(main, draft, experience)
    step = best_chain(0.85, CostModel(main), CostModel(draft), 16)
    assert experience.answers.gain == pytest.approx(1.0 - 1.0 / step.rate)


@pytest.mark.parametrize(("second", "expected"), [(1.75, True), (1.85, False)])
def test_a_draft_model_is_used_if_it_gains_two_percent_at_95_percent_acceptance(second, expected):
    """A chain of one token generates 1.95 tokens in the time of both calls."""
    main = CostModel({1: 1.0, 2: second, 64: 100.0})
    assert adaptive.could_gain(main, CostModel({1: 0.1, 64: 6.4})) == expected


def test_trees_are_planned_every_sixteen_steps_by_rank(monkeypatch):
    ranks = []

    def plan(acceptance, *_):
        ranks.append(acceptance)
        return Plan((), 1.0, 1.0)

    monkeypatch.setattr(adaptive, "plan", plan)
    policy, clock = make(tree=16)
    for _ in range(32):
        step(policy, clock, Offer(Limit(16, 16, 16), n_unread=1), 1, 1)
    assert len(ranks) == 4  # a tree and a chain, twice
    assert ranks[0] == pytest.approx([0.8, 0.2 * 0.34, 0.2 * 0.14, 0.2 * 0.09])
    assert ranks[1] == pytest.approx([0.8])


def test_trees_are_planned_with_the_costs_of_levels_at_the_current_speed(monkeypatch):
    """They count in proportion to a call of one token; with two rows, a level of one token has two."""
    known = []

    def plan(acceptance, main, draft, *_):
        known.append([draft.seconds(n) for n in (1, 2, 4)])
        return Plan((), 1.0, 1.0)

    monkeypatch.setattr(adaptive, "plan", plan)
    for n_rows, ratios in ((1, [1, 1.5, 2.5]), (2, [1, 5 / 3, 3])):
        draft = RowCosts(CostModel({1: 0.01, 64: 0.01}))
        draft.share(n_rows)
        policy = Adaptive(RowCosts(CostModel(FLAT)), draft, tree=16, levels=CostModel({1: 2.0, 64: 65.0}))
        policy.choose(Offer(Limit(16, 16, 16), n_unread=1))
        tree, chain = known
        assert tree == pytest.approx([0.01 / n_rows * ratio for ratio in ratios])
        assert chain == pytest.approx([0.01 / n_rows] * 3)
        known.clear()


@pytest.mark.parametrize(("speed", "source"), [(1.04, "tree"), (1.02, "draft")])
def test_a_tree_must_be_three_percent_faster_than_a_chain(monkeypatch, speed, source):
    def plan(acceptance, *_):
        return Plan((-1, -1), speed, 1.0) if len(acceptance) > 1 else Plan((-1,), 1.0, 1.0)

    monkeypatch.setattr(adaptive, "plan", plan)
    policy, _ = make(tree=16)
    assert policy.choose(Offer(Limit(16, 16, 16), n_unread=1)) == source


def test_candidates_whose_first_token_cannot_repay_any_length_are_skipped():
    policy, _ = make({1: 1.0, 2: 2.0, 64: 64.0}, None)
    for confidence, pays in ((0.995, False), (0.5, False)):
        assert policy.could_pay(Candidates([5], [-1], [confidence], "suffix")) == pays
    policy, _ = make({1: 1.0, 2: 1.6, 64: 40.0}, None)
    for confidence, pays in ((0.9, True), (0.5, False)):
        assert policy.could_pay(Candidates([5], [-1], [confidence], "suffix")) == pays


def test_drafting_leaves_budget_for_verification():
    """Time spent on draft calls is not left for verification: the chain ends while both fit the budget."""
    policy, clock = make({1: 1.0, 64: 1.3}, {1: 0.3, 64: 3.0})
    policy.choose(Offer(LIMIT, n_unread=1))
    n = 0
    while policy.should_continue():
        clock.now += 0.3
        if not policy.should_draft(Output()):
            break
        n += 1
    assert policy.truncate(n) == n == 7  # 7 × 0.3 + 0.03 is within 2.2 plain steps


def test_gains_of_the_draft_model_are_counted_over_the_best_lookup():
    experience = Experience()
    policy, clock = make(FLAT, FREE, experience)
    candidates = Candidates([0], [-1], [0.99], "suffix")
    for offer in (Offer(LIMIT, n_unread=1), Offer(LIMIT, [candidates], n_unread=1)):
        before = experience.gained or 0.0
        assert step(policy, clock, offer, 4, 4) == "draft"
        gain = experience.gained - before
        assert gain == pytest.approx(4.0 if not offer.candidates else 5.0 / 1.992 - 1.0, abs=0.1)


def test_plain_steps_are_not_charged():
    policy, clock = make(draft=None)
    budget = SimpleNamespace(before=policy._budget.may_lose("draft"))
    for _ in range(100):
        step(policy, clock, Offer(LIMIT), 0, 0)
    assert policy._budget.may_lose("draft") == pytest.approx(budget.before + 0.6)
