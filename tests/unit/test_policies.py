"""Draft-length policies: they keep the main model's distribution, and decide what pays."""

import functools
import itertools
import random
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.proposal import EMPTY, Limit
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.events import Finished, Step
from spec_local.errors import InvalidRequest
from spec_local.lookups.prompt_lookup import PromptLookup
from spec_local.lookups.recycling import Recycling
from spec_local.lookups.suffixes import SuffixLookup
from spec_local.policies.base import NOTHING, Confidence, Decision, DraftReading, Offer, Policy, PolicyOptions
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Experience
from spec_local.policies.loss_budget import LossBudget
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import Coupled, Drawn
from spec_local.settings import GenerationSettings
from spec_local.testing import FakeModel, decode, enumerate_outcomes
from spec_local.verifiers import VERIFIERS
from tests import proposers
from tests.unfiltered import unfiltered

GREEDY, FREE = SamplingSettings(temperature=0), unfiltered()

FLAT = {1: 1.0, 64: 1.3}  # seconds by tokens of a call: many cost hardly more than one
STEEP = {1: 1.0, 64: 64.0}  # nothing is gained by asking for two at once
JUMPY = {1: 1.0, 2: 2.6, 3: 1.1, 4: 3.5, 5: 1.5, 64: 9.0}
CHEAP = {1: 0.05, 64: 1.0}


@pytest.fixture(autouse=True, scope="module")
def _remember(cached_distributions):
    pass


@functools.cache
def known_costs(items):
    """Costs that nobody changes: computing them takes longer than a step."""
    return CostModel(dict(items))


class TimedModel(FakeModel):
    """A fake model whose calls take the seconds of its cost model, on the clock of its world."""

    def __init__(self, world, costs, n_vocab, noise=0.0):
        super().__init__(n_vocab, seed=2, scale=1.0, noise=noise, max_logits=65, max_tokens=128, n_ctx=2_000)
        self._world, self.costs = world, costs

    def fill(self, call, rows):
        self._world.now += self.costs.seconds(len(call.tokens))
        super().fill(call, rows)


class World:
    """A main model, a draft model more or less like it, lookups, and a policy.

    Args:
        policy: creates it from this world and `may_truncate`.
        main, draft: seconds a call, by number of tokens.
        how, rule: how draft tokens are drawn, and what verifies them.
        lookup: minimum tokens of a match; 0: no lookup.
        several: whether lookups of all kinds propose together, and trees.
        tree: the draft model's shape in steps in which the policy chooses a tree.
    """

    def __init__(
        self, policy, main=FLAT, draft=CHEAP, how="coupled", rule="exact-match", *, sampling=GREEDY,
        noise=0.3, n_vocab=8, lookup=1, several=False, may_truncate=None, tree=None,
    ):  # fmt: skip
        self.now = 0.0
        self.costs = tuple(CostModel(costs) for costs in (main, draft))
        self.main, self.draft = (
            TimedModel(self, known_costs(tuple(costs.items())), n_vocab, level)
            for costs, level in ((main, 0.0), (draft, noise))
        )
        self._sampler, self._rule = Sampler(sampling), rule
        # As in assembly.py: a chain that is verified against q must be as long as it was drawn.
        drawn = how == "drawn" and sampling.temperature > 0
        self.policy = policy(self, not drawn if may_truncate is None else may_truncate)
        chain = DraftModel(self.draft, self._sampler, Chain(how), n_vocab=n_vocab)
        lookups = [PromptLookup(longest=3 if lookup == 1 else 8, shortest=lookup)] if lookup else []
        if several:
            lookups += [SuffixLookup(shortest=1), Recycling()]
        self.proposer = CombinedProposer(
            self.policy, chain, lookups, tree, branches=4 if several else 1, nodes=6
        )

    def generate(self, prompt, n=60, draft_max=64, rng=None):
        """Return the tokens of an answer, and its statistics."""
        output, event = [], None
        for event in decode(
            self.main,
            prompt,
            sampler=self._sampler,
            rng=rng or SeededRng(0),
            proposer=self.proposer,
            verifier=VERIFIERS[self._rule],
            draft_max=draft_max,
            max_tokens=n,
            clock=lambda: self.now,
        ):
            output += event.tokens if isinstance(event, Step) else []
        assert isinstance(event, Finished)
        return output, event.statistics


def plain(prompt, n, sampling=GREEDY, rng=None):
    main, output = FakeModel(8, seed=2, scale=1.0, n_ctx=2_000), []
    for event in decode(main, prompt, sampler=Sampler(sampling), rng=rng or SeededRng(0), max_tokens=n):
        output += event.tokens if isinstance(event, Step) else []
    return output


