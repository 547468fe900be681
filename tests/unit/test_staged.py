"""Staged drafting: staged tokens change the number of draft model calls, and nothing else."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core import calls
from spec_local.core.calls import run as run_call
from spec_local.core.constraint import Constraint
from spec_local.core.proposal import Limit, Proposal
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler
from spec_local.engine.events import Step
from spec_local.errors import BackendError, ContextOverflow
from spec_local.llama.vocabulary_map import IntersectionModel, VocabularyMap
from spec_local.policies.base import Confidence, Policy, PolicyOptions
from spec_local.proposers.combined import CombinedProposer
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst
from spec_local.testing import FakeModel, FakeState, decode, enumerate_outcomes
from tests.exact import assert_main_distribution
from tests.proposers import main_model
from tests.unfiltered import unfiltered
from tests.unit.generation import GREEDY, Failing, generate
from tests.unit.test_vocabulary_map import Toy

NEVER = 10**9
draft_model = partial(main_model, noise=0.5)


def run(proposer, how, rule="block", rng=None, prompt=(1, 2, 3), main=None, **options):
    """The tokens and the statistics of an answer."""
    tokens, end = generate(main or main_model(8), prompt, proposer, how, rng or SeededRng(1), rule, **options)
    return tokens, end.statistics


class GreedyLookup:
    """A lookup that predicts the most probable tokens of a model, with a wrong one at every n-th position."""

    name = "greedy"
    needs_logits = False

    def __init__(self, model, wrong_at=NEVER):
        self.model, self.wrong_at = model, wrong_at
        self.histories = []

    def find(self, history, limit):
        self.histories.append(list(history))
        extended = list(history)
        for _ in range(min(limit.depth, limit.nodes)):
            best = int(self.model.logits(extended).argmax())
            extended.append((best + (len(extended) % self.wrong_at == 0)) % self.model.limits.n_vocab)
        tokens = extended[len(history) :]
        return Proposal.chain(tokens)


class RecordingDraft(DraftModel):
    """Records every proposal with its distributions, which the events of the loop do not contain."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.proposals = []

    async def propose(self, history, limit, rng):
        found = await super().propose(history, limit, rng)
        rows = [found.distributions[i].dense(self.n_vocab).tolist() for i in sorted(found.distributions)]
        self.proposals.append((list(found.tokens), rows))
        return found


# Each way to select tokens, with verifiers that are lossless for it.
SELECTIONS = [
    *(("drawn", "token"), ("drawn", "block"), ("drawn", "traversal"), ("coupled", "exact-match")),
    *(("greedy", "token"), ("greedy", "block")),
]
EVERY_SELECTION = pytest.mark.parametrize(("selection", "rule"), SELECTIONS)
SETTINGS = {
    "defaults": unfiltered(),
    "penalties": unfiltered(repeat_penalty=1.5, frequency_penalty=0.3, penalty_window=3),
    "top-k": unfiltered(temperature=0.7, top_k=2),
}
WRONG_AT = {"right": NEVER, "half right": 2, "wrong": 1}
# Each selection with each setting and each lookup, and each setting with each lookup.
EVERY_PAIR = pytest.mark.parametrize(
    ("selection", "rule", "wrong_at", "how"),
    [
        pytest.param(*selection, WRONG_AT[lookup], SETTINGS[name], id="-".join((*selection, lookup, name)))
        for i, selection in enumerate(SELECTIONS)
        for lookup, name in zip(WRONG_AT, [*SETTINGS, *SETTINGS][i % 3 :], strict=False)
    ],
)


@pytest.mark.slow
@EVERY_PAIR
def test_three_tokens_have_exactly_the_main_distribution(
    cached_distributions, selection, rule, wrong_at, how
):
    n_vocab, prompt, sampler, main = 3, [0, 1, 2, 0, 1], Sampler(how), main_model(3)

    def answer(rng):
        lookup = GreedyLookup(draft_model(n_vocab), wrong_at)
        proposer = DraftModel(
            draft_model(n_vocab), sampler, Chain(selection), n_vocab=n_vocab, lookups=[lookup], n_staged=2
        )
        limits = {"draft_max": 3, "max_tokens": 3, "main": main_model(n_vocab), "prompt": prompt}
        return tuple(run(proposer, how, rule, rng, **limits)[0])

    assert_main_distribution(enumerate_outcomes(answer), main, sampler, prompt)


@EVERY_PAIR
def test_draft_tokens_and_distributions_are_those_without_staging(selection, rule, wrong_at, how):
    found = []
    for n_staged in (0, 1, 3, 8):
        small, lookup = draft_model(8), GreedyLookup(draft_model(8), wrong_at)
        proposer = RecordingDraft(
            small, Sampler(how), Chain(selection), n_vocab=8, lookups=[lookup], n_staged=n_staged
        )
        tokens, statistics = run(proposer, how, rule, draft_max=6, max_tokens=30)
        found.append((tokens, proposer.proposals, statistics.draft_n, statistics.draft_n_accepted))
        assert len(small.calls) > 0
    assert found[1:] == found[:1] * 3


