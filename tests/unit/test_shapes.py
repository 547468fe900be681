"""Shapes of drafts, compared with brute force on the fake model."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.proposal import ROOT, Limit
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import Beam, BestFirst, Drawn
from spec_local.testing import FakeModel
from tests.unfiltered import unfiltered

V, PROMPT = 5, [1, 2, 3]
WIDE = Limit(depth=4, nodes=200, branches=200)
DRAWINGS = ["with replacement", "without replacement"]


def model(**kwargs):
    return FakeModel(V, **({"max_branches": 300, "max_tokens": 300, "max_logits": 300} | kwargs))


def grow(shape, limit=WIDE, draft=None, *, sampling=None, ends=(), seed=0):
    """Return the proposal after the prompt."""
    draft = draft or model()
    sampling = sampling or unfiltered()
    proposer = DraftModel(draft, Sampler(sampling), shape, n_vocab=V, is_end=lambda token: token in ends)
    run(proposer.prefill(PROMPT))
    draft.calls.clear()
    return run(proposer.propose(PROMPT, limit, SeededRng(seed)))


def paths(proposal):
    """Return the tokens on the path to each node."""
    return [tuple(proposal.tokens[n] for n in proposal.path(node)) for node in range(len(proposal.tokens))]


def leaves(proposal):
    return len(proposal.tokens) - len(set(proposal.parents) - {ROOT})


def probabilities(draft, path, temperature=1.0):
    logits = draft.logits([*PROMPT, *path]).astype(float) / (temperature or 1.0)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def path_values(draft, depth, width, ends=(), temperature=1.0):
    """Return the probability of every path that can be drafted."""
    found, level = {}, {(): 1.0}
    for _ in range(depth):
        below = {}
        for path, value in level.items():
            probs = probabilities(draft, path, temperature)
            for token in np.argsort(-probs)[:width].tolist():
                below[(*path, token)] = value * probs[token]
        found |= below
        level = {path: value for path, value in below.items() if path[-1] not in ends}
    return found


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize("ends", [(), (0, 3)])
def test_best_first_finds_the_most_probable_nodes(temperature, ends):
    for seed, (n, depth, width) in enumerate(itertools.product((1, 2, 7, 20, 60), (1, 2, 4), (1, 2, 8))):
        draft = model(seed=seed, scale=(0.5, 1.0, 3.0)[seed % 3])
        sampling = unfiltered(temperature=temperature)
        proposal = grow(BestFirst(n, width), Limit(depth, 200, 200), draft, sampling=sampling, ends=ends)
        found = path_values(draft, depth, width, ends, temperature)
        assert set(paths(proposal)) == set(heapq.nlargest(n, found, key=found.__getitem__))
        assert proposal.drawing == "chosen"


def test_best_first_drafts_only_tokens_that_the_settings_allow():
    draft = model(scale=0.5)
    proposal = grow(BestFirst(60), draft=draft, sampling=unfiltered(top_k=2, logit_bias={0: -np.inf}))
    assert len(proposal.tokens) == 2 + 4 + 8 + 16
    assert 0 not in proposal.tokens


def beam_search(draft, width, nodes, depth, ends=(), temperature=1.0):
    """Return the paths of the last round whose merged tree is within the limit, and their prefixes."""
    beams, kept = {(): 1.0}, set()
    for _ in range(depth):
        if all(path and path[-1] in ends for path in beams):
            break
        grown = {}
        for path, value in beams.items():
            if path and path[-1] in ends:
                grown[path] = value
                continue
            for token, prob in enumerate(probabilities(draft, path, temperature)):
                grown[(*path, token)] = value * prob
        beams = {path: grown[path] for path in heapq.nlargest(width, grown, key=grown.__getitem__)}
        merged = {path[:n] for path in beams for n in range(1, len(path) + 1)}
        if len(merged) > nodes:
            break
        kept = merged
    return kept


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize("ends", [(), (0, 3)])
def test_beam_equals_a_plain_beam_search(temperature, ends):
    for seed, (width, nodes, depth) in enumerate(itertools.product((1, 2, 3, 7), (1, 3, 8, 50), (1, 2, 5))):
        draft = model(seed=seed, scale=(0.5, 1.0, 3.0)[seed % 3])
        sampling = unfiltered(temperature=temperature)
        proposal = grow(Beam(width, nodes), Limit(depth, 200, 200), draft, sampling=sampling, ends=ends)
        assert set(paths(proposal)) == beam_search(draft, min(width, nodes), nodes, depth, ends, temperature)
        assert proposal.drawing == "chosen"


@settings(max_examples=120)
@given(
    shape=st.sampled_from([Chain, Drawn, BestFirst, Beam]),
    drawing=st.sampled_from(DRAWINGS),
    width=st.integers(1, 6),
    nodes=st.integers(1, 20),
    limit=st.builds(Limit, st.integers(1, 6), st.integers(1, 12), st.integers(1, 12)),
    room=st.integers(0, 12),
    branches=st.integers(1, 12),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0, 1]),
)
def test_no_limit_is_exceeded(shape, drawing, width, nodes, limit, room, branches, seed, scale, temperature):
    """Neither those of the proposal nor those of the draft model, which raises an error."""
    draft = model(seed=seed, scale=scale, n_ctx=len(PROMPT) - 1 + room, max_branches=branches)
    make = {
        Chain: Chain,
        Drawn: lambda: Drawn(drawing, nodes, width),
        BestFirst: lambda: BestFirst(nodes, width),
        Beam: lambda: Beam(width, nodes),
    }[shape]
    proposal = grow(make(), limit, draft, sampling=unfiltered(temperature=temperature), ends=(4,), seed=seed)
    assert proposal.depth <= min(limit.depth, room)
    assert len(proposal.tokens) <= limit.nodes
    assert leaves(proposal) <= limit.branches
    if shape is not Chain:
        assert len(proposal.tokens) <= nodes
        assert all(len(children) <= max(width, 1) for children in proposal.children().values()) or (
            shape is Beam or proposal.drawing == "with replacement"
        )
    assert (len(proposal.tokens) > 0) == (room > 0)
    found = paths(proposal)
    assert len(set(found)) == len(found)  # no two children of a node are the same
    assert not any(4 in path[:-1] for path in found)  # nothing follows an end token


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_drawn_tree_uses_exactly_its_budget(drawing):
    for seed, (budget, width, depth) in enumerate(itertools.product((1, 2, 5, 8), (2, 3, 5), (1, 2, 4))):
        proposal = grow(
            Drawn(drawing, budget, width), Limit(depth, 200, 200), model(seed=seed, scale=1.0), seed=seed
        )
        largest = min(budget, width * depth)  # parallel chains
        assert len(proposal.draws) == largest
        assert len(proposal.tokens) == len(proposal.draws) or drawing == "with replacement"
        assert sorted(set(proposal.draws)) == list(range(len(proposal.tokens)))


@pytest.mark.parametrize("sampling", [unfiltered(), unfiltered(repeat_penalty=3.0, penalty_window=2)])
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_drawn_children_have_the_distribution_they_were_drawn_from(drawing, sampling):
    """It is shaped like the main model's at that node: penalties count the draft tokens above."""
    draft = model(scale=1.0)
    proposal = grow(Drawn(drawing, 9, 3), draft=draft, sampling=sampling, seed=3)
    assert proposal.drawing == drawing
    for parent in proposal.children():
        history = [*PROMPT, *(proposal.tokens[n] for n in proposal.path(parent))]
        expected = Sampler(sampling).distribution(draft.logits(history), history)
        assert proposal.distributions[parent].dense(V).tolist() == expected.dense(V).tolist()


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_drawn_tree_adapts_its_width_to_the_acceptance_rate(drawing):
    """Chains if every draft token is accepted, siblings if none is."""
    accepted, rejected = Drawn(drawing, 4), Drawn(drawing, 4)
    for _ in range(200):
        accepted.observe(4, True)
        rejected.observe(0, False)
    assert grow(accepted, draft=model(scale=0.2)).is_chain
    assert len(grow(rejected, draft=model(scale=0.2)).children()[ROOT]) > 1