def adaptive(world, may_truncate, experience=None, tree=0):
    return proposers.adaptive(
        *world.costs, experience, may_truncate=may_truncate, tree_nodes=tree, clock=lambda: world.now
    )


class RandomPolicy(Policy):
    """Decides at random; any change in its input changes the decisions."""

    def __init__(self, world, may_truncate, seed=0):
        super().__init__(PolicyOptions(may_truncate))
        self._seen = seed  # a checksum

    def _see(self, *facts):
        self._seen = zlib.crc32(repr(facts).encode(), self._seen)

    def _random(self, n, *facts):
        self._see(*facts)
        return random.Random(self._seen).randrange(n)

    def choose(self, offer):
        lookup = super().choose(replace(offer, readings=()))
        drafting = Decision("draft")
        choices = (NOTHING, lookup if offer.candidates else drafting, drafting, drafting)
        self._source = choices[n := self._random(4, offer)].source
        return choices[n]

    def wants_call(self):
        return self._random(4) > 0

    def wants_token(self, output):
        return self._random(4, output.confidence) > 0

    def trim(self, proposal):
        n = len(proposal.tokens)
        if self._source != "draft" or not self.may_truncate:
            return proposal
        return proposal.first(self._random(n + 1, n))

    def observe(self, drafted, output, n_verified):
        self._see(tuple(drafted), tuple(output), n_verified)


class LateDropping(Policy):
    """Drops all draft tokens if the draft model is unsure of the second: that favours some first tokens."""

    def __init__(self, world, may_truncate):
        super().__init__(PolicyOptions(may_truncate))

    def choose(self, offer):
        self._confidence = []
        return super().choose(offer)

    def wants_token(self, output):
        self._confidence.append(output.confidence)
        return True

    def trim(self, proposal):
        unsure = len(self._confidence) > 1 and self._confidence[1] < 0.4
        return EMPTY if self.may_truncate and unsure else proposal


# Two draft tokens may be worth a call, one never: without a confident second the first is dropped.
MARGINAL = {"main": {1: 1.0, 2: 2.4, 3: 1.85, 64: 60.0}, "draft": {1: 0.01}, "noise": 1.0, "lookup": 0}
SEEDS = (0, 15, 19)  # that draft chains long enough to be truncated
# A policy, its world, and what drafts in it at temperature 0.
CASES = {
    "fixed": (lambda world, may_truncate: Policy(PolicyOptions(may_truncate)), {}, {"draft"}),
    "confidence": (
        lambda world, may_truncate: Confidence(PolicyOptions(may_truncate, 0.4)),
        {},
        {"draft", "none"},
    ),
    "late dropping": (LateDropping, {}, {"draft", "none"}),
    **{f"random {i}": (partial(RandomPolicy, seed=i), {}, {"draft", "lookup", "none"}) for i in SEEDS},
    "adaptive, all cheap": (adaptive, {}, {"draft", "lookup"}),
    "adaptive, only the draft model": (adaptive, {"lookup": 0}, {"draft"}),
    "adaptive, all lookups in a tree": (
        partial(adaptive, tree=6),
        {"several": True, "draft": {1: 1.2}},
        {"lookup", "recycling", "none"},
    ),
    "adaptive, jumpy costs": (adaptive, {"main": JUMPY}, {"draft", "lookup"}),
    "adaptive, marginal": (adaptive, MARGINAL, {"draft", "none"}),
    "adaptive, unrelated draft model": (adaptive, {"noise": 9.0, "lookup": 0}, {"draft", "none"}),
    "adaptive, expensive draft model": (adaptive, {"draft": {1: 1.2}}, {"lookup", "none"}),
    "adaptive, nothing pays": (adaptive, {"main": STEEP}, {"none"}),
}
MODES = {
    "coupled": {"how": "coupled", "rule": "exact-match"},
    "drawn, block": {"how": "drawn", "rule": "block"},
    "drawn, token": {"how": "drawn", "rule": "token"},
    "greedy": {"how": "greedy", "rule": "exact-match"},
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)
PROMPTS = ([1], [1, 2, 3, 1, 2, 3, 1], list(range(8)) * 5)


def world(case, mode="coupled", **kwargs):
    policy, costs, _ = CASES[case]
    return World(policy, **costs, **MODES[mode], **kwargs)


