"""The properties of proposals."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.sampling import Distribution

# 5 has the children 7 (then 8, then 9) and 6; another 6 is a sibling of 5.
TREE = Proposal([5, 6, 7, 6, 8, 9], [ROOT, ROOT, 0, 0, 2, 4])


def test_a_path_leads_from_the_root_to_a_node():
    assert TREE.path(ROOT) == []
    assert TREE.path(1) == [1]
    assert TREE.path(5) == [0, 2, 4, 5]


def test_children_are_in_numerical_or_draw_order():
    assert TREE.children() == {ROOT: [0, 1], 0: [2, 3], 2: [4], 4: [5]}
    drawn = Proposal([5, 6, 7], [ROOT, ROOT, 0], "with replacement", {}, [1, 0, 1, 2, 2])
    assert drawn.children() == {ROOT: [1, 0, 1], 0: [2, 2]}  # a node that is drawn twice occurs twice


def test_follow_finds_the_longest_matching_path():
    for tokens, path in [
        ([], []),
        ([5], [0]),
        ([6, 7], [1]),
        ([5, 6, 8], [0, 3]),
        ([5, 7, 8, 9, 1], [0, 2, 4, 5]),
        ([9, 5], []),
    ]:
        assert TREE.follow(tokens) == path
    assert Proposal().follow([5]) == []


def test_a_part_keeps_parents_and_the_source():
    tree = Proposal([5, 6, 7, 8], [ROOT, 0, ROOT, 2], source="suffix")
    assert tree.part([3, 2]) == Proposal([7, 8], [ROOT, 0], source="suffix")
    assert tree.part([]).tokens == []


def test_a_chain_has_no_siblings():
    assert not TREE.is_chain
    assert Proposal().is_chain
    chain = Proposal.chain([3, 3, 1])
    assert chain.is_chain
    assert chain.depth == 3
    assert chain.drawing == "chosen"
    assert chain.children() == {ROOT: [0], 0: [1], 1: [2]}
    assert not Proposal([1, 2], [ROOT, ROOT]).is_chain


def test_a_drawn_chain_has_a_distribution_per_token():
    first, second = (Distribution(None, np.eye(3)[i]) for i in (0, 2))
    chain = Proposal.chain([0, 2], [first, second])
    assert chain.drawing == "one"
    assert chain.distributions == {ROOT: first, 0: second}
    empty = Proposal.chain([], [])
    assert (empty.drawing, list(empty.tokens)) == ("chosen", [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 30)), max_size=30))
def test_follow_finds_every_path_of_a_random_tree(nodes):
    parents = [min(parent, n - 1) for n, (_, parent) in enumerate(nodes)]
    tokens = [token for token, _ in nodes]
    tree, seen = Proposal(tokens, parents), set(zip(parents, tokens, strict=True))
    for node in range(len(nodes)):
        path = tree.path(node)
        assert [parents[n] for n in path] == [ROOT, *path[:-1]]
        if len(seen) == len(nodes):  # no two siblings have the same token
            assert tree.follow([tokens[n] for n in path]) == path
    assert sum(map(len, tree.children().values())) == len(nodes)
    assert tree.depth == max((len(tree.path(n)) for n in range(len(nodes))), default=0)
