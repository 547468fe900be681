"""Many texts at once: each is as if it were alone."""

from types import SimpleNamespace

import numpy as np
import pytest

from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama.model import Model
from spec_local.llama.parallel import Parallel

CLOSE = {"atol": 0.05, "rtol": 0}  # as in test_context.py

TEXTS = [[1, 301, 330, 337, 758], [1, 273], [1, 415, 368, 359, 496, 292, 301, 330]]


@pytest.fixture(params=["tiny_path", "window_path", "recurrent_path"])
def model(request):
    return Model(request.getfixturevalue(request.param))


def alone(make_context, model, tokens):
    context = make_context(model)
    return context.evaluate(tokens, 1)[0].copy()


def test_texts_of_all_lengths_are_read_as_if_each_were_alone(make_context, model):
    parallel = Parallel(model, 4, 256)
    logits = parallel.read({2: TEXTS[2], 0: TEXTS[0], 1: TEXTS[1]})
    assert logits.shape == (3, model.vocabulary.n_tokens)
    for row, text in enumerate([0, 1, 2]):
        np.testing.assert_allclose(logits[row], alone(make_context, model, TEXTS[text]), **CLOSE)
    assert parallel.lengths == [5, 2, 8, 0]


def test_texts_grow_side_by_side_and_new_ones_take_the_place_of_old_ones(make_context, model):
    parallel = Parallel(model, 3, 256)
    parallel.read(dict(enumerate(TEXTS)))
    parallel.forget(1)
    logits = parallel.read({0: [301], 1: [1, 337, 337], 2: [496]})
    for row, text in enumerate([[*TEXTS[0], 301], [1, 337, 337], [*TEXTS[2], 496]]):
        np.testing.assert_allclose(logits[row], alone(make_context, model, text), **CLOSE)


def test_prompts_longer_than_a_call_are_read_in_several(make_context, model):
    rng = np.random.default_rng(0)
    long = rng.integers(5, 600, (2, 700)).tolist()
    parallel = Parallel(model, 2, 768)
    logits = parallel.read(dict(enumerate(long)))
    for row, text in enumerate(long):
        context = make_context(model, n_ctx=1024, max_tokens=700)
        np.testing.assert_allclose(logits[row], context.evaluate(text, 1)[0], **CLOSE)


@pytest.mark.parametrize(
    ("texts", "error"),
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
def test_wrong_calls_are_refused_and_change_nothing(make_context, tiny_model, texts, error):
    parallel = Parallel(tiny_model, 2, 256)
    parallel.read({0: TEXTS[0]})
    with pytest.raises(error, match=": "):
        parallel.read(texts)
    assert parallel.lengths == [5, 0]
    np.testing.assert_allclose(
        parallel.read({0: [301]})[0], alone(make_context, tiny_model, [*TEXTS[0], 301]), **CLOSE
    )


@pytest.mark.parametrize(("n_texts", "n_ctx"), [(0, 256), (257, 256), (2, 0), (2, 1 << 21)])
def test_wrong_measures_are_refused(tiny_model, n_texts, n_ctx):
    with pytest.raises(InvalidRequest, match="give 1 to 256"):
        Parallel(tiny_model, n_texts, n_ctx)


def test_more_texts_than_memory_are_refused(tiny_model, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(ContextOverflow, match="8 texts of 4096 tokens"):
        Parallel(tiny_model, 8, 4096)


def test_after_a_failure_all_texts_are_forgotten_and_new_ones_can_be_read(
    make_context, tiny_model, monkeypatch
):
    parallel = Parallel(tiny_model, 2, 256)
    parallel.read({0: TEXTS[0], 1: TEXTS[1]})
    with monkeypatch.context() as patch:
        patch.setattr(parallel._lib, "llama_decode", lambda *_: -3)
        with pytest.raises(BackendError, match="code -3"):
            parallel.read({0: [301]})
    assert parallel.lengths == [0, 0]
    np.testing.assert_allclose(
        parallel.read({1: TEXTS[2]})[0], alone(make_context, tiny_model, TEXTS[2]), **CLOSE
    )


def test_a_closed_one_says_so(tiny_path):
    model = Model(tiny_path)
    parallel = Parallel(model, 2, 256)
    model.close()
    with pytest.raises(InvalidRequest, match="closed"):
        parallel.read({0: [1]})
    parallel.close()