@pytest.mark.slow
@EVERY_CASE
@pytest.mark.parametrize("mode", ["coupled", "drawn, block"])
def test_temperature_0_generates_what_plain_decoding_does(case, mode):
    for prompt in PROMPTS:
        expected = plain(prompt, 40)
        for draft_max in (1, 64):
            assert world(case, mode).generate(prompt, 40, draft_max)[0] == expected


@EVERY_CASE
def test_cases_cover_every_source(case):
    """Otherwise the tests around this one would not test what they state."""
    seen = {source for prompt in PROMPTS for source in world(case).generate(prompt, 200)[1].steps_by}
    assert seen >= CASES[case][2]


def worst_error(make, n=3):
    """The largest error of the probability of any first three tokens."""
    prompt, sampler = [0, 1, 2, 0, 1], Sampler(FREE)

    def answer(rng):
        return tuple(make().generate(prompt, n, draft_max=2, rng=rng)[0])

    output, errors = enumerate_outcomes(answer), []
    main = FakeModel(3, seed=2, scale=1.0)
    for tokens in itertools.product(range(3), repeat=n):
        expected, history = 1.0, list(prompt)
        for token in tokens:
            expected *= sampler.distribution(main.logits(history)).dense(3)[token]
            history.append(token)
        errors.append(abs(output.get(tokens, 0.0) - expected))
    return max(errors)


# The rules are enumerated in test_tree_verifiers.py; here they differ only in what may be trimmed.
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (case, mode)
        for i, case in enumerate(CASES)
        for mode in MODES
        if case in ("fixed", "late dropping") or mode == ("drawn, block", "coupled")[i % 2]
    ],
)
def test_first_three_tokens_have_the_main_models_distribution(case, mode):
    assert worst_error(lambda: world(case, mode, sampling=FREE, n_vocab=3)) < 1e-12


@pytest.mark.parametrize("case", ["late dropping", "adaptive, marginal"])
@pytest.mark.parametrize("mode", ["drawn, block", "coupled"])
def test_enumeration_notices_truncated_drawn_chains(case, mode):
    """So the test above can fail: it passes because of `may_truncate`, or of coupling."""
    wrong = worst_error(lambda: world(case, mode, sampling=FREE, n_vocab=3, may_truncate=True))
    assert wrong < 1e-12 if mode == "coupled" else wrong > 1e-3


def tree_of_two(limit):
    return Decision("tree", replace(limit, depth=min(limit.depth, 2), nodes=min(limit.nodes, 2)))


class Peeking(Policy):
    """Drafts a chain, drops it if it may, and then decides on a tree by the second of the dropped tokens.

    The numbers that drew that token are those of a position that the tree is about to fill.
    """

    def __init__(self, world, may_truncate):
        super().__init__(PolicyOptions(may_truncate))
        self._next = "draft"

    def choose(self, offer):
        return tree_of_two(offer.limit) if self._next == "tree" else Decision(self._next)

    def trim(self, proposal):
        return EMPTY if self.may_truncate and self._next == "draft" else proposal

    def observe(self, drafted, output, n_verified):
        self._next = "tree" if len(drafted) > 1 and drafted[1] == 0 else "none"


PEEKING = {"exact-match": ("coupled", lambda: Coupled(2, 2))} | {
    rule: ("drawn", partial(Drawn, verifier.drawing, 2, 2))
    for rule, verifier in VERIFIERS.items()
    if verifier.drawing not in ("chosen", "one")
}


class RandomTrees(RandomPolicy):
    """Decides at random, depending on all that was drafted, also between chains and trees."""

    def choose(self, offer):
        choice = super().choose(offer)
        if choice.source != "draft" or not self._random(2):
            return choice
        self._source = "tree"
        return tree_of_two(offer.limit)


# This seed drafts chains and trees in many answers.
@pytest.mark.parametrize("policy", [Peeking, partial(RandomTrees, seed=9)])
@pytest.mark.parametrize("rule", PEEKING)
def test_a_policy_that_knows_the_randomness_of_later_tokens_does_not_change_the_distribution(rule, policy):
    how, tree = PEEKING[rule]

    def make():
        return World(policy, how=how, rule=rule, tree=tree(), sampling=FREE, n_vocab=3, noise=1.0)

    assert worst_error(make) < 1e-12


def test_enumeration_notices_a_drawn_tree_after_a_coupled_chain():
    def make():
        tree = Drawn("without replacement", 2, 2)
        return World(Peeking, rule="traversal", tree=tree, sampling=FREE, n_vocab=3, lookup=0, noise=1.0)

    assert worst_error(make) > 1e-2


