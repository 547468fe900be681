"""Contexts: invalid calls are rejected, and the cache always holds the tokens in `cached`."""

import ctypes
import gc
from functools import partial

import numpy as np
import psutil
import pytest

from spec_local.core.calls import run
from spec_local.core.sequence import prefill
from spec_local.errors import BackendError, ContextOverflow, InvalidRequest, ModelError
from spec_local.llama import runtime
from spec_local.llama.devices import ON_CPU
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from tests.broken_llama import FAILURES, Broken
from tests.sequences import sequence_ends
from tests.tiny_architectures import write_tiny

CLOSE = {"atol": 0.05, "rtol": 0}  # see `check_next`

TEXT = [1, 301, 330, 337, 758, 273, 415, 368, 359, 496, 292]


@pytest.fixture
def context(make_context, tiny_model):
    return make_context(tiny_model, max_branches=4)


# Creation


@pytest.mark.parametrize(
    "wrong",
    [
        *({"n_ctx": n} for n in (0, -1, 1 << 32)),
        *({"max_branches": n} for n in (0, 257)),
        *({"max_tokens": n} for n in (0, 1 << 32)),
        *({"max_logits": n} for n in (0, 65537)),
        *({"threads": n} for n in (0, 513)),
        *({"cache_type": "f32"}, {"cache_type": ""}, {"cache_type": "q8_0", "flash_attention": False}),
    ],
    ids=str,
)
def test_invalid_arguments(make_context, tiny_model, wrong):
    with pytest.raises(InvalidRequest, match=r": (give|leave)"):
        make_context(tiny_model, **wrong)


def test_too_little_memory(make_context, tiny_path, monkeypatch):
    """Of the CPU: llama.cpp knows that of a separate GPU."""
    n_ctx, model = 1 << 20, Model(tiny_path, offload=ON_CPU)
    need = model.kv_bytes(n_ctx)
    assert need == 2 * 2 * 32 * 2 * n_ctx  # keys and values, layers, width, bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": need}))
    with pytest.raises(ContextOverflow, match="smaller `n_ctx`"):
        make_context(model, n_ctx=n_ctx)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"n_ctx": 1, "max_tokens": 1, "max_logits": 1}, {"n_ctx": 10}, {"n_ctx": 257}),
        {"max_branches": 255, "max_logits": 1},  # llama.cpp reserves a row of logits for each sequence
        *({"max_branches": 255, "n_ctx": 8}, {"max_tokens": 4096}),
        {"max_tokens": 2, "max_logits": 1, "max_branches": 3},
        *({"threads": 512}, {"threads": None}),
        *({"cache_type": "q8_0"}, {"cache_type": "q4_0", "flash_attention": True}),
        *({"flash_attention": False}, {"flash_attention": True}),
    ],
    ids=str,
)
def test_unusual_arguments(make_context, tiny_model, arguments):
    context = make_context(tiny_model, **arguments)
    assert max(context.limits.max_tokens, context.limits.max_logits) <= context.n_ctx
    n = min(context.limits.max_tokens, context.limits.max_logits)
    logits = run(context.call([1] * n, n_logits=n))
    assert logits.shape == (n, context.limits.n_vocab)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    context.truncate(0)
    n = min(n, context.limits.max_branches)
    assert np.isfinite(run(context.call([1] * n, [-1] * n))).all()
    context.commit([n - 1])


def test_the_error_quotes_llama_cpp_if_a_context_cannot_be_created(make_context, tiny_model, monkeypatch):
    lib = runtime.library()
    create = lib.llama_init_from_model
    monkeypatch.setattr(lib, "llama_init_from_model", lambda model, params: create(None, params))
    with pytest.raises(BackendError, match="model cannot be NULL"):
        make_context(tiny_model)


# Invalid calls


@pytest.mark.parametrize(
    ("tokens", "n_logits"),
    [
        *(([], 0), ([], 1), ([1], 2), ([1], -1), ([1] * 65, 1), ([1] * 33, 33)),
        *(([-1], 1), ([1, 1 << 31], 1), ([1 << 40], 1), ([-(1 << 40)], 1)),
    ],
    ids=lambda value: f"{len(value)}x{value[:1]}" if isinstance(value, list) else f"{value}",
)
def test_invalid_calls_change_nothing(make_context, check_next, tiny_model, tokens, n_logits):
    context = make_context(tiny_model, max_logits=32)
    run(context.call([1, 2], n_logits=0))
    with pytest.raises(InvalidRequest):
        run(context.call(tokens, n_logits=n_logits))
    assert context.cached == [1, 2]
    check_next(context)


def test_tokens_outside_the_vocabulary(context):
    last = context.limits.n_vocab - 1
    run(context.call([0, last], n_logits=1))
    with pytest.raises(InvalidRequest, match=f"0 to {last}"):
        run(context.call([last + 1], n_logits=1))
    assert context.cached == [0, last]


