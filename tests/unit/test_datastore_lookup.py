"""The datastore lookup: the tree of its candidates, and its alignment with a repeated text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.core.proposal import Limit
from spec_local.datastore.context_index import SEPARATOR, ContextIndex
from spec_local.datastore.datastore import Datastore
from spec_local.datastore.lookup import DatastoreLookup

TEXT = [*range(100, 160)]


class Texts:
    """Searchable texts in memory."""

    def __init__(self, several):
        tokens = [token for text in several for token in [*text, SEPARATOR]]
        self.index = ContextIndex.build(np.array(tokens, np.int32))

    def find(self, history, length):
        pairs = self.index.find(history)
        return [n for n, _ in pairs], self.index.continuations([position for _, position in pairs], length)


def candidates(several, history, depth=8, nodes=16, branches=4):
    return DatastoreLookup(Texts(several)).find(history, Limit(depth, nodes, branches))


def test_no_match_no_candidates():
    assert candidates([], [1, 2, 3]).tokens == ()
    assert candidates([[1, 2, 3, 4]], [5, 6, 7]).tokens == ()


def test_a_unique_match_is_a_chain_of_growing_confidence():
    found = candidates([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [1, 2, 3, 4])
    assert (list(found.tokens), list(found.parents)) == ([5, 6, 7, 8, 9], [-1, 0, 1, 2, 3])
    assert list(found.confidence) == sorted(found.confidence)
    assert found.source == "datastore"
    longer = candidates([[*range(30)]], [*range(20)])
    assert longer.confidence[0] > found.confidence[0]


def test_the_more_frequent_continuation_comes_first():
    texts = [[1, 2, 3, 4, 7], [1, 2, 3, 4, 6], [1, 2, 3, 4, 6]]
    found = candidates(texts, [1, 2, 3, 4])
    roots = [(t, c) for t, p, c in zip(found.tokens, found.parents, found.confidence, strict=True) if p == -1]
    assert [t for t, _ in roots] == [6, 7]
    assert roots[0][1] == pytest.approx(2 * roots[1][1])
    assert sum(c for _, c in roots) < 1


def test_a_longer_match_has_more_weight():
    found = candidates([[9, 1, 2, 3, 4, 7], [8, 1, 2, 3, 4, 6]], [8, 1, 2, 3, 4])
    assert list(found.tokens[:1]) == [6]
    often = [[1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 3, 7], [9, 8, 7, 1, 2, 3, 6]]
    assert list(candidates(often, [9, 8, 7, 1, 2, 3]).tokens[:1]) == [6]


def test_the_last_depth_may_branch():
    found = candidates([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], [1, 2, 3], depth=2)
    assert (found.tokens[0], {*found.tokens[1:]}, list(found.parents)) == (4, {5, 6}, [-1, 0, 0])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=30), max_size=6),
    st.lists(st.integers(0, 2), min_size=3, max_size=8),  # too short for an alignment
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_candidates_are_a_tree_within_the_limit(several, history, depth, nodes, branches):
    found = candidates(several, history, depth, nodes, branches)
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
        # The path continues this context somewhere.
        start = history[-3:] + path
        assert any(start == text[i : i + len(start)] for text in several for i in range(len(text)))
    assert max(depths.values()) <= depth
    assert sum(node not in children for node in range(len(tokens))) <= branches
    for siblings in children.values():
        assert len({tokens[node] for node in siblings}) == len(siblings)
        confidences = [found.confidence[node] for node in siblings]
        assert confidences == sorted(confidences, reverse=True)
        assert 0 < sum(confidences) <= 1


def filled(folder, *texts):
    datastore = Datastore(folder / "texts", 1000)
    for text in texts:
        datastore.add_answer(text)
    return datastore


def chain(lookup, history, depth=8):
    return list(lookup.find(history, Limit(depth, depth, 1)).tokens)


def test_candidates_continue_one_token_after_a_change(tmp_path):
    lookup, history = DatastoreLookup(filled(tmp_path, TEXT)), TEXT[:12]
    assert chain(lookup, history)[:2] == [112, 113]
    history += [112, 9, 114]
    found = lookup.find(history, Limit(8, 8, 1))
    assert list(found.tokens) == [*range(115, 123)]
    assert list(found.parents) == [*range(-1, 7)]
    changed = found.confidence[0]
    # A search alone finds nothing.
    assert chain(DatastoreLookup(filled(tmp_path, TEXT)), history[-3:]) == []
    history += [115, 116, 117, 118]
    assert lookup.find(history, Limit(8, 8, 1)).confidence[0] > changed


def first_confidence(lookup, history):
    return lookup.find(history, Limit(8, 8, 1)).confidence[0]


def test_an_alignment_is_ranked_among_the_places_found(tmp_path):
    kept = filled(tmp_path, TEXT, [50, 51, 52, 130, 60, 61], [9, 158, 159, 77, 78])
    lookup, history = DatastoreLookup(kept), TEXT[:12]
    chain(lookup, history)
    history += [9, 113, 114, 115]  # a search finds a match of 3 tokens only
    assert first_confidence(lookup, history) > first_confidence(DatastoreLookup(kept), history[-4:])
    # One matching token elsewhere is weaker evidence than four found by a search.
    lookup, history = DatastoreLookup(kept), TEXT[:12]
    chain(lookup, history)
    history += [50, 51, 52, 130]
    assert chain(lookup, history)[:2] == [60, 61]
    # A text that has ended predicts nothing.
    lookup, history = DatastoreLookup(kept), TEXT[:57]
    chain(lookup, history)
    history += [9, 158, 159]
    assert chain(lookup, history) == [77, 78]


def test_a_new_history_starts_a_new_alignment(tmp_path):
    lookup = DatastoreLookup(filled(tmp_path, TEXT))
    chain(lookup, TEXT[:12])
    assert chain(lookup, [*TEXT[:1], 9, 113]) == []
    history = TEXT[:12]
    chain(lookup, history)
    history += [9, 113]
    assert chain(lookup, history)[:1] == [114]
    del history[2:]
    assert chain(lookup, history) == []


def test_substitutions_in_the_prompt_apply_to_the_answer(tmp_path):
    prompt, answer = [*range(200, 230)], [300, 301, 219, 220, 302, 303]
    lookup = DatastoreLookup(filled(tmp_path, [*prompt, *answer]))
    history = [*prompt[:20], 9, 8, *prompt[21:]]
    assert chain(lookup, history) == [300, 301, 219, 9, 8, 302, 303]
    for n in (1, 2, 3):  # whichever positions are searched
        assert chain(lookup, [5] * n + history) == [300, 301, 219, 9, 8, 302, 303]


def test_an_alignment_goes_beyond_the_first_search_result(tmp_path):
    text = [*range(100, 500)]
    lookup, history = DatastoreLookup(filled(tmp_path, text)), text[:12]
    for end in range(12, 390, 3):
        history = history[:12] if end == 12 else history
        assert chain(lookup, history)[:1] == [text[end]]
        history += text[end : end + 3]
    history += [9, text[391 + 1]]
    assert chain(lookup, history)[:1] == [text[393]]
