"""Constraints and the sampler: testing the most probable tokens first does not change the result."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.constraint import Constraint
from spec_local.core.sampling import Sampler, SamplingSettings
from spec_local.engine.events import Step
from spec_local.errors import BackendError, DeadEnd
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst, Drawn
from spec_local.testing import FakeModel, FakeState, enumerate_outcomes
from tests.unfiltered import unfiltered
from tests.unit.generation import events_of, generate

HOW = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 200, 10**6]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repeat_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {3: 5.0}, {1: -np.inf, 2: -np.inf}]),
    top_n_sigma=st.sampled_from([0.0, 0.3, 1.7]),
    xtc_probability=st.sampled_from([0.0, 0.4]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_allowed_length=st.sampled_from([0, 1]),
)


class Counting(FakeState):
    """A state that records how many tokens it tested in each call."""

    tested: list[int]

    def allows(self, tokens):
        self.tested.append(len(tokens))
        return super().allows(tokens)


def state(n_vocab, allowed, kind=FakeState):
    made = kind(n_vocab, lambda answer: allowed)
    made.tested = []
    return made


def constraint(n_vocab, allowed, kind=FakeState, text=()):
    made = Constraint(state(n_vocab, allowed, kind))
    made.commit(text)
    return made


@settings(max_examples=80)
@given(
    how=HOW,
    n_vocab=st.sampled_from([5, 300, 1000]),
    share=st.sampled_from([0.004, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
)
def test_the_distribution_is_that_of_masked_logits(how, n_vocab, share, seed, ties):
    """Exactly the same tokens, with the same probabilities to rounding."""
    generator = np.random.default_rng(seed)
    logits = (generator.normal(size=n_vocab) * 3).astype(np.float32)
    if ties:
        logits = np.round(logits)
    possible = set((generator.random(n_vocab) < share).nonzero()[0].tolist()) | {0}
    history = generator.integers(0, n_vocab, 10).tolist()
    masked = np.where(np.isin(np.arange(n_vocab), list(possible)), logits, np.float32(-np.inf))
    expected = Sampler(how).distribution(masked, history).dense(n_vocab)
    limited = constraint(n_vocab, possible, text=history)
    found = Sampler(how, limited).distribution(logits, history).dense(n_vocab)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("how", "allowed", "tested"),
    [
        (SamplingSettings(temperature=0), range(2000), [1]),
        (SamplingSettings(temperature=0), range(0, 2000, 2), [1, 64]),
        (unfiltered(top_k=40), range(2000), [80]),
        (unfiltered(top_k=40), [3], [80, 2000]),
        (unfiltered(), range(2000), [2000]),
        (unfiltered(top_k=40, top_n_sigma=2.0), range(2000), [2000]),  # the deviation is that of all of them
    ],
    ids=["greedy", "greedy, best not allowed", "top-k", "top-k, one allowed", "no top-k", "top-n-sigma"],
)
def test_no_more_tokens_are_tested_than_needed(how, allowed, tested):
    logits = np.arange(2000, dtype=np.float32)[::-1].copy()
    logits[1] = 2000.0  # the most probable token is odd
    limited = constraint(2000, set(allowed), Counting)
    Sampler(how, limited).distribution(logits)
    assert limited.after([]).tested == tested


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_dead_end_is_an_error_for_the_main_model_only(temperature):
    logits = np.full(400, -np.inf, np.float32)  # as of a draft model with few of the main model's tokens
    logits[:5] = 0
    for allowed, bias in [(set(), {}), ({2}, {2: -np.inf}), (set(range(5, 400)), {})]:
        how = unfiltered(temperature=temperature, top_k=9, logit_bias=bias)
        with pytest.raises(BackendError, match="no token may follow here"):
            Sampler(how, constraint(400, allowed)).distribution(logits)
        free = Sampler(how, constraint(400, allowed)).for_draft()
        assert free.distribution(logits).top(1)[0] == 0
        assert free.most_probable(logits, 1)[0] == 0


def test_nan_logits_are_an_error_anywhere():
    logits = np.zeros(500, np.float32)
    logits[300] = np.nan
    for how in (unfiltered(), SamplingSettings(temperature=0), unfiltered(top_k=3)):
        with pytest.raises(BackendError, match="not numbers"):
            Sampler(how, constraint(500, {1, 2})).distribution(logits)


def test_the_constraint_applies_to_the_answer_only():
    limited = Constraint(FakeState(9, lambda answer: {len(answer)}))
    limited.commit([5, 5, 5])
    assert limited.after([5, 5, 5]).answer == ()
    assert limited.after([5, 5, 5, 0, 1]).answer == (0, 1)
    limited.commit([5, 5, 5, 0])
    assert limited.after([5, 5, 5, 0, 1]).answer == (0, 1)
    assert limited.after([5, 5, 5, 0, 7]) is None
    assert limited.after([5, 5, 5, 0, 7, 1]) is None


@pytest.mark.parametrize(("n", "reason"), [(1, "length"), (2, "stop"), (3, "stop"), (0, "length")])
def test_an_answer_after_which_only_an_end_token_may_follow_has_ended(n, reason):
    """It has ended with or without room for the end token."""
    rule = [(5, 6), (6, 7), (0, 3)]  # 0 and 3 are end tokens
    limited = Constraint(FakeState(9, lambda answer: rule[len(answer)]))
    is_end = (0, 3).__contains__
    how = unfiltered()
    _, end = generate(FakeModel(9), [1, 2], None, how, constraint=limited, max_tokens=n, is_end=is_end)
    assert end.reason == reason


def test_states_are_computed_once_and_dropped_with_rejected_tokens():
    made = []

    class Watched(FakeState):
        def after(self, token):
            made.append((*self.answer, token))
            return Watched(9, self._rule, (*self.answer, token))

    limited = Constraint(Watched(9, lambda answer: range(9)))
    limited.commit([1])
    for history in ([1, 2, 3], [1, 2, 4], [1, 2, 3]):
        limited.after(history)
    assert made == [(2,), (2, 3), (2, 4)]
    limited.commit([1, 2, 3])
    limited.after([1, 2, 3])
    assert made == [(2,), (2, 3), (2, 4)]
    assert limited._node.children == {}


def _dead_after_one(answer):
    """No token may follow a 1 at the start."""
    return () if answer == (1,) else (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("token", Chain("drawn")),
        ("block", Chain("drawn")),
        ("exact-match", Chain("coupled")),
        ("exact-match", BestFirst(3)),
        ("traversal", Drawn("without replacement", 3)),
    ],
    ids=["token", "block", "coupled", "best first", "traversal"],
)
def test_dead_ends_are_as_frequent_as_in_plain_decoding(rule, shape):
    """After the same output; a rejected draft token that leads to one has no effect."""

    def answer(rng, drafting):
        sampler = Sampler(unfiltered(), Constraint(FakeState(3, _dead_after_one)))
        draft = DraftModel(FakeModel(3, seed=9, scale=1.0), sampler, shape, n_vocab=3) if drafting else None
        output = []
        try:
            main, limits = FakeModel(3, seed=1, scale=1.0), {"draft_max": 2, "max_tokens": 3}
            for event in events_of(main, [0, 1], draft, rng=rng, rule=rule, sampler=sampler, **limits):
                output += event.tokens if isinstance(event, Step) else ()
        except DeadEnd:
            output.append("dead")
        return tuple(output)

    plain, drafted = (enumerate_outcomes(lambda rng, d=d: answer(rng, d)) for d in (False, True))
    assert 0.05 < plain[1, "dead"] < 0.5
    assert drafted.keys() == plain.keys()
    assert all(abs(drafted[output] - plain[output]) < 1e-12 for output in plain)
