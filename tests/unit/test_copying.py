"""What a policy does with copies: their values, one tree of several, what became of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.proposal import ROOT, Proposal, path_to
from spec_local.lookups import Candidates
from spec_local.policies.copying import Candidate, fates, merged


def candidate(tokens, parents, chances, source="suffix"):
    return Candidate(tokens, parents, np.array(chances), source)


CHAIN = candidate([1, 2, 3], range(-1, 2), [0.9, 0.8, 0.5])
FORK = candidate([1, 4, 5], [ROOT, 0, ROOT], [0.6, 0.7, 0.3], "cache")


def test_a_nodes_value_is_the_product_of_its_path():
    assert CHAIN.values.tolist() == pytest.approx([0.9, 0.72, 0.36])
    assert FORK.values.tolist() == pytest.approx([0.6, 0.42, 0.3])


def test_a_part_has_parents_before_children():
    assert CHAIN.part([0, 1]) == Proposal([1, 2], range(-1, 1), source="suffix")
    assert FORK.part([0, 2]) == Proposal([1, 5], [ROOT, ROOT], source="cache")
    assert FORK.part([1, 0]) == Proposal([1, 4], [ROOT, 0], source="cache")


def test_paths_that_several_found_are_one():
    tree = merged([CHAIN, FORK])
    assert tree.tokens == [1, 2, 3, 4, 5]
    assert tree.parents == [ROOT, 0, 1, 0, ROOT]
    assert tree.chances.tolist() == [0.9, 0.8, 0.5, 0.7, 0.3]
    assert tree.source == "suffix"
    assert merged([FORK, CHAIN]).chances.tolist() == [0.9, 0.7, 0.3, 0.8, 0.5]


def trees(draw):
    n = draw(st.integers(1, 8))
    nodes = []
    for node in range(n):
        nodes.append((draw(st.integers(0, 3)), draw(st.integers(-1, node - 1)) if node else -1))
    kept = {}
    for token, parent in nodes:  # siblings differ
        if parent == -1 or parent in kept.values():
            kept.setdefault((token, parent), len(kept))
    tokens, parents = zip(*kept, strict=True)
    return candidate(tokens, parents, [draw(st.floats(0.01, 0.99)) for _ in tokens])


@settings(max_examples=200)
@given(several=st.lists(st.composite(trees)(), min_size=1, max_size=3))
def test_a_merged_tree_has_every_path_once(several):
    tree = merged(several)

    def paths(of):
        return [tuple(of.tokens[n] for n in path_to(of.parents, node)) for node in range(len(of.tokens))]

    assert sorted(paths(tree)) == sorted({path for each in several for path in paths(each)})
    assert all(parent < node for node, parent in enumerate(tree.parents))
    highest = {}
    for each in several:
        for path, chance in zip(paths(each), each.chances, strict=True):
            highest[path] = max(highest.get(path, 0.0), chance)
    assert dict(zip(paths(tree), tree.chances, strict=True)) == highest


@pytest.mark.parametrize(
    ("parents", "said", "expected"),
    [
        (range(-1, 2), [1, 2, 3], [(0, True), (1, True), (2, True)]),
        (range(-1, 2), [1, 9, 3], [(0, True), (1, False)]),
        (range(-1, 2), [1], [(0, True)]),  # what would have followed is not known
        (range(-1, 2), [9], [(0, False)]),
        ([ROOT, ROOT, 1], [2, 3], [(0, False), (1, True), (2, True)]),
        ([ROOT, ROOT, 1], [2], [(0, False), (1, True)]),
        ([ROOT, ROOT, 1], [9, 3], [(0, False), (1, False)]),
    ],
)
def test_what_became_of_guesses(parents, said, expected):
    assert list(fates(Candidates([1, 2, 3], parents, [0.5] * 3, "x"), said)) == expected
