"""The prompt cache in memory: what it finds, compared with plain dictionaries, and what it drops."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.prompt_cache.cache import PromptCache

BLOCK = 4


def data_of(tokens, size=0):
    """Bytes that say of which history they are, at least `size` of them."""
    raw = np.array([len(tokens), *tokens], "<i4").view(np.uint8)
    return np.concatenate([raw, np.zeros(max(0, size - len(raw)), np.uint8)])


def tokens_of(data):
    numbers = data[: len(data) // 4 * 4].view("<i4")
    return numbers[1 : 1 + numbers[0]].tolist()


def add_history(prompts, tokens, size=0):
    """Add all blocks of a history; returns how many there was room for."""
    n = 0
    for start in range(0, len(tokens), prompts.block):
        part = tokens[: start + prompts.block]
        if not prompts.add_cells(part, start, data_of(part, size)):
            break
        n += 1
    return n


def whole_length(prompts, tokens):
    """How many tokens of a history have cells in blocks that belong to it with all of their tokens."""
    return sum(n for entry, _, n in prompts.find(tokens).cells if n == entry.n)


def found_length(prompts, tokens):
    """How many tokens of a history have readable cells, all of which are checked."""
    n = 0
    for entry, start, n_tokens in prompts.find(tokens).cells:
        assert start == n
        data = prompts.read(entry)
        if data is None:
            break
        assert tokens_of(data)[: start + n_tokens] == list(tokens[: start + n_tokens])
        n += n_tokens
    return n


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Reference:
    """The same with plain sets of histories."""

    def __init__(self):
        self.cells, self.states = set(), set()

    def found_cells(self, tokens):
        n = 0
        while tokens[: n + BLOCK] in self.cells and n + BLOCK <= len(tokens):
            n += BLOCK
        ends = [common(each, tokens) for each in self.cells if (len(each) - 1) // BLOCK * BLOCK == n]
        return max([n, *ends])

    def found_states(self, tokens):
        return sorted(len(each) for each in self.states if tokens[: len(each)] == each)

    def lacking(self, tokens):
        ranges = []
        for start in range(0, len(tokens), BLOCK):
            part = tokens[: start + BLOCK]
            if not any(each[: len(part)] == part and len(each) <= start + BLOCK for each in self.cells):
                ranges.append((start, len(part)))
        return ranges

    def n_bytes(self):
        """Of what no longer block of the same parent begins with."""
        longest = {
            each
            for each in self.cells
            if not any(
                each == other[: len(each)] and len(each) < len(other) <= -(-len(each) // BLOCK) * BLOCK
                for other in self.cells
            )
        }
        return sum(4 * (len(each) + 1) for each in [*longest, *self.states])


HISTORIES = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["cells", "block", "state"]), HISTORIES), max_size=14), HISTORIES)
def test_finds_what_a_dictionary_finds(added, searched):
    cache, reference = PromptCache(1 << 20), Reference()
    prompts = cache.prompts("model", BLOCK)
    for what, tokens in added:
        starts = range(0, len(tokens), BLOCK)
        if what == "state":
            assert prompts.add_state(tokens, data_of(tokens))
            reference.states.add(tokens)
        else:
            for start in starts if what == "cells" else starts[-1:]:
                part = tokens[: start + BLOCK]
                assert prompts.add_cells(part, start, data_of(part))
                reference.cells.add(part)
    for tokens in {searched, *(each for _, each in added)}:
        match = prompts.find(tokens)
        assert sum(each.n for each in match.cells) == reference.found_cells(tokens)
        assert found_length(prompts, tokens) == reference.found_cells(tokens)
        assert all(each.n == BLOCK for each in match.cells[:-1])
        assert [each.length for each in match.states] == reference.found_states(tokens)
        for entry, length in match.states:
            assert tokens_of(prompts.read(entry)) == list(tokens[:length])
        assert prompts.lacking(tokens) == reference.lacking(tokens)
        assert prompts.has_state(tokens) == (tokens in reference.states)
    assert cache._memory.n_bytes == reference.n_bytes()


@given(
    st.integers(100, 500),
    st.lists(st.tuples(st.booleans(), st.integers(0, 120), HISTORIES), min_size=5, max_size=30),
)
def test_memory_stays_within_its_budget(budget, steps):
    cache = PromptCache(budget)
    prompts = cache.prompts("model", BLOCK)
    for is_state, size, tokens in steps:
        before = cache._memory.n_bytes, list(cache._memory._items)
        n_whole = whole_length(prompts, tokens)
        if is_state:
            added = prompts.add_state(tokens, data_of(tokens, size))
            assert added == prompts.has_state(tokens)
        else:
            start = (len(tokens) - 1) // BLOCK * BLOCK
            added = prompts.add_cells(tokens, start, data_of(tokens, size))
            assert added == ((start, len(tokens)) not in prompts.lacking(tokens))
        if not added:
            assert (cache._memory.n_bytes, sorted(cache._memory._items)) == (before[0], sorted(before[1]))
        found_length(prompts, tokens)
        assert whole_length(prompts, tokens) >= n_whole  # the same history is never dropped
        held = [item.data.nbytes for item in cache._memory._items.values()]
        assert cache._memory.n_bytes == sum(held) <= budget


def test_a_longer_tail_replaces_a_shorter_one():
    cache = PromptCache(1 << 20)
    prompts = cache.prompts("model", BLOCK)
    for n in (5, 6, 8):
        add_history(prompts, list(range(n)))
    assert len(cache._memory._items) == 2
    other = [0, 1, 2, 3, 9]
    add_history(prompts, other)
    assert len(cache._memory._items) == 3
    assert prompts.add_cells([0, 1, 2, 3, 4], 4, data_of([0, 1, 2, 3, 4]))  # is covered
    assert len(cache._memory._items) == 3


def test_a_replaced_tail_makes_room_for_the_longer_one():
    prompts = PromptCache(250).prompts("model", BLOCK)
    assert add_history(prompts, list(range(6)), 120) == 2
    assert add_history(prompts, list(range(7)), 120) == 2
    assert found_length(prompts, list(range(8))) == 7


def test_the_least_recently_used_history_is_dropped_from_its_end():
    prompts = PromptCache(600).prompts("model", BLOCK)
    first, second, third = ([i] * 3 * BLOCK for i in range(3))
    assert add_history(prompts, first, 100) == add_history(prompts, second, 100) == 3
    prompts.find(second)
    prompts.find(first)
    assert add_history(prompts, third[: 2 * BLOCK], 100) == 2
    assert [found_length(prompts, each) for each in (first, second, third)] == [12, 4, 8]


def test_a_history_larger_than_the_memory_keeps_its_beginning():
    prompts = PromptCache(250).prompts("model", BLOCK)
    tokens = [7] * 5 * BLOCK
    assert add_history(prompts, tokens, 100) == 2
    assert found_length(prompts, tokens) == 2 * BLOCK
    assert not prompts.add_cells([1] * BLOCK, 0, data_of([1], 300))
    assert found_length(prompts, tokens) == 2 * BLOCK


def test_data_is_neither_copied_nor_writable():
    prompts = PromptCache(1 << 20).prompts("model", BLOCK)
    data = data_of([1, 2])
    prompts.add_cells([1, 2], 0, data)
    read = prompts.read(prompts.find([1, 2]).cells[0].entry)
    assert np.shares_memory(read, data)
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_identities_share_memory_but_nothing_else():
    cache = PromptCache(250)
    first, second, third = cache.prompts("a", BLOCK), cache.prompts("b", BLOCK), cache.prompts("a", 2 * BLOCK)
    assert cache.prompts("a", BLOCK) is first
    tokens = [1] * BLOCK
    add_history(first, tokens, 100)
    assert [found_length(each, tokens) for each in (first, second, third)] == [BLOCK, 0, 0]
    entry = first.find(tokens).cells[0].entry
    assert second.read(entry) is None
    add_history(second, [2] * 2 * BLOCK, 100)
    assert found_length(first, tokens) == 0
    assert first.read(entry) is None


def test_a_block_must_begin_at_its_place():
    prompts = PromptCache(1 << 20).prompts("model", BLOCK)
    for tokens, start in [([1] * 5, 0), ([1] * 5, 3), ([1] * 4, 4)]:
        with pytest.raises(ValueError, match="no block"):
            prompts.add_cells(tokens, start, data_of(tokens))
    with pytest.raises(ValueError, match="a block of 0"):
        PromptCache(1).prompts("model", 0)


def test_a_long_prompt_is_found_fast_among_many_entries():
    prompts = PromptCache(1 << 20).prompts("model", 256)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100_000, 25_000).tolist()
    for i in range(1000):  # all of them children of the same block
        part = [*tokens[: 256 + i % 100], 100_001 + i]
        prompts.add_cells(part, 256, np.zeros(1, np.uint8))
    for end in range(256, 12_800, 256):
        prompts.add_cells(tokens[:end], end - 256, np.zeros(1, np.uint8))
        if end == 256:
            assert fastest_find(prompts, tokens, 256 + 99) < 0.02
    assert fastest_find(prompts, tokens, 12_544) < 0.02  # both take 2 ms on an idle machine


def fastest_find(prompts, tokens, n):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert sum(each.n for each in prompts.find(tokens).cells) == n
        times.append(time.perf_counter() - start)
    return min(times)
