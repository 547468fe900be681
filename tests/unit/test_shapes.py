"""Shapes against brute force, on the fake model."""

import heapq
import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.fake import FakeModel
from spec_local.core.proposal import ROOT
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.proposers import Beam, BestFirst, Chain, DraftModel, Drawn, Limit

V, PROMPT = 5, [1, 2, 3]
WIDE = Limit(depth=4, nodes=200, branches=200)
DRAWINGS = ["with replacement", "without replacement", "top and one"]


def model(**kwargs):
    return FakeModel(V, **({"max_branches": 300, "max_tokens": 300, "max_logits": 300} | kwargs))


def grow(shape, limit=WIDE, draft=None, *, how=None, ends=(), seed=0):
    """The proposal that follows the prompt."""
    draft = draft or model()
    how = how or SamplingSettings()
    proposer = DraftModel(draft, Sampler(how), shape, n_vocab=V, is_end=lambda token: token in ends)
    list(proposer.prefill(PROMPT))
    draft.calls.clear()
    return proposer.propose(PROMPT, limit, SeededRng(seed), lambda part: None)


def paths(proposal):
    """Each node as the tokens that lead to it."""
    return [tuple(proposal.tokens[n] for n in proposal.path(node)) for node in range(len(proposal.tokens))]


def leaves(proposal):
    return len(proposal.tokens) - len(set(proposal.parents) - {ROOT})


def probabilities(draft, path, temperature=1.0):
    logits = draft.logits([*PROMPT, *path]).astype(float) / (temperature or 1.0)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def values(draft, depth, width, ends=(), temperature=1.0):
    """The worth of every path that can be guessed."""
    found, level = {}, {(): 1.0}
    for _ in range(depth):
        below = {}
        for path, worth in level.items():
            probs = probabilities(draft, path, temperature)
            for token in np.argsort(-probs)[:width].tolist():
                below[(*path, token)] = worth * probs[token]
        found |= below
        level = {path: worth for path, worth in below.items() if path[-1] not in ends}
    return found


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize("ends", [(), (0, 3)])
def test_best_first_finds_the_most_probable_nodes_of_all(temperature, ends):
    for seed, (n, depth, width) in enumerate(itertools.product((1, 2, 7, 20, 60), (1, 2, 4), (1, 2, 8))):
        draft = model(seed=seed, scale=(0.5, 1.0, 3.0)[seed % 3])
        how = SamplingSettings(temperature=temperature)
        proposal = grow(BestFirst(n, width), Limit(depth, 200, 200), draft, how=how, ends=ends)
        worth = values(draft, depth, width, ends, temperature)
        assert set(paths(proposal)) == set(heapq.nlargest(n, worth, key=worth.__getitem__))
        assert proposal.drawing == "chosen"


def test_best_first_guesses_what_the_settings_leave():
    draft = model(scale=0.5)
    proposal = grow(BestFirst(60), draft=draft, how=SamplingSettings(top_k=2, logit_bias={0: -np.inf}))
    assert len(proposal.tokens) == 2 + 4 + 8 + 16
    assert 0 not in proposal.tokens


def test_best_first_of_a_sure_draft_is_a_chain():
    proposal = grow(BestFirst(4), draft=model(scale=40.0))
    assert proposal.is_chain
    assert proposal.depth == 4


def beam_search(draft, width, nodes, depth, ends=(), temperature=1.0):
    """The paths of each round, and what they pass through, as long as that is not too much."""
    beams, kept = {(): 1.0}, set()
    for _ in range(depth):
        if all(path and path[-1] in ends for path in beams):
            break
        grown = {}
        for path, worth in beams.items():
            if path and path[-1] in ends:
                grown[path] = worth
                continue
            for token, prob in enumerate(probabilities(draft, path, temperature)):
                grown[(*path, token)] = worth * prob
        beams = {path: grown[path] for path in heapq.nlargest(width, grown, key=grown.__getitem__)}
        merged = {path[:n] for path in beams for n in range(1, len(path) + 1)}
        if len(merged) > nodes:
            break
        kept = merged
    return kept


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize("ends", [(), (0, 3)])
def test_beams_are_those_of_a_beam_search(temperature, ends):
    for seed, (width, nodes, depth) in enumerate(itertools.product((1, 2, 3, 7), (1, 3, 8, 50), (1, 2, 5))):
        draft = model(seed=seed, scale=(0.5, 1.0, 3.0)[seed % 3])
        how = SamplingSettings(temperature=temperature)
        proposal = grow(Beam(width, nodes), Limit(depth, 200, 200), draft, how=how, ends=ends)
        assert set(paths(proposal)) == beam_search(draft, min(width, nodes), nodes, depth, ends, temperature)
        assert proposal.drawing == "chosen"


