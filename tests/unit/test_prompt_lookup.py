"""Prompt lookup against brute force."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.proposal import Limit, is_chain
from spec_local.lookups.prompt_lookup import PromptLookup


def propose(history, limit, longest, shortest):
    candidates = PromptLookup(longest, shortest).find(
        history, Limit(depth=limit, nodes=limit + 1, branches=1)
    )
    assert is_chain(candidates.parents)
    assert len(candidates.tokens) == len(candidates.parents) == len(candidates.confidence)
    return list(candidates.tokens)


def brute_force(history, limit, longest, shortest):
    """The tokens after the last earlier occurrence of the longest suffix that has one."""
    for n in range(min(longest, len(history) - 1), shortest - 1, -1):
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == history[-n:]:
                return history[start + n : start + n + limit]
    return []


@settings(max_examples=150)
@given(
    # Powers of 256 have equal bytes at a wrong alignment.
    history=st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16777216]), min_size=1, max_size=60),
    limit=st.integers(1, 8),
    shortest=st.integers(1, 4),
    more=st.integers(0, 5),
)
def test_candidates_agree_with_brute_force(history, limit, shortest, more):
    expected = brute_force(history, limit, shortest + more, shortest)
    assert propose(history, limit, shortest + more, shortest) == expected


def test_candidates_are_not_a_view_of_the_history():
    history = [1, 2, 3, 4, 1, 2, 3]
    proposal = PromptLookup().find(history, Limit(2, 9, 9))
    history[3] = 99
    assert list(proposal.tokens) == [4, 1]


@pytest.mark.parametrize("limit", [Limit(2, 9, 1), Limit(9, 2, 1)])
def test_depth_and_nodes_are_respected(limit):
    history = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    proposal = PromptLookup().find(history, limit)
    assert list(proposal.tokens) == [4, 5]


def test_a_long_history_takes_microseconds():
    history = [i * 7919 % 50000 for i in range(100_000)]
    started = time.process_time()
    for _ in range(10):
        assert propose(history, 4, 8, 3) == [i * 7919 % 50000 for i in range(50_000, 50_004)]
    assert time.process_time() - started < 2
