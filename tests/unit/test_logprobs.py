"""Log probabilities of generated tokens under the model alone, before settings and constraint."""

import numpy as np
import pytest

from spec_local.core.constraint import Constraint
from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Sampler, logprob
from spec_local.engine.events import Step
from spec_local.errors import InvalidRequest
from spec_local.proposers.draft_model import Chain, DraftModel
from spec_local.proposers.shapes import BestFirst
from spec_local.settings import GenerationSettings
from spec_local.testing import FakeModel, FakeState
from tests.unfiltered import unfiltered
from tests.unit.generation import events_of

HOW = unfiltered(temperature=0.7, top_k=5, repeat_penalty=1.3, logit_bias={3: 4.0})


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def steps_of(n_logprobs, shape=Chain, rule="block", is_end=lambda token: False, sampled=False):
    main = FakeModel(16, seed=1, scale=1.0)
    limited = Constraint(FakeState(16, lambda answer: range(len(answer) % 2, 16, 2)))
    sampler = Sampler(HOW, limited)
    draft = DraftModel(FakeModel(16, seed=1, scale=1.0, noise=0.5), sampler, shape(), n_vocab=16)
    options = {"sampler": sampler, "is_end": is_end, "logprobs": n_logprobs, "max_tokens": 60}
    options["sampled_logprobs"] = sampled
    events = events_of(main, [1, 2, 3], draft, rng=SeededRng(2), rule=rule, **options)
    return [event for event in events if isinstance(event, Step)]


@pytest.mark.parametrize(
    ("shape", "rule"), [(Chain, "block"), (lambda: BestFirst(8), "exact-match")], ids=["chain", "tree"]
)
@pytest.mark.parametrize("n", [0, 3, 16, 20])
def test_logprobs_are_those_of_the_model_after_the_history(n, shape, rule):
    main, history = FakeModel(16, seed=1, scale=1.0), [1, 2, 3]
    steps = steps_of(n, shape, rule)
    assert any(step.n_accepted for step in steps)
    for step in steps:
        assert [entry.token for entry in step.logprobs] == list(step.tokens)
        for entry in step.logprobs:
            expected = log_softmax(main.logits(history))
            assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
            best = np.argsort(-expected, kind="stable")[:n]
            assert [token for token, _ in entry.top] == best.tolist()
            assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)
            history.append(entry.token)


@pytest.mark.parametrize("n", [0, 3, 20])
def test_logprobs_after_sampling_are_those_of_the_sampler(n):
    main, history = FakeModel(16, seed=1, scale=1.0), [1, 2, 3]
    state = Constraint(FakeState(16, lambda answer: range(len(answer) % 2, 16, 2)))
    state.commit(history)
    sampler = Sampler(HOW, state)
    for step in steps_of(n, sampled=True):
        for entry in step.logprobs:
            expected = sampler.distribution(main.logits(history), history)
            dense = expected.dense(16)
            assert entry.logprob == pytest.approx(np.log(dense[entry.token]), abs=1e-5)
            assert len(entry.top) == min(n, np.count_nonzero(dense))
            assert [value for _, value in entry.top] == pytest.approx(
                np.log(sorted(dense, reverse=True)[: len(entry.top)]).tolist(), abs=1e-5
            )
            history.append(entry.token)
            state.commit(history)


def test_an_end_token_has_the_last_logprob():
    ends = 0
    for seed in range(3, 16):
        last = steps_of(1, is_end=lambda token, end=seed: token == end)[-1]
        ends += last.tokens[-1] == seed
        assert [entry.token for entry in last.logprobs] == list(last.tokens)
    assert ends


def test_logprobs_are_computed_only_on_request():
    events = steps_of(None)
    assert all(step.logprobs == () for step in events)
    with pytest.raises(InvalidRequest):
        steps_of(-1)
    for n, what in ((-1, "0 or more"), (21, "at most 20")):
        with pytest.raises(InvalidRequest, match=f"logprobs is {n}: give {what}"):
            GenerationSettings(logprobs=n)


def test_logprob_with_a_large_vocabulary_and_large_logits():
    logits = np.random.default_rng(0).normal(size=150_000).astype(np.float32) * 3 + 500
    expected = logits.astype(np.float64)
    expected -= np.log(np.exp(expected - 500).sum()) + 500
    for n in (0, 5):
        entry = logprob(logits, 77, n)
        assert entry.logprob == pytest.approx(expected[77], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-expected)[:n].tolist()
