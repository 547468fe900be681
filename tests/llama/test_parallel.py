"""Several sequences in one context: each gets the same logits as in a context of its own."""

from types import SimpleNamespace

import numpy as np
import pytest

from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama.model import Model
from spec_local.llama.parallel import ParallelContext

CLOSE = {"atol": 0.05, "rtol": 0}  # as in test_context.py

SEQUENCES = [[1, 301, 330, 337, 758], [1, 273], [1, 415, 368, 359, 496, 292, 301, 330]]


@pytest.fixture(params=["tiny_path", "window_path", "recurrent_path"])
def model(request):
    return Model(request.getfixturevalue(request.param))


def logits_alone(make_context, model, tokens):
    context = make_context(model)
    return context.evaluate(tokens, 1)[0].copy()


def test_sequences_of_different_lengths(make_context, model):
    parallel = ParallelContext(model, 4, 256)
    logits = parallel.evaluate({2: SEQUENCES[2], 0: SEQUENCES[0], 1: SEQUENCES[1]})
    assert logits.shape == (3, model.vocabulary.n_tokens)
    for row, tokens in enumerate(SEQUENCES):
        np.testing.assert_allclose(logits[row], logits_alone(make_context, model, tokens), **CLOSE)
    assert parallel.lengths == [5, 2, 8, 0]


def test_append_and_replace_sequences(make_context, model):
    parallel = ParallelContext(model, 3, 256)
    parallel.evaluate(dict(enumerate(SEQUENCES)))
    parallel.clear(1)
    logits = parallel.evaluate({0: [301], 1: [1, 337, 337], 2: [496]})
    for row, tokens in enumerate([[*SEQUENCES[0], 301], [1, 337, 337], [*SEQUENCES[2], 496]]):
        np.testing.assert_allclose(logits[row], logits_alone(make_context, model, tokens), **CLOSE)


def test_prompts_longer_than_one_call(make_context, model):
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 600, (2, 700)).tolist()
    parallel = ParallelContext(model, 2, 768)
    logits = parallel.evaluate(dict(enumerate(prompts)))
    for row, tokens in enumerate(prompts):
        context = make_context(model, n_ctx=1024, max_tokens=700)
        np.testing.assert_allclose(logits[row], context.evaluate(tokens, 1)[0], **CLOSE)


@pytest.mark.parametrize(
    ("new_tokens", "error"),
    [
        ({}, InvalidRequest),
        ({0: []}, InvalidRequest),
        ({2: [1]}, InvalidRequest),
        ({-1: [1]}, InvalidRequest),
        ({0: [1, -1]}, InvalidRequest),
        ({0: [1 << 20]}, InvalidRequest),
        ({0: [1] * 257}, ContextOverflow),
    ],
)
def test_invalid_calls_change_nothing(make_context, tiny_model, new_tokens, error):
    parallel = ParallelContext(tiny_model, 2, 256)
    parallel.evaluate({0: SEQUENCES[0]})
    with pytest.raises(error, match=": "):
        parallel.evaluate(new_tokens)
    assert parallel.lengths == [5, 0]
    expected = logits_alone(make_context, tiny_model, [*SEQUENCES[0], 301])
    np.testing.assert_allclose(parallel.evaluate({0: [301]})[0], expected, **CLOSE)


@pytest.mark.parametrize(("n_sequences", "n_ctx"), [(0, 256), (257, 256), (2, 0), (2, 1 << 21)])
def test_invalid_sizes(tiny_model, n_sequences, n_ctx):
    with pytest.raises(InvalidRequest, match="give 1 to 256"):
        ParallelContext(tiny_model, n_sequences, n_ctx)


def test_too_little_memory(tiny_model, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(ContextOverflow, match="8 sequences of 4096 tokens"):
        ParallelContext(tiny_model, 8, 4096)


def test_after_a_failure_the_context_is_empty_and_usable(make_context, tiny_model, monkeypatch):
    parallel = ParallelContext(tiny_model, 2, 256)
    parallel.evaluate({0: SEQUENCES[0], 1: SEQUENCES[1]})
    with monkeypatch.context() as patch:
        patch.setattr(parallel._lib, "llama_decode", lambda *_: -3)
        with pytest.raises(BackendError, match="code -3"):
            parallel.evaluate({0: [301]})
    assert parallel.lengths == [0, 0]
    expected = logits_alone(make_context, tiny_model, SEQUENCES[2])
    np.testing.assert_allclose(parallel.evaluate({1: SEQUENCES[2]})[0], expected, **CLOSE)


def test_closed_model(tiny_path):
    model = Model(tiny_path)
    parallel = ParallelContext(model, 2, 256)
    model.close()
    with pytest.raises(InvalidRequest, match="closed"):
        parallel.evaluate({0: [1]})
    parallel.close()