@pytest.mark.parametrize("n_ctx", [1, 30, 256])
def test_a_full_context_stays_usable(make_context, check_next, tiny_model, n_ctx):
    context = make_context(tiny_model, n_ctx=n_ctx)
    tokens = [5 + i for i in range(n_ctx)]
    assert run(prefill(context, tokens)) == n_ctx
    with pytest.raises(ContextOverflow, match="`n_ctx`"):
        run(context.call([1], n_logits=1))
    assert context.cached == tokens
    context.truncate(n_ctx - 1)
    check_next(context)


def test_a_closed_context(tiny_path):
    model = Model(tiny_path)
    context = open_sequence(model, n_ctx=64, threads=1)
    run(context.call([1, 2], n_logits=1))
    context.close()
    context.close()
    for call in [
        lambda: run(context.call([1], n_logits=1)),
        lambda: run(context.call([1], [-1])),
        lambda: context.commit([]),
        lambda: context.truncate(0),
    ]:
        with pytest.raises(InvalidRequest, match="closed"):
            call()


def test_closing_the_model_first(tiny_path):
    model = Model(tiny_path)
    context = open_sequence(model, n_ctx=64, threads=1)
    model.close()
    with pytest.raises(InvalidRequest, match="closed"):
        run(context.call([1], n_logits=1))
    context.close()


def test_contexts_keep_their_model_and_logits_keep_their_context(tiny_path):
    logits = run(open_sequence(Model(tiny_path), n_ctx=64, threads=1).call([1, 2, 3], n_logits=3))[1:]
    before = logits.copy()
    gc.collect()
    others = [
        run(open_sequence(Model(tiny_path), n_ctx=64, threads=1).call([4, 5], n_logits=2)) for _ in range(3)
    ]
    np.testing.assert_array_equal(logits, before)
    assert all(np.isfinite(other).all() for other in others)


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_a_quantized_cache(make_context, fresh_logits, tiny_model, cache_type):
    context = make_context(tiny_model, cache_type=cache_type)
    expected = fresh_logits(tiny_model, TEXT)
    difference = np.abs(run(context.call(TEXT)) - expected)
    assert 0 < difference.mean() < {"q8_0": 0.05, "q4_0": 0.8}[cache_type]


@pytest.mark.parametrize("length", [0, 5, 30, 285, 299])
def test_truncating_a_sliding_window_model(make_context, window_model, length):
    """Without `swa_full`, llama.cpp keeps 256 tokens and reports success for lengths before them."""
    tokens = [5 + i * i % 500 for i in range(300)]
    context, fresh = (make_context(window_model, n_ctx=1024) for _ in range(2))
    assert run(prefill(context, tokens)) == 300
    context.truncate(length)
    run(prefill(fresh, tokens[:length]))
    np.testing.assert_allclose(
        run(context.call([20, 21], n_logits=2)), run(fresh.call([20, 21], n_logits=2)), **CLOSE
    )


# Failed and interrupted calls


class Interrupted:
    """llama.cpp where one call of a function, after `n_before` others, raises KeyboardInterrupt."""

    def __init__(self, lib, name, n_before, works_first):
        self._lib, self._name, self._left, self._works_first = lib, name, n_before, works_first

    def __getattr__(self, name):
        return self._call if name == self._name else getattr(self._lib, name)

    def _call(self, *args):
        self._left -= 1
        stops = self._left == -1
        done = getattr(self._lib, self._name)(*args) if self._works_first or not stops else None
        if stops:
            raise KeyboardInterrupt
        return done


@pytest.fixture
def check(check_next):
    """A function that checks that the cache holds the tokens in `cached`, and no tree."""

    def check(context):
        assert set(sequence_ends(context)[1 : context.limits.max_branches]) <= {-1}
        with pytest.raises(InvalidRequest, match="parent"):
            run(context.call([1], [0]))
        check_next(context)

    return check


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("on_a_tree", [False, True])
@pytest.mark.parametrize("model_name", ["tiny_model", "recurrent_model"])
def test_the_cache_is_consistent_after_a_failure(
    request, make_context, check, monkeypatch, failure, on_a_tree, model_name
):
    model = request.getfixturevalue(model_name)
    context = make_context(model, max_branches=6)
    decode, error = FAILURES[failure]
    run(context.call(TEXT, n_logits=0))
    call = partial(context.call, [50, 51, 52])
    if on_a_tree:
        run(context.call([40, 41], [-1, 0] if model.is_recurrent else [-1, -1]))
        parents = range(1, 6) if model.is_recurrent else [-1, 1, 2, 2, 1]
        call = partial(context.call, [50, 51, 52, 53, 54], parents)
    monkeypatch.setattr(context.context, "lib", Broken(context.context.lib, decode))
    with pytest.raises(error):
        run(call())
    monkeypatch.undo()
    assert context.cached in ([TEXT, []] if model.is_recurrent else [TEXT])
    check(context)