EVERY_KIND = pytest.mark.parametrize(
    "make",
    [
        Chain,
        partial(BestFirst, 30, 3),
        partial(Beam, 4, 50),
        *(partial(Drawn, drawing, 12, 3) for drawing in DRAWINGS),
    ],
    ids=["chain", "best first", "beam", *DRAWINGS],
)


@EVERY_KIND
def test_the_draft_reads_each_level_in_one_call(make):
    draft = model(scale=1.0)
    proposal = grow(make(), draft=draft)
    assert len(draft.calls) <= WIDE.depth
    assert draft.calls[0] == 1  # the text's last token
    inner = {len(path) for node, path in enumerate(paths(proposal)) if node in proposal.parents}
    assert set(range(1, len(draft.calls))) >= inner


@settings(max_examples=300, deadline=None)
@given(
    shape=st.sampled_from([Chain, Drawn, BestFirst, Beam]),
    drawing=st.sampled_from(DRAWINGS),
    width=st.integers(1, 6),
    most=st.integers(1, 20),
    limit=st.builds(Limit, st.integers(1, 6), st.integers(1, 12), st.integers(1, 12)),
    room=st.integers(0, 12),
    branches=st.integers(1, 12),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0, 1]),
)
def test_no_limit_is_exceeded(shape, drawing, width, most, limit, room, branches, seed, scale, temperature):
    """Neither those of the proposal nor the draft's own, which refuses what is too much."""
    draft = model(seed=seed, scale=scale, n_ctx=len(PROMPT) - 1 + room, max_branches=branches)
    make = {
        Chain: Chain,
        Drawn: lambda: Drawn(drawing, most, width),
        BestFirst: lambda: BestFirst(most, width),
        Beam: lambda: Beam(width, most),
    }[shape]
    proposal = grow(make(), limit, draft, how=SamplingSettings(temperature=temperature), ends=(4,), seed=seed)
    assert proposal.depth <= min(limit.depth, room)
    assert len(proposal.tokens) <= limit.nodes
    assert leaves(proposal) <= limit.branches
    if shape is not Chain:
        assert len(proposal.tokens) <= most
        assert all(len(children) <= max(width, 1) for children in proposal.children().values()) or (
            shape is Beam or proposal.drawing == "with replacement"
        )
    assert (len(proposal.tokens) > 0) == (room > 0)
    named = paths(proposal)
    assert len(set(named)) == len(named)  # no two children of a node are the same
    assert not any(4 in path[:-1] for path in named)  # nothing follows an end


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"max_logits": 3}], ids=str)
@EVERY_KIND
def test_a_level_is_no_larger_than_a_call_of_the_draft_may_be(make, limits):
    assert grow(make(), draft=model(scale=0.1, **limits)).tokens


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_drawn_tree_spends_its_budget_and_no_more(drawing):
    for seed, (budget, width, depth) in enumerate(itertools.product((1, 2, 5, 8), (2, 3, 5), (1, 2, 4))):
        proposal = grow(
            Drawn(drawing, budget, width), Limit(depth, 200, 200), model(seed=seed, scale=1.0), seed=seed
        )
        most = min(budget, width * depth)  # chains beside each other
        if drawing == "top and one":  # may find that few children are worth more than all nodes
            assert min(budget, depth) <= len(proposal.draws) <= most
        else:
            assert len(proposal.draws) == most
        assert len(proposal.tokens) == len(proposal.draws) or drawing == "with replacement"
        assert sorted(set(proposal.draws)) == list(range(len(proposal.tokens)))


