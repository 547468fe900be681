"""Where states of a recurrent model are kept, tried on invented conversations."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_local.core.sequence import common_prefix
from spec_local.prompt_cache.placement import NEAR, stops, superfluous

START, END = 1, 2  # control tokens


class Model:
    """Reads prompts, and goes on from kept states only; counts what it reads and what it had to read."""

    def __init__(self, keeps=True):
        self.kept, self.known = {()}, []
        self.n_read = self.n_needed = 0
        self.keeps = keeps

    def read(self, prompt):
        prompt = tuple(prompt)
        known = max((k for k in self.kept if prompt[: len(k)] == k), key=len)
        parting = max((common_prefix(prompt, other) for other in self.known), default=0)
        boundaries = [i for i, token in enumerate(prompt) if token in (START, END)]
        found = stops(len(known), boundaries, parting, len(prompt))
        if self.known:
            self.n_read += len(prompt) - len(known)
            self.n_needed += len(prompt) - parting
        self.known.append(prompt)
        if self.keeps:
            self.kept |= {prompt[:n] for n in found}

    @property
    def ratio(self):
        return self.n_read / self.n_needed


def message(rng, n):
    return [START, 5, 6, *(rng.randrange(10, 99) for _ in range(n)), END, 7]


OPENED = [START, 8, 6, 9, 6]  # the beginning of an answer, with opened reasoning


def turns(model, rng, n, system):
    prompt = list(system)
    for _ in range(n):
        prompt += message(rng, 50)
        model.read([*prompt, *OPENED])
        prompt += message(rng, 60)  # without the reasoning
        yield


def reasoning(model, rng):
    for _ in turns(model, rng, 8, message(rng, 300)):
        pass


def shared_system(model, rng):
    system = message(rng, 600)
    for _ in range(6):
        model.read([*system, *message(rng, 60), *OPENED])


def edited(model, rng):
    prompt = [token for n in (300, 40, 60, 40, 90) for token in message(rng, n)]
    for _ in range(5):
        model.read([*prompt, *message(rng, 60), *OPENED])


def many(model, rng):
    system = message(rng, 400)
    running = [turns(model, rng, 5, [*system, *message(rng, 80)]) for _ in range(6)]
    for _ in range(5):
        for each in running:
            next(each)


def plain_text(model, rng):
    """No messages: the second prompt shows where they part, and the third one gains by it."""
    text = [rng.randrange(10, 99) for _ in range(1000)]
    for _ in range(12):
        model.read([*text, *(rng.randrange(10, 99) for _ in range(150))])


@pytest.mark.parametrize("conversation", [reasoning, shared_system, edited, many])
def test_little_is_read_again(conversation):
    model, without = Model(), Model(keeps=False)
    conversation(model, random.Random(0))
    conversation(without, random.Random(0))
    assert model.ratio <= 1.1
    assert without.ratio > 3


def test_text_without_messages_is_read_again_once():
    model = Model()
    plain_text(model, random.Random(0))
    assert model.n_read - model.n_needed <= 1010


@given(st.integers(0, 300), st.sets(st.integers(0, 300)), st.integers(0, 300), st.integers(0, 300))
def test_stops_are_in_what_is_read(n_known, boundaries, parting, n):
    found = stops(n_known, [b for b in boundaries if b <= n], min(parting, n), n)
    assert list(found) == sorted(set(found))
    assert all(n_known < stop <= n for stop in found)
    if n > n_known + NEAR:
        assert found[-1] >= n - NEAR


@given(st.sets(st.integers(1, 10_000), max_size=60))
def test_few_states_are_left(lengths):
    lengths = sorted(lengths)
    dropped = superfluous(lengths)
    left = sorted(set(lengths) - set(dropped))
    assert len(left) == min(12, len(lengths))
    assert left[:1] == lengths[:1]
    assert left[-3:] == lengths[-3:]


def test_the_end_of_a_history_is_kept_densely():
    left = sorted(set(range(100, 10_100, 100)) - set(superfluous(range(100, 10_100, 100))))
    gaps = [b - a for a, b in itertools.pairwise(left[1:])]
    assert gaps[0] > gaps[-1]