@EVERY_SELECTION
@pytest.mark.parametrize("allowed", [{0, 1, 5}, {3}], ids=str)
def test_so_they_are_under_a_constraint(selection, rule, allowed):
    found = []
    for n_staged in (0, 3):
        constraint = Constraint(FakeState(8, lambda answer: allowed if len(answer) % 3 else {2, 4}))
        how = unfiltered()
        sampler = Sampler(how, constraint)
        lookup = GreedyLookup(draft_model(8), 3)
        proposer = RecordingDraft(
            draft_model(8), sampler, Chain(selection), n_vocab=8, lookups=[lookup], n_staged=n_staged
        )
        tokens, _ = run(proposer, how, rule, draft_max=5, max_tokens=40, constraint=constraint)
        assert all(t in (allowed if i % 3 else {2, 4}) for i, t in enumerate(tokens))
        found.append((tokens, proposer.proposals))
    assert found[0] == found[1]


def test_a_lookup_that_is_right_drafts_all_tokens_in_one_call():
    how, small = GREEDY, main_model(8)
    lookup = GreedyLookup(main_model(8))
    proposer = DraftModel(small, Sampler(how), Chain(), n_vocab=8, lookups=[lookup], n_staged=8)
    _, statistics = run(proposer, how, draft_max=4, max_tokens=50)
    assert statistics.n_steps == 10
    # One token of the prompt or two of the last step, and three of four draft tokens, staged.
    assert small.calls == [2, 1 + 3, *[2 + 3] * 9]


def test_a_lookup_that_is_wrong_needs_no_further_calls():
    how, small = GREEDY, main_model(8)
    lookup = GreedyLookup(main_model(8), 1)
    proposer = DraftModel(small, Sampler(how), Chain(), n_vocab=8, lookups=[lookup], n_staged=2)
    run(proposer, how, draft_max=4, max_tokens=50)
    # No more is staged than could be used: nothing after the third draft token.
    assert small.calls == [2, 3, 3, 2, 1, *[4, 3, 2, 1] * 9]


@pytest.mark.parametrize("n_staged", [0, 4])
def test_the_policy_receives_the_same_outputs_and_the_tokens_read(n_staged):
    """Copied before the next call: the fake model overwrites old rows with NaN."""
    how, small, seen = unfiltered(), draft_model(8), []

    class Listening(Policy):
        def __init__(self, seen):
            super().__init__()
            self._seen = seen

        def wants_token(self, output):
            self._seen.append((output.n_read, output.confidence))
            return True

    lookup = GreedyLookup(draft_model(8), 4)
    draft = DraftModel(small, Sampler(how), Chain(), n_vocab=8, lookups=[lookup], n_staged=n_staged)
    plain = DraftModel(draft_model(8), Sampler(how), Chain(), n_vocab=8)
    limit, outputs = Limit(6, 6, 1), []

    run_call(plain.propose([1, 2, 3], limit, SeededRng(1), None, Listening(outputs)))
    run_call(draft.propose([1, 2, 3], limit, SeededRng(1), None, Listening(seen)))
    assert [n for n, _ in seen if n] == small.calls
    assert [confidence for _, confidence in seen] == [confidence for _, confidence in outputs]
    assert np.isfinite([confidence for _, confidence in outputs]).all()


def test_a_chain_that_ends_early_leaves_no_staged_tokens_behind():
    how = GREEDY
    small, lookup = draft_model(8), GreedyLookup(draft_model(8))
    staged = DraftModel(small, Sampler(how), Chain(), n_vocab=8, lookups=[lookup], n_staged=4)
    tokens, statistics = run(
        CombinedProposer(Confidence(PolicyOptions(p_min=0.35)), staged), how, draft_max=8, max_tokens=60
    )
    plain, _ = run(DraftModel(draft_model(8), Sampler(how), Chain(), n_vocab=8), how, max_tokens=60)
    assert tokens == plain
    assert 0 < statistics.draft_n < 8 * statistics.n_steps


class LongTokens(FakeModel):
    """A model in which token 3 takes three cells and is never drawn, as if its vocabulary differed."""

    def logits(self, history):
        found = super().logits(history)
        found[3] = -np.inf
        return found

    def call(self, tokens, *arguments, **options):
        after = [*self.cached, *tokens]
        if len(after) + 2 * after.count(3) > self.limits.n_ctx:
            raise ContextOverflow("the context is full")
        return super().call(tokens, *arguments, **options)


class LongAfter:
    """A lookup that finds a long token after one of the tokens."""

    name = "long"
    needs_logits = False

    def __init__(self, token):
        self.token = token

    def find(self, history, limit):
        return Proposal.chain([3] if history[-1] == self.token else [0])