SAMPLINGS = {
    "defaults": FREE,
    "top-k": unfiltered(temperature=0.7, top_k=3),
    "top-p and min-p": unfiltered(top_p=0.8, min_p=0.1),
    "penalties": unfiltered(repeat_penalty=1.5, presence_penalty=0.2, penalty_window=5),
    "bias": unfiltered(logit_bias={0: -np.inf, 1: 2.0}),
    "hot": unfiltered(temperature=2.0),
}


@pytest.mark.slow
@settings(max_examples=30)
@given(
    case=st.sampled_from(sorted(CASES)),
    mode=st.sampled_from(["coupled", "greedy"]),
    sampling=st.sampled_from(sorted(SAMPLINGS)),
    seed=st.integers(0, 2**40),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    draft_max=st.integers(1, 20),
)
def test_under_exact_match_a_seed_gives_the_same_output_whatever_drafts(
    case, mode, sampling, seed, prompt, draft_max
):
    how = SAMPLINGS[sampling]
    output, _ = world(case, mode, sampling=how).generate(prompt, 40, draft_max, SeededRng(seed))
    assert output == plain(prompt, 40, how, SeededRng(seed))


def test_coupled_tokens_are_accepted_about_as_often_as_drawn_ones_and_greedy_ones_less_often():
    """Above temperature 0, with a main model of high entropy: this is what coupling is for."""
    rates = {}
    for mode in MODES:
        answers = [
            world("fixed", mode, sampling=FREE).generate([1, 2], 300, 4, SeededRng(i))[1] for i in range(4)
        ]
        rates[mode] = sum(a.accepted_at[0] for a in answers) / sum(a.tested_at[0] for a in answers)
    assert rates["coupled"] > rates["drawn, token"] - 0.1
    assert rates["coupled"] > rates["greedy"] + 0.2


def test_nothing_is_drafted_where_nothing_pays():
    """Not even by a draft model that is always right."""
    for draft in (CHEAP, {1: 1e-4}):
        setup = World(adaptive, STEEP, draft, noise=0.0)
        _, statistics = setup.generate([1, 2, 3] * 5, 200)
        assert set(statistics.steps_by) == {"none"}
        assert setup.draft.calls == []


def test_a_draft_model_slower_than_the_main_model_is_never_called():
    setup = World(adaptive, FLAT, {1: 1.2}, noise=0.0)
    run(setup.proposer.prefill([1, 2, 3] * 5))
    assert setup.draft.calls == []
    assert setup.generate([1, 2, 3] * 5, 200)[1].n_steps < 200  # lookups still draft
    assert setup.draft.calls == []
    faster = World(adaptive, FLAT, CHEAP)
    faster.generate([1, 2, 3] * 5, 200)
    assert faster.draft.calls


