"""The suffix automaton against brute force."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_local.lookups.automaton import SuffixAutomaton

TEXTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 50_000), max_size=60),
    # Repeated pieces: states that are split again and again.
    st.lists(st.sampled_from([(0, 1), (1, 0), (0, 0, 1), (2,)]), max_size=20).map(
        lambda ps: [t for p in ps for t in p]
    ),
)


def ends(text, context):
    """The end positions of a context."""
    n = len(context)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == context]


def repeated(text, longest):
    """The longest suffix of at most `longest` tokens that occurred before."""
    n = max((n for n in range(1, len(text)) if len(ends(text, text[-n:])) > 1), default=0)
    return text[len(text) - min(n, longest) :]


def followed(text, context, longest):
    """Followers and their counts; counts are for the last `longest` tokens, including the follower."""
    found = {}
    for end in ends(text, context):
        if end < len(text):
            token = text[end]
            found.setdefault(token, len(ends(text, [*context, token][-longest:])))
    return found


def check(automaton, text, longest):
    """Check the repeated suffix, its followers, and their followers."""
    context = repeated(text, longest)
    state, match = automaton.repeated()
    assert match == len(context)
    todo = [(state, context, 3)] if match else []
    for state, context, depth in todo:
        expected = followed(text, context, longest)
        total, found = automaton.followers(state, 99)
        assert {token: n for token, n, _ in found} == expected
        assert [n for _, n, _ in found] == sorted(expected.values(), reverse=True)
        assert total == sum(expected.values())
        for width in (1, 2):
            assert automaton.followers(state, width) == (total, found[:width])
        first = ends(text, context)[0]
        assert automaton.first_continuation(state, 5) == text[first : first + 5]
        if depth:
            todo += [(after, [*context, token][-longest:], depth - 1) for token, _, after in found]


@settings(max_examples=100)
@given(text=TEXTS, longest=st.sampled_from([1, 2, 3, 5, 64]), pieces=st.integers(1, 7))
@example(text=[0] * 40, longest=4, pieces=3)
@example(text=[0, 1] * 20, longest=3, pieces=1)
@example(text=[0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 0], longest=2, pieces=1)
def test_the_automaton_agrees_with_brute_force(text, longest, pieces):
    automaton = SuffixAutomaton(longest)
    for start in range(0, len(text), pieces):
        automaton.feed(text[start : start + pieces])
    assert automaton.text == text
    check(automaton, text, longest)


@pytest.mark.parametrize("period", [1, 2, 7, 50_000])
def test_for_long_texts_the_automaton_stays_small_and_its_counts_correct(period):
    """At most two states per token."""
    text = [i % period for i in range(20_000)]
    automaton = SuffixAutomaton(8)
    automaton.feed(text)
    assert len(automaton._next) <= 2 * len(text)
    state, match = automaton.repeated()
    if period > len(text):
        assert match == 0
        return
    assert match == 8
    expected = len(range(8 + (len(text) - 8) % period, len(text), period))
    assert automaton.followers(state, 4)[0] in (expected, expected + 1)


def test_only_the_first_64_different_followers_are_ranked():
    automaton = SuffixAutomaton()
    automaton.feed([x for follower in range(1, 100) for x in (0, follower)] + [0])
    total, found = automaton.followers(automaton.repeated()[0], 99)
    assert (total, [token for token, _, _ in found]) == (64, list(range(1, 65)))
