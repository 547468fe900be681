"""The adaptive policy step by step."""

from dataclasses import dataclass

import pytest

from spec_local.core.proposal import EMPTY, Limit, Proposal
from spec_local.policies import drafting
from spec_local.policies.base import DraftReading, Offer
from spec_local.policies.experience import Experience
from spec_local.policies.planner import Plan
from tests.proposers import adaptive

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
    return adaptive(main, draft, experience, clock=clock, **options), clock


def drafted(policy, n_max=64, seconds=0.0, clock=None):
    """Number of tokens that a draft model drafts which is always sure, in calls of some seconds."""
    n = 0
    while n < n_max and policy.wants_call():
        if clock:
            clock.now += seconds
        if not policy.wants_token(Output()):
            break
        n += 1
    return n


def step(policy, clock, offer, n_drafted, n_accepted):
    """Run one step with n_drafted tokens from the draft model; return the chosen source."""
    choice = policy.choose(offer)
    n = drafted(policy, n_drafted) if choice.source == "draft" else 0
    n = len(policy.trim(Proposal.chain([0] * n) if choice.source == "draft" else choice.proposal).tokens)
    clock.now += 1.0
    policy.observe([0] * n, [0] * min(n, n_accepted) + [1], n)
    return choice.source


@pytest.mark.parametrize("may_truncate", [False, True])
def test_a_head_may_draft_few_tokens_only(may_truncate):
    policy, _ = make(max_draft=3, may_truncate=may_truncate)
    policy.choose(Offer(LIMIT, readings=[DraftReading(1)]))
    assert drafted(policy) == 3


def test_a_head_whose_few_tokens_cannot_repay_a_call_is_not_asked():
    main, draft = {1: 1.0, 2: 2.3, 64: 2.3}, {1: 0.1, 64: 0.1}
    sources = []
    for max_draft in (1, 16):
        policy, _ = make(main, draft, max_draft=max_draft)
        sources.append(policy.choose(Offer(LIMIT, readings=[DraftReading(1)])).source)
    assert sources == ["none", "draft"]


def test_plain_steps_between_speculative_ones_show_what_they_cost_now():
    policy, clock = make()
    sources = [step(policy, clock, Offer(LIMIT, readings=[DraftReading(1)]), 2, 2) for _ in range(100)]
    assert 1 <= sources.count("none") <= 5


def test_reading_much_of_a_text_must_be_repaid_by_the_rest_of_the_answer():
    for n_tokens, max_tokens, source in ((8, 8, "none"), (8, None, "draft"), (7, None, "none")):
        policy, _ = make(experience=(known := Experience()), max_tokens=max_tokens)
        known.n_tokens = n_tokens
        assert policy.choose(Offer(LIMIT, readings=[DraftReading(100)])).source == source


@pytest.mark.parametrize(("speed", "source"), [(1.1, "tree"), (0.9, "draft")])
def test_a_tree_must_be_faster_than_a_chain(monkeypatch, speed, source):
    def plan(acceptance, *_):
        return Plan((-1, -1), speed, 1.0) if len(acceptance) > 1 else Plan((-1,), 1.0, 1.0)

    monkeypatch.setattr(drafting, "plan", plan)
    policy, _ = make(tree_nodes=16)
    choice = policy.choose(Offer(Limit(16, 16, 16), readings=[DraftReading(1)]))
    assert choice.source == source
    assert choice.limit == (Limit(1, 2, 16) if source == "tree" else Limit(16, 16, 16))


def test_drafting_leaves_budget_for_verification():
    """Time spent on draft calls is not left for verification: the chain ends while both fit the budget."""
    policy, clock = make({1: 1.0, 64: 1.3}, {1: 0.3, 64: 3.0})
    policy.choose(Offer(LIMIT, readings=[DraftReading(1)]))
    n = drafted(policy, seconds=0.3, clock=clock)
    assert n == 4  # 4 × 0.3 + 0.03 is within 1.5 plain steps
    assert len(policy.trim(Proposal.chain([0] * n)).tokens) == n


def test_gains_of_the_draft_model_are_counted_over_the_best_lookup():
    experience = Experience()
    policy, clock = make(FLAT, FREE, experience)
    candidates = Proposal.chain([0], source="suffix", confidence=[0.99])
    for offer in (
        Offer(LIMIT, readings=[DraftReading(1)]),
        Offer(LIMIT, [candidates], readings=[DraftReading(1)]),
    ):
        before = experience.gained or 0.0
        assert step(policy, clock, offer, 4, 4) == "draft"
        gain = experience.gained - before
        assert gain == pytest.approx(4.0 if not offer.candidates else 5.0 / 1.992 - 1.0, abs=0.1)


def test_plain_steps_are_not_charged():
    experience = Experience()
    policy, clock = make(draft=None, experience=experience)
    experience.budget.settle("draft", -10.0)
    for _ in range(2_000):
        assert step(policy, clock, Offer(LIMIT), 0, 0) == "none"
    assert experience.budget.may_lose("draft") > 0.0


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_tree_of_several_lookups_has_no_more_branches_than_allowed(branches):
    policy, _ = make(draft=None, tree_nodes=16)
    several = [
        Proposal([first, 7, 8], [-1, 0, -1], source="suffix", confidence=[0.9, 0.9, 0.5])
        for first in (1, 2, 3)
    ]
    choice = policy.choose(Offer(Limit(8, 16, branches), several))
    assert choice.source == "lookup"
    parents = choice.proposal.parents
    assert 1 <= len(set(range(len(parents))) - set(parents)) <= branches


@pytest.mark.parametrize("parents", [range(-1, 19), [*range(-1, 19)]], ids=["range", "list"])
def test_a_chain_is_recognized_from_any_sequence_of_parents(parents):
    policy, _ = make(draft=None)
    candidates = Proposal([*range(20)], parents, source="datastore", confidence=[0.95] * 20)
    choice = policy.choose(Offer(Limit(64, 64, 1), [candidates]))
    assert list(choice.proposal.tokens) == [*range(20)]
    assert policy.trim(choice.proposal) == choice.proposal
    assert policy.trim(EMPTY) == EMPTY
