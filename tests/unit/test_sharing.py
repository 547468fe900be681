"""Costs of calls that sequences share, and the division of a call among them: policies/sharing.py."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.answers.gain import best_parallel
from spec_local.core.proposal import ALONE, ROOT, CallLoad, Limit, Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Distribution, Sampler
from spec_local.engine.engine import Engine
from spec_local.engine.events import Step
from spec_local.engine.request import Request, RequestOptions
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.base import DraftReading, Offer
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Experience
from spec_local.policies.sharing import SharedCalls, SharedCosts
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.testing import FakeContext, FakeModel
from spec_local.verifiers import VERIFIERS
from tests.proposers import adaptive
from tests.unfiltered import unfiltered

LINEAR = {1: 1.0, 2: 1.25, 4: 1.75, 8: 2.75, 16: 4.75, 64: 16.75}
STEP = {1: 1.0, 4: 1.1, 5: 2.0, 8: 2.1, 9: 3.0, 64: 17.0}


# Costs -----------------------------------------------------------------------------------------------------


def test_one_sequence_has_the_costs_of_the_model():
    costs, model = SharedCosts(CostModel(LINEAR)), CostModel(LINEAR)
    assert costs.at().first(40) == pytest.approx(model.first(40))
    for _ in range(2):
        costs.observe(ALONE, 0, 2.0)
        model.observe(1, 2.0)
    expected = [model.seconds(n) for n in (1, 3, 20)]
    assert [costs.at().seconds(n) for n in (1, 3, 20)] == pytest.approx(expected)


@pytest.mark.parametrize("n_parallel", [2, 3, 8])
def test_a_request_sees_its_share_of_a_call_of_all(n_parallel):
    costs, model = SharedCosts(CostModel(LINEAR)).at(CallLoad(n_parallel)), CostModel(LINEAR)
    expected = [model.seconds(n_parallel * n) / n_parallel for n in (1, 2, 4)]
    assert [costs.seconds(n) for n in (1, 2, 4)] == pytest.approx(expected)
    assert costs.first(4)[[1, 2, 4]] == pytest.approx(expected)
    assert costs.shared(6) == pytest.approx([model.seconds(n_parallel + n) for n in range(7)])


def test_draft_tokens_beside_a_prompt_cost_what_they_add_to_its_call():
    costs, model = SharedCosts(CostModel(STEP)).at(CallLoad(1, 7, 1)), CostModel(STEP)
    assert costs.shared(4) == pytest.approx([1.0 + model.seconds(8 + n) - model.seconds(8) for n in range(5)])


def test_shared_calls_correct_the_costs_of_as_many():
    costs, model, load = SharedCosts(CostModel(LINEAR)), CostModel(LINEAR), CallLoad(4)
    before = costs.at(load)
    assert before.plain == pytest.approx(LINEAR[4] / 4)
    for _ in range(3):
        costs.observe(load, 0, 3.5)
    now = costs.at(load).shared(4)
    assert now[0] == pytest.approx(3.5)
    assert now[4] == pytest.approx(2.0 * model.seconds(8))  # all sizes scale with the plain call
    assert before.plain == pytest.approx(LINEAR[4] / 4)  # of the step in which it was taken
    assert costs.at().seconds(1) == pytest.approx(1.0)


def test_calls_that_say_nothing_about_other_calls_are_ignored():
    costs = SharedCosts(CostModel(LINEAR))
    for load in (CallLoad(4, n_read=32), CallLoad(1, n_read=1), CallLoad(1, n_others=1)):
        costs.observe(load, 0, 100.0)
    assert costs.at(CallLoad(4)).shared(0)[0] == pytest.approx(LINEAR[4])
    assert costs.at().seconds(1) == pytest.approx(1.0)


def test_a_plain_call_follows_thirty_two_shared_ones_with_draft_tokens():
    costs, load = SharedCosts(CostModel(LINEAR)), CallLoad(2)
    for _ in range(32):
        assert not costs.at(load).needs_plain
        costs.observe(load, 2, LINEAR[4])
    assert costs.at(load).needs_plain
    assert not costs.at(CallLoad(2, n_read=9)).needs_plain  # it would not show what a plain call costs
    costs.observe(load, 0, LINEAR[2])
    assert not costs.at(load).needs_plain


@pytest.mark.parametrize(
    ("costs", "n_max", "expected"),
    [
        ({1: 1.0, 8: 1.0}, 8, 8),  # free: as many as there is room for
        ({1: 1.0, 8: 8.0}, 8, 1),  # no gain
        ({1: 1.0, 8: 1.0, 16: 2.0}, 16, 8),  # no gain beyond eight
        ({1: 1.0, 8: 1.03, 9: 2.0}, 9, 8),
        ({1: 1.0, 2: 1.92}, 2, 1),  # a gain of 4 % is not worth twice the time for each
    ],
)
def test_best_number_of_sequences(costs, n_max, expected):
    assert best_parallel(CostModel(costs), n_max) == expected


# Division of a call ----------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """A proposal with the probability of each node."""
    n = draw(st.integers(0, 4))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(n)]
    values = []
    for parent in parents:
        share = draw(st.floats(0.05, 1.0))
        values.append(share * (1.0 if parent == ROOT else values[parent]))
    return Proposal(range(n), parents, source="draft", values=values)


def parts(proposal):
    """All sets of nodes that contain the ancestors of each."""
    n = len(proposal.tokens)
    for kept in itertools.product([False, True], repeat=n):
        nodes = [i for i in range(n) if kept[i]]
        if all(proposal.parents[i] == ROOT or kept[proposal.parents[i]] for i in nodes):
            yield nodes


@settings(max_examples=60)
@given(
    st.lists(trees(), min_size=2, max_size=3),
    st.sampled_from([LINEAR, STEP, {1: 1.0, 64: 1.0}, {1: 1.0, 2: 2.0, 64: 64.0}]),
    st.floats(0.0, 1.0),
)
def test_no_division_has_a_higher_expected_rate(proposals, costs, spent):
    main, load = SharedCosts(CostModel(costs)), CallLoad(len(proposals))
    chosen = SharedCalls(lambda: main).choose(proposals, load, spent)
    seconds = main.at(load).shared(12)

    def rate(kept):
        expected = sum(p.values[i] for p, nodes in zip(proposals, kept, strict=True) for i in nodes)
        return (len(proposals) + expected) / (spent + seconds[sum(map(len, kept))])

    tokens = sum(len(p.tokens) for p in chosen)
    value = sum(sum(p.values) for p in chosen)
    found = (len(proposals) + value) / (spent + seconds[tokens])
    best = max(map(rate, itertools.product(*map(list, map(parts, proposals)))))
    assert found == pytest.approx(best)
    for before, after in zip(proposals, chosen, strict=True):
        assert [
            after.path(n) and [after.tokens[i] for i in after.path(n)] for n in range(len(after.tokens))
        ] == [[before.tokens[i] for i in before.path(before.tokens.index(token))] for token in after.tokens]


def test_drawn_tokens_and_those_without_values_are_all_verified():
    """A chain that is verified against q must not be shortened once its tokens are known."""
    q = Distribution(np.arange(4), np.full(4, 0.25))
    drawn = Proposal.chain([1, 2, 3], [q] * 3)
    unknown = Proposal.chain([1, 2, 3])
    valued = Proposal([1, 2, 3], [-1, 0, 1], values=[0.3, 0.1, 0.01], source="draft")
    costs = SharedCosts(CostModel({1: 1.0, 2: 2.0, 64: 64.0}))
    planner = SharedCalls(lambda: costs)
    first, second, third = planner.choose([drawn, unknown, valued], CallLoad(3), 0.0)
    assert first is drawn
    assert second is unknown
    assert not third.tokens
    assert third.source == "draft"


# Never slower than plain decoding --------------------------------------------------------------------------


class TimedShared(FakeContext):
    """Calls advance a clock that several models share."""

    def __init__(self, costs, clock):
        super().__init__(V, 512, 512)
        self._costs, self._clock = CostModel(costs), clock

    def decode(self, calls):
        self._clock[0] += self._costs.seconds(sum(len(call.tokens) for call in calls))
        return super().decode(calls)


V = 16
N_TOKENS = 120
MACHINES = {  # costs of the main and the draft model
    "flat": ({1: 1.0, 8: 1.15, 16: 1.35, 64: 3.6}, {1: 0.1, 16: 0.13, 64: 0.4}),
    "kernels": ({1: 1.0, 4: 1.1, 8: 2.0, 16: 3.6, 64: 13.0}, {1: 0.35, 2: 0.4, 16: 1.5, 64: 4.5}),
    "full at eight": ({1: 1.0, 8: 1.05, 9: 3.0, 16: 9.0, 64: 40.0}, {1: 0.05, 64: 0.05}),
    "linear": (
        {1: 1.0, 2: 1.72, 4: 2.75, 8: 4.9, 16: 5.65, 64: 18.3},
        {1: 0.6, 2: 1.5, 4: 2.0, 16: 3.2, 64: 11.0},
    ),
}


@functools.cache
def answer(n_parallel, machine, noise, n_prompt=3):
    """Generate `N_TOKENS` tokens in each row, after so many others; `noise` None: plain decoding.

    Returns the engine's statistics, and seconds on a virtual clock.
    """
    clock = [0.0]
    main_costs, draft_costs = MACHINES[machine]
    models = []
    for costs, deviation in ((main_costs, 0.0), (draft_costs, noise or 0.0)):
        model = FakeModel(V, noise=deviation, order=2, scale=4.0, n_ctx=300, max_tokens=512, max_logits=512)
        model.context = TimedShared(costs, clock)
        models.append(model)
    now = lambda: clock[0]  # noqa: E731
    shared = SharedCosts(CostModel(main_costs)), CostModel(draft_costs)
    engine = Engine(SharedCalls(lambda: shared[0]), now)
    sampler = Sampler(unfiltered(temperature=0.9))
    for i in range(n_parallel):
        main, small = (model.new_sequence() for model in models)
        policy = adaptive(*shared, Experience(), clock=now)
        draft = DraftModel(small, sampler, Chain("coupled"), n_vocab=V)
        lookups = [SuffixLookup.create(True), PromptLookup.create(True)]
        engine.add(
            Request(
                main,
                [1, i % V, *[3] * (n_prompt - 2)],
                RequestOptions(
                    sampler=sampler,
                    rng=SeededRng(i),
                    proposer=None if noise is None else CombinedProposer(policy, draft, lookups),
                    verifier=VERIFIERS["exact-match"],
                    max_tokens=N_TOKENS,
                    clock=now,
                ),
            )
        )
    n_tokens = 0
    while engine.requests:
        for _, event in engine.step():
            n_tokens += len(event.tokens) if isinstance(event, Step) else 0
    assert n_tokens == N_TOKENS * n_parallel
    return engine.statistics, clock[0]


@pytest.mark.parametrize("machine", ["flat", "kernels", "linear"])
@pytest.mark.parametrize(("n_parallel", "noise"), [(1, 0.05), (3, 8.0), (8, 0.05), (8, 8.0)])
def test_drafting_is_never_slower_than_plain_decoding_of_as_many_rows(machine, n_parallel, noise):
    _, plain = answer(n_parallel, machine, None)
    _, speculative = answer(n_parallel, machine, noise)
    # What is tried and does not pay may take three plain steps of an answer, and 1 % beyond them.
    assert speculative < 1.01 * plain + 3.0 * plain / N_TOKENS
    if machine == "flat" and noise == 0.05:
        assert speculative < (0.6 if n_parallel < 8 else 0.9) * plain


@pytest.mark.parametrize("machine", ["kernels", "linear"])
@pytest.mark.parametrize("noise", [0.05, 8.0])
def test_prompts_are_not_read_for_drafts_that_rows_together_cannot_use(machine, noise):
    """All rows start at once: what counts is that they will share their calls."""
    _, plain = answer(8, machine, None, n_prompt=90)
    _, speculative = answer(8, machine, noise, n_prompt=90)
    assert speculative < 1.01 * plain + 3.0 * plain / N_TOKENS


def test_a_prompt_is_read_for_the_answers_at_the_same_time_not_for_those_there_is_room_for():
    main, draft = (CostModel(costs) for costs in MACHINES["kernels"])
    known, main = Experience(), SharedCosts(main)
    reads = []
    for n_running in (8, 1, 8):
        policy, known.n_tokens = adaptive(main, draft, known), 8
        limit = Limit(8, 8, 1, CallLoad(1, n_running=n_running))
        reads.append(policy.choose(Offer(limit, readings=[DraftReading(20)])).source)
        known.n_tokens = 200
    assert reads == ["none", "draft", "none"]


def test_as_rows_join_each_drafts_less():
    drafted = []
    for n_parallel in (1, 2, 4, 8):
        statistics, _ = answer(n_parallel, "full at eight", 0.05)
        drafted.append(statistics.draft_n / statistics.predicted_n)
    assert sorted(drafted, reverse=True) == drafted
    assert drafted[0] > 0.8
    assert drafted[-1] < 0.05


def test_the_usual_gain_is_that_at_a_number_of_answers():
    main, draft = (CostModel(costs) for costs in MACHINES["kernels"])
    policy = adaptive(main, draft, Experience())
    assert policy._drafting.usual_gain(1) > 0.1
    assert policy._drafting.usual_gain(8) == 0.0
