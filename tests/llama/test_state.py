"""Saved states: they are restored bit for bit, and no other bytes are passed to llama.cpp."""

import stat

import numpy as np
import psutil
import pytest

from spec_local.errors import BackendError, ContextOverflow, InvalidRequest
from spec_local.llama import runtime, state
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.session import Session
from tests.llama.answers import counted, tokens_of

pytestmark = pytest.mark.usefixtures("own_cache")

# Longer than the sliding window.
TEXT = [1, 301, 330, 337, 758, 273, 415, 368, 359, 496, 292] * 4
MODELS = ["tiny_model", "window_model", "recurrent_model"]


@pytest.fixture
def make(request, make_context):
    """A function that creates a context of the model that a fixture returns."""
    return lambda name, **kwargs: make_context(request.getfixturevalue(name), **kwargs)


@pytest.fixture
def saved(make_context, tiny_model, tmp_path):
    """A file with the states of the main model after `TEXT` and of the draft model after its beginning."""
    path = tmp_path / "a.state"
    contexts = {"main": make_context(tiny_model), "draft": make_context(tiny_model, n_ctx=64)}
    contexts["main"].evaluate(TEXT, 0)
    contexts["draft"].evaluate(TEXT[:30], 0)
    assert state.save(path, contexts) == path.stat().st_size
    return path


# Restoring


@pytest.mark.parametrize(
    ("branches", "cache_type"), [((1, 4), "f16"), ((4, 1), "f16"), ((1, 4), "q8_0"), ((4, 1), "q4_0")]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_next_logits_are_bit_identical(make, tmp_path, name, branches, cache_type):
    """With another `n_ctx` and `max_branches`, too; and saving changes nothing."""
    path = tmp_path / "a.state"
    before = make(name, max_branches=branches[0], cache_type=cache_type)
    before.evaluate(TEXT, 0)
    size = state.size({"main": before})
    assert state.save(path, {"main": before}) == size == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    after = make(name, max_branches=branches[1], cache_type=cache_type, n_ctx=128)
    after.evaluate([5, 6, 7], 0)
    assert state.load(path, {"main": after}) == ["main"]
    assert after.cached == TEXT
    for token in (8, 300, 9):
        expected = before.evaluate([token], 1)
        np.testing.assert_array_equal(after.evaluate([token], 1), expected)
    assert after.cached == before.cached
    for context in (before, after):
        context.truncate(0)
    np.testing.assert_array_equal(after.evaluate([8], 1), before.evaluate([8], 1))


@pytest.mark.parametrize("length", [1, 20, len(TEXT) - 1])
@pytest.mark.parametrize("name", ["tiny_model", "window_model"])
def test_a_restored_context_can_be_truncated(make, tmp_path, name, length):
    """To a length far before the sliding window, too."""
    path, before, after = tmp_path / "a.state", make(name), make(name)
    before.evaluate(TEXT, 0)
    state.save(path, {"main": before})
    state.load(path, {"main": after})
    for context in (before, after):
        context.truncate(length)
    np.testing.assert_array_equal(after.evaluate([8, 9], 2), before.evaluate([8, 9], 2))


@pytest.mark.parametrize("name", ["tiny_model", "window_model"])
def test_trees_before_saving_and_after_restoring(make, check_next, tmp_path, name):
    """Trees leave holes in the cache, and cells outside the window must not be reused after restoring."""
    path = tmp_path / "a.state"
    before = make(name, max_branches=4, n_ctx=128)
    for start in range(0, 40, 4):
        tokens = TEXT[start : start + 4]
        before.decode_tree([20, *tokens, 21, 22], [-1, -1, 1, 2, 3, 1, 2])
        before.commit([1, 2, 3, 4])
    before.decode_tree([20, 21], [-1, -1])  # the tree is not saved
    state.save(path, {"main": before})
    after = make(name, max_branches=4, n_ctx=128)
    state.load(path, {"main": after})
    text = list(TEXT[:40])
    assert after.cached == before.cached == text
    for step in range(20):
        tokens = [300 + step, 330 + step]
        for context in (before, after):
            if step % 4:  # rejected tokens leave holes; without branches, only the guard protects the cells
                context.decode_tree([*tokens, 21, 22], [-1, 0, 1, 2])
                context.commit([0, 1])
            else:
                context.decode_tree([20, *tokens, 21, 22], [-1, -1, 1, 1, 2])
                context.commit([1, 2])
        text += tokens
    for context in (before, after):
        assert context.cached == text
        for length in (len(text), 20):  # also to a length before the window
            context.truncate(length)
            check_next(context)


def test_an_empty_context_is_left_out(make, tmp_path):
    path, full, empty = tmp_path / "a.state", make("tiny_model"), make("tiny_model")
    full.evaluate(TEXT, 0)
    state.save(path, {"main": full, "draft": empty})
    empty.evaluate([5], 0)
    assert state.load(path, {"main": full, "draft": empty}) == ["main"]
    assert empty.cached == [5]
    nothing = tmp_path / "nothing.state"
    state.save(nothing, {"main": make("tiny_model")})
    with pytest.raises(InvalidRequest, match="has no state of the main model"):
        state.load(nothing, {"main": full})
    assert full.cached == TEXT


# Rejecting


def forbid(monkeypatch, context):
    """Fail the test if a state is passed to llama.cpp."""

    class Library:
        def __getattr__(self, name):
            assert name != "llama_state_set_data", "a bad state reached llama.cpp"
            return getattr(runtime.library(), name)

    monkeypatch.setattr(context.context, "lib", Library())


@pytest.fixture
def reader(make_context, tiny_model, monkeypatch):
    """A context with a few tokens, which fails the test if a state is passed to llama.cpp."""
    context = make_context(tiny_model)
    context.evaluate([5, 6, 7], 0)
    forbid(monkeypatch, context)
    return context


def check_rejected(path, contexts, match, kind=InvalidRequest):
    before = {role: list(context.cached) for role, context in contexts.items()}
    with pytest.raises(kind, match=match) as caught:
        state.load(path, contexts)
    assert "\n" not in str(caught.value)
    assert ": " in str(caught.value)
    assert {role: list(context.cached) for role, context in contexts.items()} == before


def test_damage_is_detected(saved, reader):
    whole = saved.read_bytes()
    rng = np.random.default_rng(0)
    places = [*range(30), *rng.integers(30, 1500, 50), *rng.integers(1500, len(whole), 50)]
    places += range(len(whole) - 34, len(whole))
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        saved.write_bytes(damaged)
        check_rejected(
            saved, {"main": reader, "draft": reader}, "damaged|another version|not a saved state|another"
        )
    for n in [*range(0, 60, 3), *rng.integers(60, len(whole), 30), len(whole) - 1]:
        saved.write_bytes(whole[:n])
        check_rejected(saved, {"main": reader}, "damaged|not a saved state|another version")
    for more in (b"\0", whole):
        saved.write_bytes(whole + more)
        check_rejected(saved, {"main": reader}, "damaged")
    np.testing.assert_array_equal(reader.evaluate([8], 1).shape, (1, reader.n_vocab))


def test_a_header_that_claims_too_much(saved, reader):
    whole = saved.read_bytes()
    for length in (1 << 63, 1 << 40, (1 << 26) + 1, 1 << 26, 0):
        saved.write_bytes(whole[:16] + length.to_bytes(8, "little") + whole[24:])
        check_rejected(saved, {"main": reader}, "damaged")


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        *((name, {}, "another model file") for name in ("tiny_draft", "window_model", "recurrent_model")),
        ("tiny_model", {"cache_type": "q8_0"}, "another cache type"),
        ("tiny_model", {"flash_attention": False}, "flash attention"),
        ("tiny_model", {"n_ctx": len(TEXT) - 1}, "larger --ctx"),
    ],
)
def test_another_model_or_setting(make, monkeypatch, saved, name, kwargs, match):
    context = make(name, **kwargs)
    context.evaluate([5, 6], 0)
    forbid(monkeypatch, context)
    check_rejected(saved, {"main": context}, match, ContextOverflow if "ctx" in match else InvalidRequest)


