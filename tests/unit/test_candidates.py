"""Lookup candidates with acceptance rates: their values, their parts, and one tree of several."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.proposal import ROOT, Proposal, path_to
from spec_local.policies.candidates import merged, path_values


def candidates(tokens, parents, confidence, source="suffix"):
    return Proposal(tokens, parents, source=source, confidence=confidence)


CHAIN = candidates([1, 2, 3], range(-1, 2), [0.9, 0.8, 0.5])
FORK = candidates([1, 4, 5], [ROOT, 0, ROOT], [0.6, 0.7, 0.3], "datastore")


def test_the_value_of_a_node_is_the_product_along_its_path():
    assert path_values(CHAIN).tolist() == pytest.approx([0.9, 0.72, 0.36])
    assert path_values(FORK).tolist() == pytest.approx([0.6, 0.42, 0.3])


def test_paths_that_several_lookups_found_are_one():
    tree = merged([CHAIN, FORK])
    assert tree.tokens == [1, 2, 3, 4, 5]
    assert tree.parents == [ROOT, 0, 1, 0, ROOT]
    assert tree.confidence == [0.9, 0.8, 0.5, 0.7, 0.3]
    assert tree.source == "suffix"
    assert merged([FORK, CHAIN]).confidence == [0.9, 0.7, 0.3, 0.8, 0.5]


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
    return candidates(tokens, parents, [draw(st.floats(0.01, 0.99)) for _ in tokens])


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
        for path, chance in zip(paths(each), each.confidence, strict=True):
            highest[path] = max(highest.get(path, 0.0), chance)
    assert dict(zip(paths(tree), tree.confidence, strict=True)) == highest
