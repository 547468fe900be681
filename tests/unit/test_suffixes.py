"""Suffix lookup: chains and trees against the counts of the text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.proposal import ROOT, Limit, is_chain, path_to
from spec_local.lookups.base import match_confidence
from spec_local.lookups.suffixes import SuffixLookup

CHAIN, TREE = Limit(8, 8, 1), Limit(8, 16, 8)


def test_a_single_continuation_is_followed_to_the_end():
    found = SuffixLookup().find([5, 6, 7, 8, 9, 1, 5, 6, 7], CHAIN)
    assert list(found.tokens) == [8, 9, 1, 5, 6, 7]
    assert is_chain(found.parents)
    # A single continuation: confidence depends on the length of the match only.
    assert list(found.confidence) == [match_confidence(match) for match in range(3, 9)]
    assert found.source == "suffix"


def test_the_most_frequent_continuation_comes_first():
    text = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 4, 9, 1, 2]
    found = SuffixLookup().find(text, TREE)
    children = [
        (t, c) for t, p, c in zip(found.tokens, found.parents, found.confidence, strict=True) if p == ROOT
    ]
    assert children == [(4, match_confidence(2, 3, 2 / 3)), (3, match_confidence(2, 3, 1 / 3))]
    below = [found.tokens[n] for n, parent in enumerate(found.parents) if parent == 0]
    assert below == [0, 9]
    chain = SuffixLookup().find(text, CHAIN)
    assert (chain.tokens[0], chain.confidence[0]) == children[0]


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_matches_below_the_minimum_length_give_no_candidates(shortest):
    lookup = SuffixLookup(shortest)
    for match in (1, 2, 3):
        text = [7, 8, 9, 1, *([7, 8, 9][3 - match :])]
        assert bool(lookup.find(text, CHAIN).tokens) == (match >= shortest)


@settings(max_examples=80)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    depth=st.integers(1, 9),
    nodes=st.integers(1, 20),
    branches=st.integers(1, 6),
    cut=st.integers(0, 5),
)
def test_limits_are_respected_and_all_paths_occur_in_the_text(text, depth, nodes, branches, cut):
    lookup = SuffixLookup()
    lookup.find([*text, 3, 3, 3][: len(text) - cut + 1], TREE)  # another text first
    found = lookup.find(text, Limit(depth, nodes, branches))
    parents = list(found.parents)
    assert len(found.tokens) == len(parents) == len(found.confidence) <= nodes
    assert all(parent < node for node, parent in enumerate(parents))
    assert len(set(range(len(parents))) - set(parents)) <= branches
    assert len({*zip(found.tokens, parents, strict=True)}) == len(parents)
    assert all(0 < each < 1 for each in found.confidence)
    for node in range(len(parents)):
        path = [found.tokens[n] for n in path_to(parents, node)]
        assert len(path) <= depth
        context = [*text[-2:], *path]
        assert any(text[i : i + len(context)] == context for i in range(len(text)))
    fresh = SuffixLookup().find(list(text), Limit(depth, nodes, branches))
    assert (list(found.tokens), parents) == (list(fresh.tokens), list(fresh.parents))


def test_a_growing_list_is_not_fed_again():
    text, lookup = list(range(100)), SuffixLookup()
    lookup.find(text, CHAIN)
    automaton = lookup._automaton
    for token in (0, 1, 2):
        text.append(token)
    assert list(lookup.find(text, CHAIN).tokens) == list(range(3, 11))
    assert lookup._automaton is automaton
    lookup.find(text[:50], CHAIN)
    assert lookup._automaton is not automaton


def test_confidence_increases_with_match_count_and_share():
    for match, seen, share in itertools.product((1, 5, 60), (1, 3, 9), (0.2, 0.9)):
        confidence = match_confidence(match, seen, share)
        assert 0 < confidence < 1
        assert match_confidence(match + 1, seen, share) > confidence
        assert match_confidence(match, seen + 1, share) > confidence
        assert match_confidence(match, seen, share + 0.1) > confidence
