"""Length policies: whatever they decide, main's distribution stays; and what they decide is what pays."""

import itertools
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.fake import FakeModel, enumerate_outcomes
from spec_local.core.proposal import Limit
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.decoding import decode
from spec_local.engine.events import Finished, Step
from spec_local.errors import InvalidRequest
from spec_local.lookups import Candidates, PromptLookup, Recycling, SuffixLookup
from spec_local.policies import Adaptive, Confidence, Entropy, Experience, Policy
from spec_local.policies.base import Offer
from spec_local.policies.cost_model import CostModel
from spec_local.policies.experience import Chances, Yield
from spec_local.proposers import Chain, CombinedProposer, DraftModel
from spec_local.settings import GenerationSettings
from spec_local.verifiers import VERIFIERS

GREEDY, FREE = SamplingSettings(temperature=0), SamplingSettings()

FLAT = {1: 1.0, 64: 1.3}  # seconds by tokens of a call: many cost hardly more than one
STEEP = {1: 1.0, 64: 64.0}  # nothing is gained by asking for two at once
JUMPY = {1: 1.0, 2: 2.6, 3: 1.1, 4: 3.5, 5: 1.5, 64: 9.0}
CHEAP = {1: 0.05, 64: 1.0}


@pytest.fixture(autouse=True, scope="module")
def _remember(cached_logits):
    pass


class TimedModel(FakeModel):
    """A fake model whose calls take what its costs say, on the clock of its world."""

    def __init__(self, world, costs, n_vocab, noise=0.0):
        super().__init__(n_vocab, seed=2, scale=1.0, noise=noise, max_logits=65, max_tokens=128, n_ctx=2_000)
        self._world, self.costs = world, costs

    def decode_tree(self, tokens, parents, n_logits=None):
        self._world.now += self.costs.seconds(len(tokens))
        return super().decode_tree(tokens, parents, n_logits)


class World:
    """A main, a draft more or less like it, lookup, and a policy among them.

    Args:
        policy: makes it of this world and `may_cut`.
        main, draft: seconds a call, by its tokens.
        how, rule: how guesses are made, and what judges them.
        lookup: fewest tokens of a match; 0: no lookup.
        several: whether lookups of all kinds guess together, and in trees.
    """

    def __init__(
        self, policy, main=FLAT, draft=CHEAP, how="coupled", rule="exact-match", *, sampling=GREEDY, noise=0.3,
        n_vocab=8, lookup=1, several=False, may_cut=None,
    ):  # fmt: skip
        self.now = 0.0
        self.costs = tuple(CostModel(costs) for costs in (main, draft))
        self.main, self.draft = (
            TimedModel(self, CostModel(costs), n_vocab, unlike)
            for costs, unlike in ((main, 0.0), (draft, noise))
        )
        self._sampler, self._rule = Sampler(sampling), rule
        # What session.py says: a chain that is judged by its probabilities must be as long as it was drawn.
        drawn = how == "drawn" and sampling.temperature > 0
        self.policy = policy(self, not drawn if may_cut is None else may_cut)
        chain = DraftModel(self.draft, self._sampler, Chain(how, self.policy), n_vocab=n_vocab)
        lookups = [PromptLookup(longest=3 if lookup == 1 else 8, shortest=lookup)] if lookup else []
        if several:
            lookups += [SuffixLookup(shortest=1), Recycling()]
        self.proposer = CombinedProposer(self.policy, chain, lookups, branches=4 if several else 1, nodes=6)

    def say(self, prompt, n=60, draft_max=64, rng=None):
        """The tokens of an answer, and its statistics."""
        said, event = [], None
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
            said += event.tokens if isinstance(event, Step) else []
        assert isinstance(event, Finished)
        return said, event.statistics


def plain(prompt, n, sampling=GREEDY, rng=None):
    main, said = FakeModel(8, seed=2, scale=1.0, n_ctx=2_000), []
    for event in decode(main, prompt, sampler=Sampler(sampling), rng=rng or SeededRng(0), max_tokens=n):
        said += event.tokens if isinstance(event, Step) else []
    return said


def adaptive(world, may_cut, experience=None, tree=0, kind=Adaptive):
    return kind(*world.costs, experience, may_cut=may_cut, tree=tree, clock=lambda: world.now)