@pytest.mark.parametrize("model_name", ["tiny_model", "recurrent_model"])
@pytest.mark.parametrize("n_nodes", [0, 10, 25])
def test_abort_within_llama_cpp(request, make_context, check, model_name, n_nodes):
    """llama.cpp stops in the middle of its compute graph."""
    model = request.getfixturevalue(model_name)
    context = make_context(model, max_branches=3)
    lib = context.context.lib
    calls = []
    abort = lib.ggml_abort_callback(lambda _: len(calls) >= n_nodes or calls.append(1) or False)
    never = lib.ggml_abort_callback(lambda _: False)
    run(context.call(TEXT, n_logits=0))
    lib.llama_set_abort_callback(context.handle, abort, ctypes.c_void_p(0))
    with pytest.raises(BackendError, match="code 2"):
        run(context.call([7, 8, 9], [-1, 0, 0] if not model.is_recurrent else [-1, 0, 1]))
    lib.llama_set_abort_callback(context.handle, never, ctypes.c_void_p(0))
    assert context.cached in ([TEXT, []] if model.is_recurrent else [TEXT])
    check(context)


COPY, REMOVE = "llama_memory_seq_cp", "llama_memory_seq_rm"
CHANGES = {  # of the cache: calls of llama.cpp that are interrupted, and what the cache may hold then
    "truncate": (lambda row: row.truncate(4), [(REMOVE, n) for n in range(3)], TEXT[:4]),
    "clear": (lambda row: row.truncate(0), [(REMOVE, n) for n in range(3)], []),
    "drop a tree": (lambda row: row.truncate(len(TEXT)), [(REMOVE, n) for n in range(3)], TEXT),
    "commit": (
        lambda row: row.commit([2, 3]), [(COPY, 0), *((REMOVE, n) for n in range(3))], [*TEXT, 22, 23]
    ),
    "fork": (lambda row: run(row.call([30, 31], [0, -1])), [(COPY, 0), (COPY, 1)], TEXT),
}  # fmt: skip


@pytest.mark.parametrize("works_first", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_the_cache_is_consistent_after_an_interrupt(
    make_context, check, tiny_model, monkeypatch, kind, works_first
):
    change, calls, after = CHANGES[kind]
    for name, n_before in calls:
        context = make_context(tiny_model, max_branches=6)
        run(context.call(TEXT, n_logits=0))
        run(context.call([20, 21, 22, 23, 24, 25], [-1, 0, -1, 2, 3, 2]))
        interrupted = Interrupted(context.context.lib, name, n_before, works_first)
        monkeypatch.setattr(context.context, "lib", interrupted)
        with pytest.raises(KeyboardInterrupt):
            change(context)
        monkeypatch.undo()
        assert context.cached in (TEXT, after)
        check(context)


def test_the_error_quotes_llama_cpp(context, monkeypatch):
    """llama.cpp rejects a batch with a gap in the positions."""
    run(context.call(TEXT, n_logits=0))
    context.cached.append(1)  # now the list is longer than the cache
    with pytest.raises(BackendError, match=r"code -1, .*position"):
        run(context.call([2], n_logits=1))
    assert context.cached == TEXT


# Recurrent models


def test_a_recurrent_model_goes_back_to_a_checkpoint(make_context, check_next, recurrent_model):
    context = make_context(recurrent_model)
    assert context.limits.rollback == "fork"
    assert context.limits.max_rollback == 0
    run(context.call(TEXT, n_logits=0))
    assert context.checkpoint()
    run(context.call([5, 6, 7], n_logits=0))
    context.truncate(len(TEXT) + 1)
    assert context.cached == TEXT
    check_next(context)
    context.truncate(len(TEXT) - 1)
    assert context.cached == []
    check_next(context)


def test_a_tree_has_no_checkpoint(make_context, recurrent_model):
    context = make_context(recurrent_model)
    run(context.call([5, 6], [-1, 0]))
    with pytest.raises(InvalidRequest, match="commit it first"):
        context.checkpoint()


@pytest.fixture(scope="module")
def kept_states_model(folder):
    return Model(write_tiny(folder / "qwen35.gguf", "qwen35"))


def test_a_recurrent_model_without_rollback(kept_states_model, make_context):
    context = make_context(kept_states_model, unified=False)
    assert context.limits.rollback == "none"
    run(context.call(TEXT, n_logits=0))
    assert not context.checkpoint()
    with pytest.raises(ModelError, match="cannot roll back"):
        context.truncate(3)
    context.truncate(0)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10])
def test_fewer_states_are_kept_than_a_call_has_tokens(kept_states_model, make_context, max_tokens):
    """llama.cpp aborts otherwise."""
    context = make_context(kept_states_model, max_tokens=max_tokens, max_logits=1)
    assert context.limits.max_rollback == max(0, min(8, max_tokens - 2))
    for start in range(0, len(TEXT), max_tokens):
        run(context.call(TEXT[start : start + max_tokens], n_logits=0))
    assert context.cached == TEXT
    assert make_context(kept_states_model, n_ctx=max_tokens).limits.max_rollback <= max(0, max_tokens - 2)


def test_states_are_kept_in_an_eighth_of_the_free_memory(kept_states_model, make_context, free_memory):
    state = kept_states_model.state_bytes
    assert state > 0
    for n, expected in ((100, 8), (5, 5), (0.5, 0)):
        free_memory(int(8 * (3 * state) * n) + 8)
        assert make_context(kept_states_model).limits.max_rollback == expected
