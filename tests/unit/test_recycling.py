"""Token recycling: what is kept of the main model's logits, and the trees built from it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spec_local.core.proposal import EMPTY, ROOT, Limit, Proposal, path_to
from spec_local.engine.events import Step
from spec_local.lookups.recycling import Recycling
from spec_local.testing import FakeModel
from tests.proposers import LookupProposer
from tests.unit.generation import events_of

NEW_WEIGHT = 0.35
WIDE = Limit(8, 64, 64)


def row(n_vocab=10, **probs):
    """Logits for probabilities such as ``t3=0.5``; all other tokens are negligible."""
    logits = np.full((1, n_vocab), -50.0, np.float32)
    for name, prob in probs.items():
        logits[0, int(name[1:])] = math.log(prob)
    return logits


def after(recycling, token, limit=WIDE):
    """Successors of a token and their probabilities."""
    found = recycling.find([token], limit)
    return {t: c for t, p, c in zip(found.tokens, found.parents, found.confidence, strict=True) if p == ROOT}


def test_no_candidates_after_a_token_without_logits():
    recycling = Recycling()
    assert recycling.find([3], WIDE) == EMPTY
    recycling.observe([4], row(t3=1.0))
    assert recycling.find([3], WIDE) == EMPTY


def test_candidates_have_a_share_of_the_probability():
    recycling = Recycling()
    recycling.observe([4], row(t3=0.75, t5=0.25))
    assert after(recycling, 4) == pytest.approx({3: NEW_WEIGHT * 0.75, 5: NEW_WEIGHT * 0.25}, rel=1e-3)
    assert recycling.find([4], WIDE).source == "recycling"


def test_repeated_predictions_gain_and_outdated_ones_decay():
    recycling = Recycling()
    for n in range(1, 8):
        recycling.observe([4], row(t3=1.0))
        assert after(recycling, 4) == pytest.approx({3: 1 - (1 - NEW_WEIGHT) ** n})
    before = after(recycling, 4)[3]
    recycling.observe([4], row(t5=1.0))
    assert after(recycling, 4) == pytest.approx({3: (1 - NEW_WEIGHT) * before, 5: NEW_WEIGHT})
    recycling.observe([4], row(t5=1.0))
    recycling.observe([4], row(t5=1.0))
    assert list(after(recycling, 4)) == [5, 3]


def test_each_row_belongs_to_its_token():
    recycling = Recycling()
    recycling.observe([4, 7, 9], np.concatenate([row(t1=1.0), row(t2=1.0), row(t3=1.0)]))
    assert [list(after(recycling, t)) for t in (4, 7, 9)] == [[1], [2], [3]]
    with pytest.raises(ValueError, match="shorter"):
        recycling.observe([4, 7], row(t1=1.0))


def test_the_logits_are_not_kept():
    recycling, logits = Recycling(), row(t3=1.0)
    recycling.observe([4], logits)
    logits[:] = row(t6=1.0)
    assert list(after(recycling, 4)) == [3]


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))
    | arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([0.0, 1.0, -1.0, -np.inf]))
)
def test_the_eight_most_probable_tokens_of_a_row_are_kept(logits):
    recycling = Recycling()
    recycling.observe([0], logits[None])
    best = logits.max()
    weights = {t: math.exp(x - best) for t, x in enumerate(logits.tolist()) if x > best - np.float32(5)}
    total = sum(weights.values())
    kept = [(t, weight / total) for t, weight in weights.items()]
    expected = sorted((NEW_WEIGHT * p for _, p in kept), reverse=True)[:8]
    found = after(recycling, 0)
    assert list(found.values()) == pytest.approx(expected[: len(found)], rel=1e-4)
    assert all(
        probability < 0.010001 for probability in expected[len(found) :]
    )  # below the minimum probability
    for token, probability in found.items():
        assert probability == pytest.approx(NEW_WEIGHT * dict(kept)[token], rel=1e-4)


@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_logits_are_ignored(worst):
    recycling = Recycling()
    recycling.observe([4], np.full((1, 10), worst, np.float32))
    broken = row(t3=1.0)
    broken[0, 7] = np.nan
    recycling.observe([4], broken)
    assert recycling.find([4], WIDE) == EMPTY


def test_a_prompt_is_learned_once_and_the_output_from_logits_only():
    recycling = Recycling()
    history = [1, 2, 1, 3, 1]
    assert after_all(recycling, history) == pytest.approx({3: NEW_WEIGHT, 2: (1 - NEW_WEIGHT) * NEW_WEIGHT})
    history += [4, 1]  # generated: learned by `observe`
    once = after_all(recycling, history)
    assert once == pytest.approx({3: NEW_WEIGHT, 2: (1 - NEW_WEIGHT) * NEW_WEIGHT})
    # The next turn is another list: only the pairs after the old history are new.
    assert after_all(recycling, [*history, 5, 1]) == pytest.approx(
        {t: (1 - NEW_WEIGHT) * p for t, p in once.items()} | {5: NEW_WEIGHT}
    )
    assert after_all(recycling, (*history, 5, 1))[5] == pytest.approx(NEW_WEIGHT)  # another type of sequence


def after_all(recycling, history):
    found = recycling.find(history, Limit(1, 64, 64))
    return dict(zip(found.tokens, found.confidence, strict=True))


def test_an_edited_conversation_is_learned_from_the_first_difference():
    recycling = Recycling()
    recycling.find([1, 2, 3, 4], WIDE)
    recycling.find([1, 2, 7, 4], WIDE)
    assert after(recycling, 1) == pytest.approx({2: NEW_WEIGHT})  # not twice
    assert after(recycling, 2) == pytest.approx({7: NEW_WEIGHT, 3: (1 - NEW_WEIGHT) * NEW_WEIGHT})
    assert after(recycling, 7) == pytest.approx({4: NEW_WEIGHT})


tables = st.dictionaries(
    st.integers(0, 5),
    st.dictionaries(st.integers(0, 5), st.integers(1, 20), min_size=1, max_size=5),
    max_size=6,
)


def trained(table):
    """Recycling after several rows with these probabilities."""
    recycling = Recycling()
    for token, weights in table.items():
        total = sum(weights.values())
        for _ in range(6):
            recycling.observe([token], row(6, **{f"t{t}": w / total for t, w in weights.items()}))
    return recycling


def path_probabilities(found):
    """Probability that the whole path to each node is accepted."""
    return [
        math.prod(found.confidence[n] for n in path_to(found.parents, node))
        for node in range(len(found.tokens))
    ]


@given(tables, st.integers(1, 5), st.integers(1, 30), st.integers(1, 8), st.integers(0, 5))
def test_trees_respect_limits_and_order_siblings(table, depth, nodes, branches, last):
    found = trained(table).find([last], Limit(depth, nodes, branches))
    proposal = Proposal(found.tokens, found.parents)
    assert len(found.tokens) <= nodes
    assert proposal.depth <= depth
    assert len(set(range(len(found.tokens))) - set(found.parents)) <= branches
    assert all(ROOT <= parent < node for node, parent in enumerate(found.parents))
    for children in proposal.children().values():
        tokens = [found.tokens[n] for n in children]
        probabilities = [found.confidence[n] for n in children]
        assert len(set(tokens)) == len(tokens)
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 1 + 1e-6


@settings(max_examples=50)
@given(tables, st.integers(1, 4), st.integers(1, 30), st.integers(0, 5))
def test_the_most_probable_nodes_are_taken(table, depth, nodes, last):
    recycling = trained(table)
    everything, level = [], [(last, 1.0)]
    for _ in range(depth):
        level = [
            (token, reach * probability)
            for above, reach in level
            for token, probability in after(recycling, above, Limit(1, 64, 64)).items()
        ]
        everything += [reach for _, reach in level if reach >= 0.01]
    found = recycling.find([last], Limit(depth, nodes, 64))
    assert path_probabilities(found) == pytest.approx(sorted(everything, reverse=True)[:nodes])


def test_one_branch_gives_the_most_probable_chain():
    recycling = trained({1: {2: 3, 3: 2}, 2: {4: 1}, 4: {5: 1}, 3: {5: 1}})
    found = recycling.find([1], Limit(8, 8, 1))
    assert (found.tokens, found.parents) == ([2, 4, 5], [ROOT, 0, 1])


def test_rejected_draft_tokens_are_learned_from():
    main = FakeModel(30, seed=5, order=1)
    proposer = LookupProposer(Recycling())
    events = events_of(main, [1], proposer, rule="exact-match", draft_max=4, max_tokens=12)
    steps = [event for event in events if isinstance(event, Step)]
    generated = {1, *(token for step in steps for token in step.tokens)}
    rejected = {token for step in steps for token in step.proposal.tokens} - generated
    assert rejected
    for token in rejected:
        expected = int(main.logits([0, token]).argmax())
        assert next(iter(after(proposer.lookup, token))) == expected