class Whimsical(Policy):
    """Decides at random, and otherwise with the least change in all that it may look at."""

    def __init__(self, world, may_cut, whim=0):
        super().__init__(may_cut)
        self._seen = [whim]

    def _whim(self, n, *facts):
        self._seen += facts
        return random.Random(repr(self._seen)).randrange(n)

    def begin(self, offer):
        super().begin(replace(offer, unread=0))  # what would be copied
        return ("none", "lookup" if offer.copies else "draft", "draft", "draft")[self._whim(4, offer)]

    def reads_on(self):
        return self._whim(4) > 0

    def takes(self, opinion):
        return self._whim(4, opinion.confidence, opinion.entropy) > 0

    def keeps(self, n):
        return self._whim(n + 1, n) if self.may_cut else n

    def learn(self, guesses, said, n_tested):
        self._seen += [tuple(guesses), tuple(said), n_tested]


def torn(seconds):
    """Two guesses may be worth a call, one alone never: where the second is unsure, the first is dropped, too."""
    return {"main": {1: 1.0, 2: 4.0, 3: seconds, 64: 60.0}, "draft": {1: 0.01}, "noise": 1.0, "lookup": 0}


WHIMS = (1, 9, 13)  # by which the first drafts are long enough to be cut
# A policy, its world, and who guesses in it at temperature 0.
CASES = {
    "fixed": (lambda world, may_cut: Policy(may_cut), {}, {"draft"}),
    "confidence": (lambda world, may_cut: Confidence(0.4, may_cut), {}, {"draft", "none"}),
    "entropy": (lambda world, may_cut: Entropy(may_cut=may_cut), {}, {"draft", "none"}),
    **{f"whim {i}": (partial(Whimsical, whim=i), {}, {"draft", "lookup", "none"}) for i in WHIMS},
    "adaptive, all is cheap": (adaptive, {}, {"draft", "lookup"}),
    "adaptive, only the draft": (adaptive, {"lookup": 0}, {"draft"}),
    "adaptive, all lookups in a tree": (
        partial(adaptive, tree=6),
        {"several": True, "draft": {1: 1.2}},
        {"lookup", "recycling", "none"},
    ),
    "adaptive, jumpy costs": (adaptive, {"main": JUMPY}, {"draft", "lookup"}),
    "adaptive, torn": (adaptive, torn(1.8), {"draft", "none"}),
    "adaptive, unlike draft": (adaptive, {"noise": 9.0, "lookup": 0}, {"draft", "none"}),
    "adaptive, dear draft": (adaptive, {"draft": {1: 1.2}}, {"lookup", "none"}),
    "adaptive, nothing pays": (adaptive, {"main": STEEP}, {"none"}),
}
WAYS = {
    "coupled": {"how": "coupled", "rule": "exact-match"},
    "drawn, block": {"how": "drawn", "rule": "block"},
    "drawn, token": {"how": "drawn", "rule": "token"},
    "greedy": {"how": "greedy", "rule": "exact-match"},
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
PROMPTS = ([1], [1, 2, 3, 1, 2, 3, 1], list(range(8)) * 5)


def world(case, way="coupled", **kwargs):
    policy, costs, _ = CASES[case]
    return World(policy, **costs, **WAYS[way], **kwargs)


@EVERY_CASE
@EVERY_WAY
def test_at_temperature_0_a_policy_says_what_plain_decoding_says(case, way):
    for prompt, draft_max in itertools.product(PROMPTS, (1, 3, 64)):
        said, _ = world(case, way).say(prompt, 80, draft_max)
        assert said == plain(prompt, 80)


@EVERY_CASE
def test_all_who_may_guess_in_a_case_do(case):
    """Or else the tests around this one would test less than they say."""
    seen = {source for prompt in PROMPTS for source in world(case).say(prompt, 200)[1].steps_by}
    assert seen >= CASES[case][2]


def worst_error(make, n=3):
    """How far the chance of any first three tokens is from what main says."""
    prompt, sampler = [0, 1, 2, 0, 1], Sampler(FREE)

    def run(rng):
        return tuple(make().say(prompt, n, draft_max=2, rng=rng)[0])

    said, errors = enumerate_outcomes(run), []
    main = FakeModel(3, seed=2, scale=1.0)
    for tokens in itertools.product(range(3), repeat=n):
        expected, history = 1.0, list(prompt)
        for token in tokens:
            expected *= sampler.distribution(main.logits(history)).dense(3)[token]
            history.append(token)
        errors.append(abs(said.get(tokens, 0.0) - expected))
    return max(errors)


@EVERY_CASE
@EVERY_WAY
def test_the_first_three_tokens_have_exactly_mains_distribution(case, way):
    assert worst_error(lambda: world(case, way, sampling=FREE, n_vocab=3)) < 1e-12


class Backwards(Policy):
    """Drops all guesses where the draft is unsure after the first: that favours some first guesses over others."""

    def __init__(self, world, may_cut):
        super().__init__(may_cut)

    def begin(self, offer):
        self._sure = []
        return super().begin(offer)

    def takes(self, opinion):
        self._sure.append(opinion.confidence)
        return True

    def keeps(self, n):
        return 0 if self.may_cut and len(self._sure) > 1 and self._sure[1] < 0.4 else n


CUTTERS = {
    "backwards": [(Backwards, {})],
    "whimsical": [(partial(Whimsical, whim=i), {}) for i in range(12)],
    "adaptive": [(adaptive, torn(seconds)) for seconds in (1.6, 1.7, 1.75, 1.8, 1.85, 1.9)],
}


@pytest.mark.parametrize("who", CUTTERS)
@pytest.mark.parametrize("way", ["drawn, block", "drawn, token", "coupled"])
def test_the_enumeration_notices_who_cuts_a_drawn_chain(who, way):
    """So it is not blind: `may_cut` keeps the tests above green, and coupling is what makes cutting harmless."""
    wrong, right = (
        max(
            worst_error(
                partial(World, policy, **costs, **WAYS[way], sampling=FREE, n_vocab=3, may_cut=may_cut)
            )
            for policy, costs in CUTTERS[who]
        )
        for may_cut in (True, False)
    )
    assert right < 1e-12
    assert wrong < 1e-12 if way == "coupled" else wrong > 1e-3


SAMPLINGS = {
    "as it is": FREE,
    "top-k": SamplingSettings(temperature=0.7, top_k=3),
    "top-p and min-p": SamplingSettings(top_p=0.8, min_p=0.1),
    "penalties": SamplingSettings(repeat_penalty=1.5, presence_penalty=0.2, penalty_window=5),
    "bias": SamplingSettings(logit_bias={0: -np.inf, 1: 2.0}),
    "hot": SamplingSettings(temperature=2.0),
}


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    way=st.sampled_from(["coupled", "greedy"]),
    sampling=st.sampled_from(sorted(SAMPLINGS)),
    seed=st.integers(0, 2**40),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    draft_max=st.integers(1, 20),
)
def test_under_membership_a_seed_says_the_same_whoever_guesses(case, way, sampling, seed, prompt, draft_max):
    how = SAMPLINGS[sampling]
    said, _ = world(case, way, sampling=how).say(prompt, 40, draft_max, SeededRng(seed))
    assert said == plain(prompt, 40, how, SeededRng(seed))


