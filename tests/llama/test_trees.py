"""Trees of draft tokens: each branch has the logits of a separate sequence, and commits keep one path."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_local.core.calls import run
from spec_local.core.proposal import path_to
from spec_local.errors import ContextOverflow, InvalidRequest, ModelError, SpecLocalError
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.testing import FakeModel
from tests.rounding import limit
from tests.sequences import sequence_ends

CLOSE = {"atol": limit(0.05, 0.08), "rtol": 0}  # see `check_next`
NEAR = {"atol": 1.0, "rtol": 0}  # for Q4_1 weights, where single tokens use another kernel: at most 0.42

TEXT = [random.Random(0).randrange(5, 300) for _ in range(40)]  # longer than several sliding windows

MODELS = ["tiny_model", "qwen_model", "window_model"]

SHAPES = {
    "chain": [-1, 0, 1, 2, 3],
    "siblings": [-1] * 8,
    "binary": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
    "comb": [-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7],
    "depth first": [-1, 0, 1, 2, 1, 4, 0, 6, -1, 8, 9, 8],
    "late children": [-1, 0, 1, -1, 0, 1, 3, 0, 2, 8, -1, 9],  # of nodes that have children already
}


@pytest.fixture(scope="module")
def qwen_model(folder):
    return Model(write_tiny_model(folder / "qwen2.gguf", architecture="qwen2"))


def n_leaves(parents):
    return len(set(range(len(parents))) - set(parents))


def levels(parents):
    """Return the number of nodes in each level, and the parents if nodes are numbered level by level."""
    depth = [len(path_to(parents, node)) for node in range(len(parents))]
    order = sorted(range(len(parents)), key=depth.__getitem__)
    sizes = [depth.count(d) for d in range(1, max(depth) + 1)]
    return sizes, [order.index(parents[node]) if parents[node] >= 0 else -1 for node in order]


def splits(parents):
    """Yield ways to decode a tree in several calls: the sizes of the calls, and the parents in that order."""
    yield [len(parents)], parents
    yield levels(parents)
    yield [1] * len(parents), parents
    yield [3] * (len(parents) // 3) + [len(parents) % 3] * (len(parents) % 3 > 0), parents


def decode_in_calls(model, tokens, parents, sizes):
    rows, start = [], 0
    for size in sizes:
        rows.extend(run(model.call(tokens[start : start + size], parents[start : start + size])).copy())
        start += size
    return rows


def check_freed(context):
    """Check that only the first sequence has tokens."""
    assert set(sequence_ends(context)[1 : context.limits.max_branches]) <= {-1}


# Logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model_name", MODELS)
def test_logits_are_those_of_each_path_alone(
    request, make_context, fresh_logits, check_next, model_name, shape
):
    """In the tree, and after the path was committed."""
    model = request.getfixturevalue(model_name)
    context = make_context(model, max_branches=n_leaves(SHAPES[shape]))
    tokens = [50 + 7 * i for i in range(len(SHAPES[shape]))]
    run(context.call(TEXT, n_logits=0))
    rng = random.Random(0)
    for sizes, parents in splits(SHAPES[shape]):
        rows = decode_in_calls(context, tokens, parents, sizes)
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(parents, leaf)
            expected = fresh_logits(model, [*TEXT, *(tokens[node] for node in path)])[len(TEXT) :]
            np.testing.assert_allclose([rows[node] for node in path], expected, **CLOSE)
        path = path_to(parents, rng.randrange(len(parents)))
        context.commit(path)
        assert context.cached == [*TEXT, *(tokens[node] for node in path)]
        check_freed(context)
        check_next(context, (33, 34))
        context.truncate(len(TEXT))


@pytest.mark.parametrize("call", ["truncate", "evaluate", "commit nothing"])
def test_a_tree_is_discarded(make_context, check_next, tiny_model, call):
    context = make_context(tiny_model, max_branches=4)
    run(context.call(TEXT, n_logits=0))
    run(context.call([50, 51, 52, 53], [-1, 0, 0, -1]))
    kept = TEXT
    if call == "truncate":
        context.truncate(20)
        kept = TEXT[:20]
    elif call == "commit nothing":
        context.commit([])
    else:
        run(context.call([60], n_logits=0))
        kept = [*TEXT, 60]
    assert context.cached == kept
    check_freed(context)
    with pytest.raises(InvalidRequest, match="parent"):
        run(context.call([1], [0]))
    check_next(context)


def test_branches_share_the_committed_cells(make_context, tiny_model):
    context = make_context(tiny_model, n_ctx=256, max_branches=255, max_tokens=64)
    for _ in range(3):
        run(context.call([7] * 64, n_logits=0))
    run(context.call([8] * 64, [-1] * 64))
    context.commit([63])
    assert len(context.cached) == 193
    check_freed(context)


@pytest.mark.parametrize(("n_text", "n_chain", "length"), [(6, 5, 27), (5, 7, 26), (20, 0, 24), (20, 0, 10)])
def test_a_sliding_window_over_a_cache_with_holes(
    make_context, check_next, window_model, n_text, n_chain, length
):
    """llama.cpp reuses cells outside the window if it finds them after free ones, which trees leave."""
    context = make_context(window_model, max_branches=11)
    run(context.call(TEXT[:20], n_logits=0))
    run(context.call(range(50, 61), [-1] * 11))
    context.commit([10])  # leaves ten free cells before it
    for token in range(60, 60 + n_text):
        run(context.call([token], n_logits=0))
    for i in range(n_chain):
        run(context.call([100 + i], [i - 1]))
    context.commit([])
    context.truncate(length)
    check_next(context)


@pytest.mark.starter
def test_starter_trees(starter, make_context, fresh_logits):
    context = make_context(starter, max_branches=6)
    text = starter.vocabulary.tokenize("The capital of France is")
    tokens = starter.vocabulary.tokenize(" Paris, and that of Italy is Rome; that of Spain is Madrid")[:12]
    parents = SHAPES["late children"]
    run(context.call(text, n_logits=0))
    for sizes in ([12], [1] * 12, [3] * 4):
        rows = decode_in_calls(context, tokens, parents, sizes)
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(parents, leaf)
            expected = fresh_logits(starter, [*text, *(tokens[node] for node in path)])[len(text) :]
            np.testing.assert_allclose([rows[node] for node in path], expected, **NEAR)
        path = path_to(parents, 6)  # not in sequence 0
        context.commit(path)
        kept = [*text, *(tokens[node] for node in path)]
        expected = fresh_logits(starter, [*kept, *tokens[:1]])[-1:]
        np.testing.assert_allclose(run(context.call(tokens[:1], n_logits=1)), expected, **NEAR)
        context.truncate(len(text))


# Invalid trees

BAD_TREES = [
    *(([], []), ([1, 2], [-1]), ([1], [-1, 0]), ([1], [-2]), ([1], [2]), ([1], [1 << 40])),
    *(([1, 2], [3, 2]), ([1, 2], [2, 4]), ([1] * 65, [-1] * 65), ([-1], [-1]), ([1 << 40], [-1])),
    *(([1, 2, 3], [-1, -1, -1]), ([1, 2, 3], [0, 0, 0])),
]
BAD_PATHS = [[2], [-1], [1, 0], [0, 0], [0, 1, 1], [1], [1 << 40], [0, 2]]
WRONG_CALLS = [
    *(("call", (tokens, parents, min(len(tokens), 1))) for tokens, parents in BAD_TREES),
    *(("call", ([5, 6], [1, 2], n_logits)) for n_logits in (-1, 3, 1 << 40)),
    ("call", ([5] * 33, range(1, 34))),
    *(("commit", (path,)) for path in BAD_PATHS),
    *(("truncate", (length,)) for length in (-1, 3, 4, 1 << 40)),
]


@pytest.fixture(params=["fake", "llama.cpp"])
def model_with_chain(request, make_context, tiny_model):
    """A `ModelSequence` with max_branches=3, two committed tokens and a chain of two nodes."""
    limits = {"n_ctx": 72, "max_tokens": 64, "max_logits": 32, "max_branches": 3}
    model = FakeModel(**limits) if request.param == "fake" else make_context(tiny_model, **limits)
    run(model.call([1, 2], n_logits=0))
    run(model.call([3, 4], [-1, 0]))
    return model


def check_untouched(model):
    """Check that tokens and tree are those of `model_with_chain`."""
    assert list(model.cached) == [1, 2]
    if not isinstance(model, FakeModel):
        assert sequence_ends(model)[:3] == [3, -1, -1]
    row = run(model.call([5], [1]))[0].copy()
    model.commit([0, 1, 2])
    model.truncate(2)
    np.testing.assert_allclose(row, run(model.call([3, 4, 5], n_logits=1))[0], **CLOSE)


def use(model, name, *arguments):
    """Call a method; the logits, if it evaluates tokens."""
    if name == "call":
        return run(model.call(*arguments))
    getattr(model, name)(*arguments)
    return None


@pytest.mark.parametrize(("name", "arguments"), WRONG_CALLS, ids=str)
def test_invalid_calls_change_nothing(model_with_chain, name, arguments):
    with pytest.raises(InvalidRequest):
        use(model_with_chain, name, *arguments)
    check_untouched(model_with_chain)


def test_tree_nodes_count_towards_the_context_length(model_with_chain):
    model_with_chain.commit([])
    run(model_with_chain.call([5] * 64, n_logits=0))
    run(model_with_chain.call([6, 7, 8, 9], [-1, -1, 0, 1]))
    with pytest.raises(ContextOverflow):
        run(model_with_chain.call([1, 1, 1], [-1, 2, 3]))
    assert list(model_with_chain.cached) == [1, 2, *[5] * 64]
    model_with_chain.commit([])
    assert run(model_with_chain.call([6, 7, 8, 9, 1, 1], [-1, -1, 0, 1, 2, 3])).shape[0] == 6
    model_with_chain.commit([1, 3, 5])
    assert list(model_with_chain.cached)[-3:] == [7, 9, 1]


@pytest.mark.parametrize("max_branches", [1, 2, 5])
def test_too_many_branches(make_context, tiny_model, max_branches):
    for model in (make_context(tiny_model, max_branches=max_branches), FakeModel(max_branches=max_branches)):
        run(model.call([1, 2], n_logits=0))
        run(model.call([3] * max_branches, [-1] * max_branches))
        for parents in ([-1], [0, 0]):
            with pytest.raises(InvalidRequest, match="branches"):
                run(model.call([4] * len(parents), parents))
        run(model.call([4] * max_branches, range(max_branches)))  # no new branches
        model.commit([max_branches - 1, 2 * max_branches - 1])
        assert list(model.cached) == [1, 2, 3, 4]


def test_a_recurrent_model_evaluates_only_chains(make_context, fresh_logits, recurrent_model):
    context = make_context(recurrent_model, max_branches=8)
    assert context.limits.max_branches == 1
    run(context.call(TEXT, n_logits=0))
    for parents in ([-1, -1], [-1, 0, 0]):
        with pytest.raises(ModelError, match=r"recurrent.*chain"):
            run(context.call([5] * len(parents), parents))
    assert context.cached == TEXT
    rows = np.concatenate([run(context.call([50, 51], [-1, 0])).copy(), run(context.call([52], [1]))])
    with pytest.raises(ModelError, match=r"recurrent.*chain"):
        run(context.call([53], [0]))
    context.commit([0, 1, 2])
    assert context.cached == [*TEXT, 50, 51, 52]
    expected = fresh_logits(recurrent_model, [*TEXT, 50, 51, 52, 53])[len(TEXT) :]
    np.testing.assert_allclose([*rows, *run(context.call([53], n_logits=1))], expected, **CLOSE)


# Random walks


def random_parents(rng, tree, n, max_branches):
    """Return parents for `n` more nodes, within `max_branches`."""
    parents = list(tree)
    for node in range(len(tree), len(tree) + n):
        parent = rng.randint(-1, node - 1)
        parents.append(parent if n_leaves([*parents, parent]) <= max_branches else node - 1)
    return parents[len(tree) :]


def test_random_calls_of_the_fake_model():
    """Decode, commit, truncate and evaluate at random. Those of llama.cpp are tested in test_rows.py."""
    model, rng, text = FakeModel(max_branches=6, order=3), random.Random(0), []
    for _ in range(500):
        if len(text) > 60 or rng.random() < 0.15:
            length = rng.randint(0, len(text))
            if rng.random() < 0.3:
                run(model.call([5, 6], [-1, -1]))
            model.truncate(length)
            del text[length:]
        elif rng.random() < 0.15:
            tokens = [rng.randrange(model.limits.n_vocab) for _ in range(rng.randint(1, 6))]
            text += tokens
            np.testing.assert_array_equal(run(model.call(tokens, n_logits=1))[0], model.logits(text))
        else:
            tokens, parents, rows = [], [], []
            for _ in range(rng.randint(1, 3)):
                new = random_parents(rng, parents, rng.randint(1, 6), model.limits.max_branches)
                tokens += [rng.randrange(model.limits.n_vocab) for _ in new]
                parents += new
                rows += [*run(model.call(tokens[-len(new) :], new)).copy()]
            for node, row in enumerate(rows):
                path = [tokens[n] for n in path_to(parents, node)]
                np.testing.assert_array_equal(row, model.logits([*text, *path]))
            path = path_to(parents, rng.randint(-1, len(parents) - 1))
            path = path[: rng.randint(0, len(path))]
            model.commit(path)
            text += [tokens[node] for node in path]
        assert list(model.cached) == text


numbers = st.one_of(st.integers(-2, 12), st.integers())
calls = st.one_of(
    st.tuples(
        st.just("call"),
        st.lists(numbers, max_size=6),
        st.lists(numbers, max_size=6),
        st.one_of(st.none(), numbers),
    ),
    # Mostly valid, so that there is a tree.
    st.lists(st.integers(-1, 5), min_size=1, max_size=5).map(
        lambda parents: ("call", [7] * len(parents), [min(p, i - 1) for i, p in enumerate(parents)])
    ),
    st.tuples(st.just("commit"), st.lists(numbers, max_size=4)),
    st.tuples(st.just("commit"), st.sampled_from([[], [0], [0, 1], [1]])),
    st.tuples(st.just("truncate"), numbers),
    st.tuples(st.just("call"), st.lists(numbers, max_size=4), st.none(), numbers),
)


@settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(script=st.lists(calls, max_size=12))
def test_the_fake_model_accepts_the_same_calls(make_context, tiny_model, script):
    """Nothing crashes, and both models raise the same errors."""
    limits = {"n_ctx": 24, "max_tokens": 5, "max_logits": 4, "max_branches": 3}
    context = make_context(tiny_model, **limits)
    fake = FakeModel(context.limits.n_vocab, **limits)
    for name, *arguments in script:
        outcomes = []
        for model in (context, fake):
            try:
                logits = use(model, name, *arguments)
                outcomes.append(None if logits is None else logits.shape)
                assert logits is None or np.isfinite(logits).all()
            except SpecLocalError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], (name, arguments)
        assert context.cached == fake.cached
    context.truncate(0)
    check_freed(context)
    context.close()
