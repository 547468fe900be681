"""The context index against a linear search."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from spec_local.datastore.context_index import SEPARATOR, ContextIndex

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), max_size=6)
large = st.sampled_from([0, 1, 255, 256, 65535, 151935])


def joined(several):
    return np.array([t for text in several for t in [*text, SEPARATOR]], np.int32)


def linear_search(several, history):
    """For each position of each text: tokens of matching context, up to 32, and the tokens that follow."""
    for text in several:
        for at in range(1, len(text)):
            n = 0
            while n < min(at, len(history), 32) and text[at - 1 - n] == history[-1 - n]:
                n += 1
            yield n, tuple(text[at:])


def found(index, history, **limits):
    matches = index.find(history, **limits)
    rows = index.continuations([position for _, position in matches], 80).tolist()
    return [(n, tuple(t for t in row if t >= 0)) for (n, _), row in zip(matches, rows, strict=True)]


def check_find(several, history, limit):
    several = [text for text in several if text]
    expected = [(n, then) for n, then in linear_search(several, history) if n >= 3]
    longest = max((n for n, _ in expected), default=0)
    expected = sorted(n for n, _ in expected if n >= longest - 4)[::-1]
    got = found(ContextIndex.build(joined(several)), history, limit=limit)
    assert [n for n, _ in got] == expected[:limit]
    remaining = list(linear_search(several, history))
    for each in got:
        remaining.remove(each)  # every position is real, and none is returned twice


@given(texts, st.lists(st.integers(0, 2), max_size=40), st.integers(1, 30))
@example([], [0, 0, 0], 8)
@example([[0] * 60, [0] * 60], [0] * 40, 30)
@example([[0, 1, 2, 1, 1, 1, 2, 0, 2], [2, 1, 1, 2, 0, 1], [1, 1, 2, 0, 0]], [0, 1, 2, 1, 1, 1, 2, 0], 8)
@example([[0] * 32 + [1] + [0] * 32 + [2]], [0] * 32, 5)
def test_finds_what_a_linear_search_finds(several, history, limit):
    check_find(several, history, limit)


@given(st.lists(st.lists(large, min_size=1, max_size=50), max_size=4), st.data())
def test_finds_prefixes_of_its_own_texts(several, data):
    whole = [t for text in several for t in text] or [0]
    end = data.draw(st.integers(0, len(whole)))
    check_find(several, whole[:end], 10)


def test_of_equal_contexts_the_latest_is_first():
    index = ContextIndex.build(joined([[*[7] * 40, 1], [*[7] * 40, 2], [*[7] * 40, 3]]))
    assert [then for _, then in found(index, [7] * 40) if len(then) == 1] == [(3,), (2,), (1,)]


def test_no_context_or_continuation_crosses_a_text_boundary():
    index = ContextIndex.build(joined([[1, 2, 3], [4, 5, 6, 7]]))
    assert found(index, [1, 2, 3, 4, 5, 6]) == [(3, (7,))]
    assert found(index, [1, 2, 3]) == []


def test_tokens_returns_the_indexed_texts():
    tokens = joined([[1, 2], [3]])
    assert ContextIndex.build(tokens).tokens.tolist() == tokens.tolist()
    again = ContextIndex.build(tokens)
    assert ContextIndex(again.reversed_words, again.positions).find([1, 2, 3]) == []


def test_a_continuation_ends_before_a_token_outside_the_vocabulary():
    index = ContextIndex.build(joined([[1, 1, 1, 5, 99, 6]]))
    [(_, position)] = index.find([1, 1, 1])
    assert index.continuations([position], 4).tolist() == [[5, 99, 6, -1]]
    assert index.continuations([position], 4, n_vocab=99).tolist() == [[5, -1, -1, -1]]