def test_coupled_guesses_stand_about_as_often_as_drawn_ones_and_greedy_ones_less_often():
    """Above temperature 0, with a main that is unsure: what the coupling is for."""
    stood = {}
    for way in WAYS:
        answers = [world("fixed", way, sampling=FREE).say([1, 2], 300, 4, SeededRng(i))[1] for i in range(4)]
        stood[way] = sum(a.accepted_at[0] for a in answers) / sum(a.tested_at[0] for a in answers)
    assert stood["coupled"] > stood["drawn, token"] - 0.1
    assert stood["coupled"] > stood["greedy"] + 0.2


def test_nothing_is_guessed_where_nothing_pays():
    """Not even by a draft that is always right."""
    for draft in (CHEAP, {1: 1e-4}):
        there = World(adaptive, STEEP, draft, noise=0.0)
        _, statistics = there.say([1, 2, 3] * 5, 200)
        assert set(statistics.steps_by) == {"none"}
        assert there.draft.calls == []


class Restless(Adaptive):
    """Is asked and told in every step."""

    rests = property(lambda self: 0, lambda self, n: None)


class Asked(Adaptive):
    """Counts how often it is."""

    n = 0

    def begin(self, offer):
        self.n += 1
        return super().begin(offer)


@pytest.mark.parametrize("draft", [CHEAP, {1: 9.0}])
def test_a_policy_that_rests_learns_what_it_would_have_learned(draft):
    known = {kind: Experience() for kind in (Asked, Restless)}
    for kind, experience in known.items():
        for seed in range(3):
            there = World(partial(adaptive, experience=experience, kind=kind), STEEP, draft, sampling=FREE)
            _, statistics = there.say([1, 2, 3], 101, rng=SeededRng(seed))
            assert set(statistics.steps_by) == {"none"}
            assert experience.said == 100  # before the last token there is no room for a guess
            if kind is Asked:
                assert there.policy.n < 20
    rested, told = known.values()
    confidence = np.linspace(0, 1, 50)
    assert rested.copies["lookup"].of_each(confidence) == pytest.approx(
        told.copies["lookup"].of_each(confidence)
    )
    assert rested.copies["lookup"].of(0.5) != Experience().copies["lookup"].of(0.5)
    assert rested.purse == pytest.approx(told.purse)
    assert rested.length == told.length


