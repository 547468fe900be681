"""The index of contexts against a plain search, and what a lookup makes of what it finds."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spec_local.datastore.lookup import DatastoreLookup
from spec_local.datastore.text_index import SEPARATOR, ContextIndex
from spec_local.proposers.base import Limit

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), max_size=6)
large = st.sampled_from([0, 1, 255, 256, 65535, 151935])


def joined(several):
    return np.array([t for text in several for t in [*text, SEPARATOR]], np.int32)


def plain_search(several, history):
    """For each place of each text: how much of its context, up to 32, is the history's end; and what followed."""
    for text in several:
        for at in range(1, len(text)):
            n = 0
            while n < min(at, len(history), 32) and text[at - 1 - n] == history[-1 - n]:
                n += 1
            yield n, tuple(text[at:])


def found(index, history, **limits):
    matches = index.find(history, **limits)
    rows = index.continuations([place for _, place in matches], 80).tolist()
    return [(n, tuple(t for t in row if t >= 0)) for (n, _), row in zip(matches, rows, strict=True)]


def agrees(several, history, most):
    several = [text for text in several if text]
    expected = [(n, then) for n, then in plain_search(several, history) if n >= 3]
    longest = max((n for n, _ in expected), default=0)
    expected = sorted(n for n, _ in expected if n >= longest - 4)[::-1]
    got = found(ContextIndex.of(joined(several)), history, most=most)
    assert [n for n, _ in got] == expected[:most]
    remaining = list(plain_search(several, history))
    for each in got:
        remaining.remove(each)  # it is there, and no place is told twice


@given(texts, st.lists(st.integers(0, 2), max_size=40), st.integers(1, 30))
@example([], [0, 0, 0], 8)
@example([[0] * 60, [0] * 60], [0] * 40, 30)
@example([[0, 1, 2, 1, 1, 1, 2, 0, 2], [2, 1, 1, 2, 0, 1], [1, 1, 2, 0, 0]], [0, 1, 2, 1, 1, 1, 2, 0], 8)
@example([[0] * 32 + [1] + [0] * 32 + [2]], [0] * 32, 5)
def test_it_finds_what_a_plain_search_finds(several, history, most):
    agrees(several, history, most)


@given(st.lists(st.lists(large, min_size=1, max_size=50), max_size=4), st.data())
def test_the_ends_of_its_own_texts_are_found(several, data):
    whole = [t for text in several for t in text] or [0]
    end = data.draw(st.integers(0, len(whole)))
    agrees(several, whole[:end], 10)


def test_of_equal_contexts_the_latest_is_first():
    index = ContextIndex.of(joined([[*[7] * 40, 1], [*[7] * 40, 2], [*[7] * 40, 3]]))
    assert [then for _, then in found(index, [7] * 40) if len(then) == 1] == [(3,), (2,), (1,)]


def test_no_context_and_no_copy_reaches_into_another_text():
    index = ContextIndex.of(joined([[1, 2, 3], [4, 5, 6, 7]]))
    assert found(index, [1, 2, 3, 4, 5, 6]) == [(3, (7,))]
    assert found(index, [1, 2, 3]) == []


def test_tokens_come_back():
    tokens = joined([[1, 2], [3]])
    assert ContextIndex.of(tokens).tokens.tolist() == tokens.tolist()
    again = ContextIndex.of(tokens)
    assert ContextIndex(again.mirrored, again.order).find([1, 2, 3]) == []


def test_a_copy_ends_before_a_token_that_is_none():
    index = ContextIndex.of(joined([[1, 1, 1, 5, 99, 6]]))
    [(_, place)] = index.find([1, 1, 1])
    assert index.continuations([place], 4).tolist() == [[5, 99, 6, -1]]
    assert index.continuations([place], 4, n_vocab=99).tolist() == [[5, -1, -1, -1]]


class Known:
    """Texts of which all is known."""

    def __init__(self, several):
        self.index = ContextIndex.of(joined(several))

    def find(self, history, length):
        pairs = self.index.find(history)
        return [n for n, _ in pairs], self.index.continuations([place for _, place in pairs], length)


def copies(several, history, depth=8, nodes=16, branches=4):
    return DatastoreLookup(Known(several)).find(history, Limit(depth, nodes, branches))


def test_nothing_is_found_in_nothing():
    assert copies([], [1, 2, 3]).tokens == ()
    assert copies([[1, 2, 3, 4]], [5, 6, 7]).tokens == ()


def test_a_unique_copy_is_a_chain_that_grows_surer():
    found = copies([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [1, 2, 3, 4])
    assert (list(found.tokens), list(found.parents)) == ([5, 6, 7, 8, 9], [-1, 0, 1, 2, 3])
    assert list(found.confidence) == sorted(found.confidence)
    assert found.source == "cache"
    longer = copies([[*range(30)]], [*range(20)])
    assert longer.confidence[0] > found.confidence[0]


def test_what_followed_more_often_comes_first():
    texts = [[1, 2, 3, 4, 7], [1, 2, 3, 4, 6], [1, 2, 3, 4, 6]]
    found = copies(texts, [1, 2, 3, 4])
    roots = [(t, c) for t, p, c in zip(found.tokens, found.parents, found.confidence, strict=True) if p == -1]
    assert [t for t, _ in roots] == [6, 7]
    assert roots[0][1] == pytest.approx(2 * roots[1][1])
    assert sum(c for _, c in roots) < 1


def test_a_longer_match_weighs_more():
    found = copies([[9, 1, 2, 3, 4, 7], [8, 1, 2, 3, 4, 6]], [8, 1, 2, 3, 4])
    assert list(found.tokens[:1]) == [6]
    often = [[1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 3, 7], [9, 8, 7, 1, 2, 3, 6]]
    assert list(copies(often, [9, 8, 7, 1, 2, 3]).tokens[:1]) == [6]


def test_the_last_depth_has_branches_too():
    found = copies([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], [1, 2, 3], depth=2)
    assert (found.tokens[0], {*found.tokens[1:]}, list(found.parents)) == (4, {5, 6}, [-1, 0, 0])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=30), max_size=6),
    st.lists(st.integers(0, 2), min_size=3, max_size=8),  # too short to follow a text over changes
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_copies_are_a_tree_within_the_limit(several, history, depth, nodes, branches):
    found = copies(several, history, depth, nodes, branches)
    tokens, parents = list(found.tokens), list(found.parents)
    assert len(tokens) == len(parents) == len(found.confidence) <= nodes
    depths, children = {-1: 0}, {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert parent < node
        depths[node] = depths[parent] + 1
        children.setdefault(parent, []).append(node)
        path = [token]
        while parent >= 0:
            path, parent = [tokens[parent], *path], parents[parent]
        # it is something that followed somewhere
        start = history[-3:] + path
        assert any(start == text[i : i + len(start)] for text in several for i in range(len(text)))
    assert max(depths.values()) <= depth
    assert sum(node not in children for node in range(len(tokens))) <= branches
    for siblings in children.values():
        assert len({tokens[node] for node in siblings}) == len(siblings)
        sure = [found.confidence[node] for node in siblings]
        assert sure == sorted(sure, reverse=True)
        assert 0 < sum(sure) <= 1