def test_another_build_or_number_of_gpu_layers(saved, reader, monkeypatch, pretend):
    monkeypatch.setattr(reader.model, "gpu_layers", 3)
    check_rejected(saved, {"main": reader}, "number of layers on the GPU")
    monkeypatch.undo()
    pretend(llama_cpp_build="another")
    check_rejected(saved, {"main": reader}, "build of llama.cpp")


@pytest.mark.parametrize(("written", "read"), [("avx2:1", ""), ("", "avx2:1"), ("avx2:1", "avx2:2")])
def test_other_kernels(make_context, tiny_model, reader, tmp_path, pretend_kernels, written, read):
    path, writer = tmp_path / "b.state", make_context(tiny_model)
    writer.evaluate(TEXT, 0)
    pretend_kernels(written)
    state.save(path, {"main": writer})
    pretend_kernels(read)
    check_rejected(path, {"main": reader}, "another set of CPU kernels")


def test_longrope_models_depend_on_the_context_length(saved, make_context, tiny_path, monkeypatch):
    """A state of a context within the original length is not valid in a longer one."""
    model = Model(tiny_path)
    model.__dict__["n_ctx_original"] = 100
    short, long = make_context(model, n_ctx=100), make_context(model, n_ctx=101)
    assert state.load(saved, {"main": short}) == ["main"]
    check_rejected(saved, {"main": long}, "extension of the context")


def test_restoring_only_the_draft_model(saved, make_context, tiny_model):
    draft, expected = make_context(tiny_model), make_context(tiny_model)
    assert state.load(saved, {"draft": draft}) == ["draft"]
    expected.evaluate(TEXT[:30], 0)
    np.testing.assert_array_equal(draft.evaluate([8], 1), expected.evaluate([8], 1))


