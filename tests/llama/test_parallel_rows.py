"""Rows for training data: each has the logits and states of a context of its own."""

import numpy as np
import pytest

from spec_local import bfloat16
from spec_local.core.calls import run
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, ModelError
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.training.parallel_rows import next_outputs, open_parallel_rows
from tests.broken_llama import Broken

CLOSE = {"atol": 0.05, "rtol": 0}  # as in test_context.py

TEXTS = [[1, 301, 330, 337, 758], [1, 273], [1, 415, 368, 359, 496, 292, 301, 330]]


@pytest.fixture(params=["tiny_path", "window_path", "recurrent_path"])
def model(request):
    loaded = Model(request.getfixturevalue(request.param))
    yield loaded
    loaded.close()


@pytest.fixture
def make_rows():
    made = []

    def make(model, n, n_ctx=256, hidden=None):
        made.append(open_parallel_rows(model, n, n_ctx, 1, hidden))
        return made[-1]

    yield make
    for rows in made:
        rows[0].close()


def next_logits(rows, tokens):
    logits, states = next_outputs(rows, tokens, with_states=False)
    assert states == []
    return logits


def check(make_context, model, logits, texts):
    assert logits.shape == (len(texts), model.vocabulary.n_tokens)
    for row, tokens in zip(logits, texts, strict=True):
        expected = run(make_context(model, n_ctx=1024, max_tokens=700).call(tokens, n_logits=1))[0]
        np.testing.assert_allclose(row, expected, **CLOSE)


def test_continue_and_replace_texts(make_context, make_rows, model):
    rows = make_rows(model, 4)
    check(make_context, model, next_logits(rows[:3], TEXTS), TEXTS)
    assert [len(row.cached) for row in rows] == [5, 2, 8, 0]
    rows[1].truncate(0)
    logits = next_logits(rows[:3], [[301], [1, 337, 337], [496]])
    check(make_context, model, logits, [[*TEXTS[0], 301], [1, 337, 337], [*TEXTS[2], 496]])


def test_prompts_longer_than_one_call(make_context, make_rows, model):
    prompts = np.random.default_rng(0).integers(5, 600, (2, 700)).tolist()
    check(make_context, model, next_logits(make_rows(model, 2, 768), prompts), prompts)


def test_states_of_every_token(make_context, make_rows, model):
    """Of prompts of different lengths, one longer than a call, and of the tokens that continue them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 600, n).tolist() for n in (700, 1, 40)]
    hidden = HiddenStates((0,))
    rows = make_rows(model, 3, 768, hidden)
    logits, first = next_outputs(rows, prompts, with_states=True)
    check(make_context, model, logits, prompts)
    buffer = np.empty_like(logits)
    again, second = next_outputs(rows, [[301], [302, 303], [304]], with_states=True, logits=buffer)
    assert again is buffer
    for prompt, new, *states in zip(prompts, ([301], [302, 303], [304]), first, second, strict=True):
        assert [len(each) for each in states] == [len(prompt), len(new)]
        plain = make_context(model, n_ctx=1024, max_tokens=768, hidden=hidden)
        run(plain.call([*prompt, *new], n_logits=1))
        expected = plain.states(range(len(prompt) + len(new)))
        np.testing.assert_allclose(bfloat16.decode(np.concatenate(states)), expected, atol=0.05, rtol=2**-6)


@pytest.mark.parametrize(
    ("new", "error"),
    [*((tokens, InvalidRequest) for tokens in ([], [1, -1], [1 << 20])), ([1] * 257, ContextOverflow)],
    ids=["none", "negative", "too large", "too many"],
)
def test_invalid_tokens(make_context, make_rows, tiny_model, new, error):
    rows = make_rows(tiny_model, 2)
    next_logits(rows, TEXTS[:2])
    with pytest.raises(error, match=": "):
        next_logits(rows[:1], [new])
    check(make_context, tiny_model, next_logits(rows[1:], [[301]]), [[*TEXTS[1], 301]])


def test_taking_tokens_back_is_refused(make_rows, tiny_model):
    """llama.cpp cannot, where the model has a sliding window."""
    rows = make_rows(tiny_model, 2)
    next_logits(rows, TEXTS[:2])
    assert rows[0].limits.rollback == "none"
    with pytest.raises(ModelError, match="cannot roll back"):
        rows[0].truncate(2)
    rows[1].reuse(TEXTS[0])  # shares no cells
    assert list(rows[1].cached) == []


def test_after_a_failure_the_rows_are_usable(make_context, make_rows, tiny_model, monkeypatch):
    rows = make_rows(tiny_model, 2)
    next_logits(rows, TEXTS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(rows[0].context, "lib", Broken(rows[0].context.lib, lambda *_: -3))
        with pytest.raises(BackendError, match="code -3"):
            next_logits(rows[:1], [[301]])
    texts = [[*text, 301] for text in TEXTS[:2]]
    new = [text[len(row.cached) :] for row, text in zip(rows, texts, strict=True)]
    check(make_context, tiny_model, next_logits(rows, new), texts)