def test_a_policy_that_rests_takes_a_copy_as_soon_as_it_is_there():
    """Long texts without a repetition come before one."""
    n_steps = []
    for kind in (Adaptive, Restless):
        there = World(partial(adaptive, kind=kind), FLAT, {1: 9.0}, lookup=2, n_vocab=100)
        counting(there.main)
        n_steps.append(there.say([0, 1, 2], 300)[1].n_steps)
    assert n_steps[0] == n_steps[1] < 120


def test_a_draft_dearer_than_main_is_never_asked_and_reads_no_prompt():
    there = World(adaptive, FLAT, {1: 1.2}, noise=0.0)
    assert list(there.proposer.prefill([1, 2, 3] * 5)) == []
    assert there.say([1, 2, 3] * 5, 200)[1].n_steps < 200  # lookup goes on
    assert there.draft.calls == []
    asked = World(adaptive, FLAT, CHEAP)
    assert sum(asked.proposer.prefill([1, 2, 3] * 5)) == 14


def test_a_draft_that_never_gained_does_not_read_a_long_text_for_a_trial():
    """Costs of a small main; the same draft is tried where it has little to read."""
    main, draft = {1: 1.0, 2: 2.1, 4: 3.2, 8: 4.5, 64: 30.0}, {1: 0.1, 400: 0.6, 800: 1.1}
    calls = []
    for n_prompt in (8, 600):
        there = World(adaptive, main, draft, noise=1.0, lookup=0)
        there.say([1, 2, 3, 4] * (n_prompt // 4), 190)
        calls.append(len(there.draft.calls))
    assert calls[0] > 0
    assert calls[1] == 0


def counting(model):
    """Let it count up to 99 and begin again: a text that lookup knows after one round."""
    model.logits = lambda history: np.eye(100, dtype=np.float32)[(history[-1] + 1) % 100]


STEP = {1: 1.0, 8: 1.3, 9: 2.0, 64: 16.0}  # 8 tokens a call are the most a second


@pytest.mark.parametrize(
    ("costs", "usual", "most"), [(FLAT, 60, 64), (STEP, 7, 7), ({1: 1.0, 2: 2.2, 64: 20.0}, 24, 64)]
)
def test_a_long_copy_is_guessed_as_far_as_it_pays(costs, usual, most):
    """As far as main can test, or up to a step in the costs; also where few guesses would not pay."""
    there = World(adaptive, costs, {1: 9.0}, lookup=2, n_vocab=100)
    counting(there.main)
    said, statistics = there.say([0, 1, 2], 1_800)
    assert said == [(i + 3) % 100 for i in range(1_800)]
    reach = statistics.tested_at
    assert len(reach) <= most
    assert reach[usual - 1] > 0.7 * reach[0]  # nearly all copies were so long


def test_a_sure_draft_is_asked_further_than_an_unsure_one():
    """And only while main's call is worth it."""
    reach = {}
    for noise in (0.0, 0.3, 1.0):
        _, statistics = World(adaptive, FLAT, CHEAP, noise=noise, lookup=0).say([1, 2, 3], 300)
        reach[noise] = sum(statistics.tested_at) / statistics.n_steps
    assert reach[0.0] > reach[0.3] > reach[1.0]


def test_experience_carries_over_to_the_next_answer():
    """A draft that was always wrong is asked less often in the next answer, if at all; one that was right, more."""
    n_calls = {}
    for shift in (0, 1):
        experience, n_calls[shift] = Experience(), []
        for _ in range(3):
            there = World(
                partial(adaptive, experience=experience), draft={1: 0.3, 64: 3.0}, noise=0.0, lookup=0
            )
            find = there.draft.logits
            there.draft.logits = lambda history, find=find, shift=shift: np.roll(find(history), shift)
            there.say([1, 2, 3], 100)
            n_calls[shift].append(len(there.draft.calls))
    assert n_calls[1][0] > min(n_calls[1][1:])
    assert n_calls[0][0] < n_calls[0][2]


def test_a_policy_keeps_the_costs_up_to_date():
    """What it was told is worth nothing where the clock says otherwise."""
    there = World(adaptive, FLAT, CHEAP, lookup=0)
    for model in (there.main, there.draft):
        model.costs = CostModel({1: 7.0, 64: 7.0})
    there.say([1, 2, 3], 200)
    assert [costs.seconds(1) for costs in there.costs] == [7.0, 7.0]


class NoDraws(SeededRng):
    """Rng that know what was drawn outside of a place: by a draft that is drawn from, and by no one else here."""

    def __init__(self):
        super().__init__(0)
        self.n_draws = 0

    def choose(self, weights):
        self.n_draws += 1
        return super().choose(weights)


def test_p_min_stops_before_a_guess_is_drawn():
    """To draw and then to drop what is improbable would not be lossless."""
    for p_min, drafts in ((1.0, False), (0.0, True)):
        rng = NoDraws()
        there = World(
            lambda _, may_cut, p_min=p_min: Confidence(p_min, may_cut), **WAYS["drawn, block"], sampling=FREE
        )
        _, statistics = there.say([1, 2, 3], 20, 4, rng)
        assert bool(statistics.draft_n) == bool(rng.n_draws) == drafts
        assert len(there.draft.calls) > 10  # it was asked


class Unsure:
    """An opinion of some entropy, in nats."""

    confidence = 0.5

    def __init__(self, entropy):
        self.entropy = entropy


def test_the_entropy_bound_is_adaedls():
    """1 − √(γ·H) against a threshold that is 0.5 at first, with γ = 0.2."""
    limit = 0.25 / 0.2
    assert Entropy().takes(Unsure(limit - 1e-9))
    assert not Entropy().takes(Unsure(limit + 1e-9))


@pytest.mark.parametrize(("said", "bolder"), [([1, 2, 3, 4], True), ([9], False), ([1, 9], False)])
def test_the_entropy_threshold_goes_where_the_wanted_share_is(said, bolder):
    policy = Entropy(wanted=0.9)
    for _ in range(200):
        policy.learn([1, 2, 3], said, 3)
    assert policy.takes(Unsure(1.4)) == bolder
    assert policy.takes(Unsure(1.1)) == bolder


def test_the_entropy_threshold_falls_while_nothing_is_guessed():
    policy = Entropy()
    assert not policy.takes(Unsure(3.0))
    for _ in range(100):
        policy.learn([], [1], 0)
    assert policy.takes(Unsure(3.0))


def test_chances_start_as_believed_and_bins_begin_at_their_edges():
    chances = Chances((0.3, 0.6), (0.2, 0.5, 0.8))
    assert [chances.of(x) for x in (0.0, 0.29, 0.3, 0.59, 0.6, 1.0)] == [0.2, 0.2, 0.5, 0.5, 0.8, 0.8]
    for i in range(50):
        chances.count((0.1, 0.4, 0.9)[i % 3], i % 4 > 0)
    xs = np.array([0.0, 0.3, 0.5, 0.9])
    assert chances.of_each(xs).tolist() == [chances.of(x) for x in xs]


@pytest.mark.parametrize("stood", [True, False])
def test_chances_follow_what_is_seen(stood):
    """Most in the bin it was seen in, and never as far as certainty."""
    chances, before = Chances((0.5,), (0.5, 0.5)), (0.5, 0.5)
    moved = []
    for _ in range(500):
        chances.count(0.7, stood)
        after = chances.of(0.1), chances.of(0.7)
        assert 0 < min(after) <= max(after) < 1
        moved.append([abs(a - b) for a, b in zip(after, before, strict=True)])
    assert moved[0][1] < moved[9][1] < moved[-1][1]
    assert moved[-1][0] < moved[-1][1]
    assert abs(chances.of(0.7) - stood) < 0.12


def test_chances_tell_frequencies_and_forget():
    chances = Chances((0.5,), (0.5, 0.5), memory=40.0)
    generator = np.random.default_rng(0)
    for often in (0.9, 0.2):
        found = []
        for _ in range(600):
            chances.count(0.9, bool(generator.random() < often))
            found.append(chances.of(0.9))
        assert np.mean(found[100:]) == pytest.approx(often, abs=0.05)


@pytest.mark.parametrize("expected", [(), (0.5,), (0.5, 0.5, 0.5)])
def test_chances_need_a_belief_for_each_bin(expected):
    with pytest.raises(ValueError, match="2 bins"):
        Chances((0.5,), expected)


def test_yields_are_means_that_forget():
    brings = Yield(2.0, 1.0, 3.0, memory=4.0)
    brings.count(6.0, 5.0)
    assert brings.weight == pytest.approx(0.75 * 3 + 1)
    assert brings.tokens == pytest.approx((0.75 * 3 * 2 + 6) / 3.25)
    assert brings.seconds == pytest.approx((0.75 * 3 * 1 + 5) / 3.25)
    for _ in range(100):
        brings.count(1.0, 9.0)
    assert (brings.tokens, brings.seconds, brings.weight) == pytest.approx((1.0, 9.0, 4.0), rel=1e-6)


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
def test_settings_that_name_no_policy_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        GenerationSettings(**wrong)


STAGED = {
    "pays": ({1: 0.05, 2: 0.06, 9: 0.1}, True),
    "does not pay": ({1: 0.05, 2: 0.2, 9: 0.9}, False),
}


@pytest.mark.parametrize("name", STAGED)
def test_the_draft_reads_along_what_pays(name):
    """By the price of the draft's calls with all opinions, and by how often it guesses what it read along."""
    costs, pays = STAGED[name]
    policy = Adaptive(CostModel(FLAT), CostModel(CHEAP), staging=CostModel(costs), n_staged=5)
    assert policy.may_stage
    assert policy.stages([0.9] * 9, 1) == (5 if pays else 0)
    assert policy.stages([0.01] * 9, 1) == 0
    assert policy.stages([0.9] * 9, 1_000) == 0  # a prompt to be read is no time for it
    for _ in range(200):
        policy.staged([0.9], 0)
    assert policy.stages([0.9] * 9, 1) == 0
    assert Adaptive(CostModel(FLAT), CostModel(CHEAP)).stages([0.9] * 9, 1) == 0


@pytest.mark.parametrize(
    ("unread", "draft", "expected"),
    [
        (10, CHEAP, True),
        (50_000, CHEAP, False),  # it would take longer than it may save
        (0, CHEAP, False),  # it has no room
        (10, {1: 0.9, 64: 9.0}, False),  # it saves nothing
    ],
)
def test_a_draft_reads_a_prompt_that_is_worth_it(unread, draft, expected):
    assert Adaptive(CostModel(FLAT), CostModel(draft)).wants_draft(unread) == expected


def test_how_long_answers_were_decides_about_the_next_prompt():
    """Long ones are worth more reading than short ones, and a draft that saved nothing is worth none, for a while."""

    def worth(experience, most=None):
        policy = Adaptive(CostModel(FLAT), CostModel({1: 0.05, 64: 3.2}), experience, most=most)
        return max((n for n in range(1, 5_000) if policy.wants_draft(n)), default=0)

    usual, short, useless = worth(Experience()), Experience(), Experience()
    for _ in range(8):
        short.start(0.7)
        short.said, short.saved = 20, 14.0
        useless.start(0.7)
        useless.said, useless.saved = 200, -2.0
    assert 0 < worth(short) < 0.5 * usual
    assert worth(Experience(), most=20) < 0.2 * usual
    assert worth(useless) < 0.4 * usual
    for _ in range(60):
        useless.start(0.7)
        useless.said, useless.saved = 200, None
    assert worth(useless) > 0.9 * usual


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_tree_of_several_copies_has_no_more_branches_than_main_reads(branches):
    policy = Adaptive(CostModel({1: 1.0, 64: 1.0}), tree=16)
    several = [Candidates([first, 7, 8], [-1, 0, -1], [0.9, 0.9, 0.5], "suffix") for first in (1, 2, 3)]
    assert policy.begin(Offer(Limit(8, 16, branches), several)) == "lookup"
    parents = policy.copy.parents
    assert 1 <= len(set(range(len(parents))) - set(parents)) <= branches


@pytest.mark.parametrize("parents", [range(-1, 19), [*range(-1, 19)]], ids=["range", "list"])
def test_a_chain_is_one_however_its_parents_are_written(parents):
    policy = Adaptive(CostModel({1: 1.0, 64: 1.0}))
    copies = Candidates([*range(20)], parents, [0.95] * 20, "cache")
    assert policy.begin(Offer(Limit(64, 64, 1), [copies])) == "lookup"
    assert list(policy.copy.tokens) == [*range(20)]