def test_a_copy_of_the_model_file_matches(saved, make_context, tiny_path, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_path.read_bytes())
    context = make_context(Model(copy))
    assert state.load(saved, {"main": context}) == ["main"]
    content = bytearray(tiny_path.read_bytes())
    content[-len(content) // 3] ^= 1
    copy.write_bytes(content)
    check_rejected(saved, {"main": context}, "another model file")


def test_free_memory_is_checked_first(saved, reader, monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10}))
    check_rejected(saved, {"main": reader}, "MiB are free", ContextOverflow)
    with pytest.raises(ContextOverflow, match="MiB are free"):
        state.save(tmp_path / "b.state", {"main": reader})
    assert [p.name for p in tmp_path.iterdir()] == [saved.name]


@pytest.mark.parametrize("content", [b"", b"specdec state 2\n" + b"x" * 99, b"{}", b"GGUF" * 99])
def test_other_files(saved, reader, content):
    saved.write_bytes(content)
    check_rejected(
        saved, {"main": reader}, "another version" if b"specdec" in content else "not a saved state"
    )


def test_a_state_that_llama_cpp_rejects_leaves_an_empty_context(make, check_next):
    context = make("tiny_model")
    context.evaluate(TEXT, 0)
    bits = context.state()
    with pytest.raises(BackendError, match="rejected"):
        context.restore(TEXT, bits[: len(bits) // 2])
    assert context.cached == []
    context.evaluate(TEXT[:10], 0)
    with pytest.raises(BackendError, match="rejected"):
        context.restore(TEXT[:-1], bits)  # one token too few
    assert context.cached == []
    check_next(context, TEXT[:5])


@pytest.mark.parametrize("name", ["tiny_model", "window_model"])
@pytest.mark.parametrize("call", ["llama_state_get_data", "llama_state_set_data"])
def test_the_context_is_usable_after_an_interrupt(make, check_next, monkeypatch, name, call):
    context = make(name, max_branches=4)
    context.evaluate(TEXT, 0)
    bits = context.state()

    class Interrupted:
        def __getattr__(self, attribute):
            if attribute == call:
                raise KeyboardInterrupt
            return getattr(runtime.library(), attribute)

    monkeypatch.setattr(context.context, "lib", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        context.state() if "get" in call else context.restore(TEXT, bits)
    monkeypatch.undo()
    text = list(context.cached)
    assert text == (TEXT if "get" in call else [])
    for step in range(20):
        tokens = [300 + step, 330 + step]
        context.decode_tree([*tokens, 21, 22, 23], range(-1, 4))
        context.commit([0, 1])
        text += tokens
    assert context.cached == text
    for length in (len(text), 20):
        context.truncate(length)
        check_next(context)


# Files


# Sessions


def answer(session, prompt, **settings):
    """Return the output tokens, and the tokens that each context evaluated before them."""
    events, read = counted(session, prompt, **settings)
    return tokens_of(events), read


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "other.gguf"
    return Model(write_tiny_model(path, extra_tokens=["beer", "one two"], noise=0.05))


@pytest.mark.parametrize("draft", ["tiny_draft", "other_draft", None])
def test_a_session_continues_after_restoring(request, make, tmp_path, draft):
    """With a draft model of the same vocabulary, of a different one, and without one."""

    def opened():
        return Session(*(make(name, n_ctx=512) for name in ("tiny_model", draft) if name))

    path, first = tmp_path / "a.state", opened()
    output, _ = answer(first, TEXT)
    assert first.state_size() == first.save_state(str(path)) == path.stat().st_size
    prompt = [*TEXT, *output, 7, 8, 9]
    expected, known = answer(first, prompt)
    second = opened()
    assert second.load_state(path) == len(TEXT) + len(output) - 1
    got, read = answer(second, prompt)
    assert got == expected
    assert read == known
    assert max(read) <= 10


def test_a_draft_model_with_a_different_vocabulary_and_history(make, tmp_path):
    path, sessions = tmp_path / "a.state", []
    for _ in range(2):
        sessions.append(Session(*(make(name, n_ctx=512) for name in ("tiny_model", "other_draft"))))
    answer(sessions[0], [*TEXT, 600, 601, 602])
    prompt = [*TEXT[:20], *(300 + i for i in range(30))]
    answer(sessions[0], prompt, proposer="none")
    sessions[0].save_state(path)
    sessions[1].load_state(path)
    _, (main, draft) = answer(sessions[1], prompt)
    assert main == 0
    assert draft >= 29


@pytest.mark.parametrize("kind", ["no draft now", "no draft then", "another draft now"])
def test_restoring_with_another_draft_model(make, tmp_path, kind):
    path = tmp_path / "a.state"
    first = Session(
        *(make(n, n_ctx=512) for n in ("tiny_model", "tiny_draft")[: 1 + (kind != "no draft then")])
    )
    output, _ = answer(first, TEXT, proposer="auto")
    first.save_state(path)
    now = {"no draft now": [], "no draft then": ["tiny_draft"], "another draft now": ["window_model"]}[kind]
    second = Session(*(make(n, n_ctx=512) for n in ("tiny_model", *now)))
    second.load_state(path)
    _, read = answer(second, [*TEXT, *output, 7], proposer="auto")
    assert read[0] <= 2
    assert len(read) == 1 or read[1] >= len(TEXT)