@pytest.mark.parametrize(
    ("selection", "rule"), [("drawn", "token"), ("drawn", "block"), ("coupled", "exact-match")]
)
@pytest.mark.parametrize("n_ctx", [7, 8])
def test_drawn_tokens_are_proposed_even_if_what_is_staged_after_them_does_not_fit(
    cached_distributions, selection, rule, n_ctx
):
    """Dropping them would depend on what they are, and the output would not be the main model's."""
    prompt, how = [0, 1, 2, 0, 2], unfiltered(top_k=2)

    def answer(rng):
        small = LongTokens(4, seed=2, scale=1.0, noise=0.5, n_ctx=n_ctx)
        proposer = DraftModel(
            small, Sampler(how), Chain(selection), n_vocab=4, lookups=[LongAfter(1)], n_staged=2
        )
        return tuple(run(proposer, how, rule, rng, prompt, main_model(4), draft_max=3, max_tokens=4)[0][:3])

    assert_main_distribution(enumerate_outcomes(answer), main_model(4), Sampler(how), prompt)


class Garbage:
    """A lookup that returns arbitrary tokens."""

    name = "garbage"
    needs_logits = False

    def __init__(self, found):
        self.found = itertools.cycle(found)

    def find(self, history, limit):
        return Proposal.chain(next(self.found))


@settings(max_examples=40)
@given(
    found=st.lists(st.lists(st.integers(-2, 11), max_size=12), min_size=1, max_size=6),
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=20), min_size=1, max_size=3),
    n_staged=st.integers(0, 40),
    draft_max=st.integers(1, 8),
    n_ctx=st.integers(2, 40),
    max_tokens=st.integers(1, 12),
    max_logits=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_arbitrary_staged_tokens_do_not_change_the_output(
    found, prompts, n_staged, draft_max, n_ctx, max_tokens, max_logits, temperature
):
    how, outputs = unfiltered(temperature=temperature), []
    for lookups in ([], [Garbage(found)]):
        limits = {"n_ctx": n_ctx, "max_tokens": max_tokens, "max_logits": min(max_logits, max_tokens)}
        proposer = DraftModel(
            draft_model(8, **limits),
            Sampler(how),
            Chain("drawn"),
            n_vocab=8,
            is_end=lambda token: token == 7,
            lookups=lookups,
            n_staged=n_staged,
        )
        main = main_model(8)
        ends = {"is_end": lambda token: token == 7, "draft_max": draft_max, "max_tokens": 20}
        outputs.append([run(proposer, how, main=main, prompt=prompt, **ends)[0] for prompt in prompts])
    assert outputs[0] == outputs[1]


def test_a_failing_draft_model_leaves_only_the_history_in_its_cache():
    how, reference = GREEDY, main_model(8)
    for fails_at in range(10):
        small, main = Failing(8, seed=2, scale=1.0, noise=0.5), main_model(8)
        lookup = GreedyLookup(draft_model(8), 3)
        proposer = DraftModel(small, Sampler(how), Chain(), n_vocab=8, lookups=[lookup], n_staged=3)
        history, small.left, small.late = [1, 2, 3], fails_at, True
        events = decode(main, history, sampler=Sampler(how), proposer=proposer, rng=SeededRng(0))
        with pytest.raises(BackendError):
            history.extend(token for event in events if isinstance(event, Step) for token in event.tokens)
        assert list(small.cached) == history[: len(small.cached)]
        small.left = NEVER
        tokens, _ = run(proposer, how, prompt=history, main=main, max_tokens=9)
        for token in tokens:
            assert token == int(reference.logits(history).argmax())
            history.append(token)


def test_nothing_is_staged_with_a_tree():
    how, small, lookup = GREEDY, draft_model(8), GreedyLookup(draft_model(8))
    proposer = DraftModel(small, Sampler(how), BestFirst(6, 3), n_vocab=8, lookups=[lookup], n_staged=3)
    run(proposer, how, "exact-match", max_tokens=30)
    assert lookup.histories == []


MAIN, DRAFT = Toy("a", "b", "ab", "c"), Toy("c", "b", "a", "cc")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("wrong_at", [1, 2, NEVER])
def test_staging_with_a_different_vocabulary(temperature, wrong_at):
    """A main model token may be two draft model tokens, so that one call becomes several."""
    how, found, n_calls = unfiltered(temperature=temperature), [], []
    for n_staged in (0, 3):
        other = FakeModel(4, seed=5, max_logits=5)
        intersection = IntersectionModel(other, VocabularyMap(MAIN, DRAFT), 4)
        same = IntersectionModel(FakeModel(4, seed=5), VocabularyMap(MAIN, DRAFT), 4)
        same.logits = lambda history, same=same: _logits_after(same, history)
        lookup = GreedyLookup(same, wrong_at)
        proposer = RecordingDraft(
            intersection, Sampler(how), Chain(), n_vocab=4, lookups=[lookup], n_staged=n_staged
        )
        main = FakeModel(4, seed=3)
        tokens, _ = run(proposer, how, main=main, prompt=[0, 2, 1], draft_max=5, max_tokens=40)
        found.append((tokens, proposer.proposals))
        n_calls.append(len(other.calls))
    assert found[0] == found[1]
    if wrong_at == NEVER and not temperature:
        assert n_calls[1] < 0.8 * n_calls[0]


def _logits_after(model, history):
    model.truncate(0)
    return calls.run(model.call(history, n_logits=1))[0].copy()