@pytest.mark.parametrize("how", [SamplingSettings(), SamplingSettings(repeat_penalty=3.0, penalty_window=2)])
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_drawn_children_come_with_what_they_were_drawn_from(drawing, how):
    """And that is what main would be asked for in its place: a penalty counts the guesses above."""
    draft = model(scale=1.0)
    proposal = grow(Drawn(drawing, 9, 3), draft=draft, how=how, seed=3)
    assert proposal.drawing == drawing
    for parent, children in proposal.children().items():
        history = [*PROMPT, *(proposal.tokens[n] for n in proposal.path(parent))]
        expected = Sampler(how).distribution(draft.logits(history), history)
        assert proposal.distributions[parent].dense(V).tolist() == expected.dense(V).tolist()
        if drawing == "top and one":
            top = proposal.distributions[parent].top(len(children) - 1)[0].tolist()
            assert [proposal.tokens[n] for n in children[:-1]] == top


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_drawn_tree_learns_how_wide_to_be(drawing):
    """A draft that is always right gets chains; one that is always wrong gets children beside each other."""
    right, wrong = Drawn(drawing, 4), Drawn(drawing, 4)
    for _ in range(200):
        right.learn(4, True)
        wrong.learn(0, False)
    assert grow(right, draft=model(scale=0.2)).is_chain
    assert len(grow(wrong, draft=model(scale=0.2)).children()[ROOT]) > 1


def test_a_sure_draft_gets_a_chain_and_an_unsure_one_branches():
    shape = Drawn("top and one", 4)
    for i in range(200):  # a guess stood once in five times
        shape.learn(int(i % 4 == 0), False)
    sure, unsure = (grow(shape, draft=model(scale=scale)) for scale in (40.0, 0.1))
    assert sure.is_chain
    assert sure.depth == 4
    assert len(unsure.children()[ROOT]) > 1


def test_a_shape_hears_what_its_proposal_was_worth():
    """How many guesses stood, and whether the proposal simply went no further."""

    class Two(Chain):
        def __init__(self):
            super().__init__("greedy")
            self.heard = []

        def learn(self, n_accepted, exhausted):
            self.heard.append((n_accepted, exhausted))

    for right, expected in [(2, (2, True)), (1, (1, False)), (0, (0, False))]:
        shape, draft = Two(), model()
        proposer = DraftModel(draft, Sampler(SamplingSettings()), shape, n_vocab=V)
        guess = list(proposer.propose(PROMPT, Limit(2, 9, 9), SeededRng(0), lambda part: None).tokens)
        said = [*guess[:right], (guess[right] + 1) % V] if right < 2 else [*guess, 0]
        proposer.commit([*PROMPT, *said])
        proposer.commit([*PROMPT, *said])
        assert shape.heard == [expected]  # and once only
        read = [*PROMPT, *guess[: min(right, 1)]]  # the last guess is never read
        assert list(draft.cached) == read


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_draft_that_can_give_one_token_only_is_asked_for_one(drawing):
    proposal = grow(Drawn(drawing, 8, 4), how=SamplingSettings(temperature=0))
    assert proposal.is_chain
    assert proposal.depth == WIDE.depth


def test_a_chain_is_drawn_or_greedy():
    draft = model()
    drawn, greedy = grow(Chain(), draft=draft), grow(Chain("greedy"), draft=draft)
    assert (drawn.drawing, greedy.drawing) == ("one", "chosen")
    assert drawn.is_chain
    assert greedy.is_chain
    assert sorted(drawn.distributions) == [ROOT, 0, 1, 2]
    path = []
    for token in greedy.tokens:
        assert token == probabilities(draft, path).argmax()
        path.append(token)
    assert len(path) == WIDE.depth


def test_a_chain_ends_with_an_end_token():
    for seed in range(10):
        tokens = list(grow(Chain(), ends=(0, 1, 2), draft=model(seed=seed), seed=seed).tokens)
        assert len(tokens) == 4 or tokens[-1] in (0, 1, 2)
        assert not set(tokens[:-1]) & {0, 1, 2}