def test_a_draft_model_does_not_read_a_long_text_for_a_trial():
    """Costs of a small main model; the same draft model is tried where it has little to read."""
    main, draft = {1: 1.0, 2: 2.1, 4: 3.2, 8: 4.5, 64: 30.0}, {1: 0.1, 400: 0.6, 800: 1.1}
    calls = []
    for n_prompt in (8, 600):
        setup = World(adaptive, main, draft, noise=1.0, lookup=0)
        setup.generate([1, 2, 3, 4] * (n_prompt // 4), 190)
        calls.append(len(setup.draft.calls))
    assert calls[0] > 0
    assert calls[1] == 0


def counting(model):
    """Make it count to 99 and start again: a text that a lookup predicts after one round."""
    model.logits = lambda history: np.eye(100, dtype=np.float32)[(history[-1] + 1) % 100]


STEP = {1: 1.0, 8: 1.3, 9: 2.0, 64: 16.0}  # calls of 8 tokens are the fastest per token


@pytest.mark.parametrize(
    ("costs", "usual", "longest"), [(FLAT, 60, 64), (STEP, 7, 7), ({1: 1.0, 2: 2.2, 64: 20.0}, 24, 64)]
)
def test_a_long_match_is_proposed_as_far_as_it_pays(costs, usual, longest):
    """Up to the maximum, or to a step in the costs; also where short proposals would not pay."""
    setup = World(adaptive, costs, {1: 9.0}, lookup=2, n_vocab=100)
    counting(setup.main)
    output, statistics = setup.generate([0, 1, 2], 1_800)
    assert output == [(i + 3) % 100 for i in range(1_800)]
    reach = statistics.tested_at
    assert len(reach) <= longest
    assert reach[usual - 1] > 0.7 * reach[0]  # nearly all proposals were so long


def test_a_better_draft_model_drafts_longer_chains():
    reach = {}
    for noise in (0.0, 0.3, 1.0):
        _, statistics = World(adaptive, FLAT, CHEAP, noise=noise, lookup=0).generate([1, 2, 3], 300)
        reach[noise] = sum(statistics.tested_at) / statistics.n_steps
    assert reach[0.0] > reach[0.3] > reach[1.0]


def test_experience_carries_over_to_the_next_answer():
    """A draft model that was always right is called more in the next answer; one that was wrong is not."""
    n_calls = {}
    for shift in (0, 1):
        experience, n_calls[shift] = Experience(), []
        for _ in range(3):
            setup = World(
                partial(adaptive, experience=experience), draft={1: 0.3, 64: 3.0}, noise=0.0, lookup=0
            )
            find = setup.draft.logits
            setup.draft.logits = lambda history, find=find, shift=shift: np.roll(find(history), shift)
            setup.generate([1, 2, 3], 100)
            n_calls[shift].append(len(setup.draft.calls))
    assert n_calls[0][0] < n_calls[0][2]
    assert n_calls[1][0] >= n_calls[1][2]


def test_costs_are_kept_up_to_date():
    """The clock overrules the costs that the policy started with."""
    setup = World(adaptive, FLAT, CHEAP, lookup=0)
    for model in (setup.main, setup.draft):
        model.costs = CostModel({1: 7.0, 64: 7.0})
    setup.generate([1, 2, 3], 200)
    assert [costs.seconds(1) for costs in setup.costs] == [7.0, 7.0]


class NoDraws(SeededRng):
    """Counts draws that belong to no position: those of a drawn chain, and no others here."""

    def __init__(self):
        super().__init__(0)
        self.n_draws = 0

    def choose(self, weights):
        self.n_draws += 1
        return super().choose(weights)


def test_p_min_stops_before_a_token_is_drawn():
    """Drawing and then dropping what is improbable would not be lossless."""
    for p_min, drafts in ((1.0, False), (0.0, True)):
        rng = NoDraws()
        setup = World(
            lambda _, may_truncate, p_min=p_min: Confidence(PolicyOptions(may_truncate, p_min)),
            **MODES["drawn, block"],
            sampling=FREE,
        )
        _, statistics = setup.generate([1, 2, 3], 20, 4, rng)
        assert bool(statistics.draft_n) == bool(rng.n_draws) == drafts
        assert len(setup.draft.calls) > 10  # it was called


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"},
        {"policy": "fixed", "shape": "auto"},
        {"draft_p_min": -0.1},
        {"draft_p_min": 1.1},
        {"draft_p_min": float("nan")},
    ],
    ids=str,
)
def test_invalid_policy_settings_are_rejected(wrong):
    with pytest.raises(InvalidRequest):
        GenerationSettings(**wrong)


def reads_prompt(n_unread, draft, experience=None, max_tokens=None):
    known = experience or Experience()
    policy = proposers.adaptive(FLAT, draft, known, max_tokens=max_tokens)
    known.n_tokens = 8  # not the shortest of answers
    return policy.choose(Offer(Limit(8, 8, 1), readings=[DraftReading(n_unread)])).source == "draft"


@pytest.mark.parametrize(
    ("n_unread", "draft", "expected"),
    [
        (10, CHEAP, True),
        (50_000, CHEAP, False),  # reading takes longer than drafting may save
        (10, {1: 0.9, 64: 9.0}, False),  # it saves nothing
    ],
)
def test_the_draft_model_reads_a_prompt_that_is_worth_it(n_unread, draft, expected):
    assert reads_prompt(n_unread, draft) == expected


def test_earlier_answers_decide_whether_the_prompt_is_read():
    """Long ones justify more reading, and a draft model that gained nothing none, for a while."""

    def worth(experience, max_tokens=None):
        def reads(n):
            experience.budget = LossBudget()
            experience.budget.trust()
            return reads_prompt(n, {1: 0.05, 64: 3.2}, experience, max_tokens)

        return max(filter(reads, range(1, 5_000, 20)), default=0)

    usual, short, useless = worth(Experience()), Experience(), Experience()
    for _ in range(8):
        short.start(lambda n_running, window: 0.7)
        short.n_tokens, short.gained = 20, 14.0
        useless.start(lambda n_running, window: 0.7)
        useless.n_tokens, useless.gained = 200, -2.0
    assert 0 < worth(short) < 0.5 * usual
    assert worth(Experience(), max_tokens=12) < 0.4 * usual  # which the credit limits
    assert worth(useless) < 0.4 * usual
    for _ in range(300):
        useless.start(lambda n_running, window: 0.7)
        useless.n_tokens, useless.gained = 200, None
    assert worth(useless) > 0.9 * usual
