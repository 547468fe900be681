"""Prompt lookup against looking everywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.proposal import Limit, is_chain
from spec_local.lookups import PromptLookup


def guess(history, limit, longest, shortest):
    copies = PromptLookup(longest, shortest).find(history, Limit(depth=limit, nodes=limit + 1, branches=1))
    assert is_chain(copies.parents)
    assert len(copies.tokens) == len(copies.parents) == len(copies.confidence)
    return list(copies.tokens)


def brute_force(history, limit, longest, shortest):
    """What followed the last earlier occurrence of the longest suffix that has one."""
    for n in range(min(longest, len(history) - 1), shortest - 1, -1):
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == history[-n:]:
                return history[start + n : start + n + limit]
    return []


@settings(max_examples=400)
@given(
    # 256 and its powers look alike in bytes at a wrong alignment.
    history=st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16777216]), min_size=1, max_size=60),
    limit=st.integers(1, 8),
    shortest=st.integers(1, 4),
    more=st.integers(0, 5),
)
def test_it_agrees_with_brute_force(history, limit, shortest, more):
    expected = brute_force(history, limit, shortest + more, shortest)
    assert guess(history, limit, shortest + more, shortest) == expected


@pytest.mark.parametrize(
    ("history", "guessed"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4], [9, 2, 3, 4]),  # the longest wins over the last
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3]),  # of equal ones the last
        ([5, 5, 5, 5], [5]),  # overlapping itself
        ([1, 2, 3], []),
        ([1, 2, 9, 1, 2], []),  # too short
        ([7], []),
    ],
)
def test_examples(history, guessed):
    assert guess(history, 4, 8, 3) == guessed


def test_the_guess_is_no_view_of_a_history_that_changes():
    history = [1, 2, 3, 4, 1, 2, 3]
    proposal = PromptLookup().find(history, Limit(2, 9, 9))
    history[3] = 99
    assert list(proposal.tokens) == [4, 1]


@pytest.mark.parametrize("limit", [Limit(2, 9, 1), Limit(9, 2, 1)])
def test_neither_depth_nor_nodes_are_exceeded(limit):
    history = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    proposal = PromptLookup().find(history, limit)
    assert list(proposal.tokens) == [4, 5]


def test_it_takes_microseconds():
    # A history as long as a large context; far from any limit that a slow machine would break.
    import time

    history = [i * 7919 % 50000 for i in range(100_000)]
    started = time.perf_counter()
    for _ in range(10):
        assert guess(history, 4, 8, 3) == brute_force_of_none()
    assert time.perf_counter() - started < 2


def brute_force_of_none():
    return [i * 7919 % 50000 for i in range(50_000, 50_004)]