def test_a_shape_observes_how_much_of_its_proposal_is_accepted():
    """The number of accepted tokens, and whether they are a whole path; each once."""

    class Recording(Chain):
        def __init__(self):
            super().__init__("greedy")
            self.observed = []

        def observe(self, n_accepted, exhausted):
            self.observed.append((n_accepted, exhausted))

    for n_right, expected in [(2, (2, True)), (1, (1, False)), (0, (0, False))]:
        shape, draft = Recording(), model()
        proposer = DraftModel(draft, Sampler(unfiltered()), shape, n_vocab=V)
        proposal = run(proposer.propose(PROMPT, Limit(2, 9, 9), SeededRng(0)))
        drafted = list(proposal.tokens)
        next_token = (drafted[n_right] + 1) % V if n_right < 2 else 0
        output = [*drafted[:n_right], next_token]
        proposer.commit([*PROMPT, *output])
        proposer.commit([*PROMPT, *output])
        assert shape.observed == [expected]
        evaluated = [*PROMPT, *drafted[: min(n_right, 1)]]  # the last draft token is never evaluated
        assert list(draft.cached) == evaluated


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_distribution_of_one_token_gives_one_child(drawing):
    proposal = grow(Drawn(drawing, 8, 4), sampling=SamplingSettings(temperature=0))
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
