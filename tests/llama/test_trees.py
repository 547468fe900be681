"""Trees of tokens: every branch is computed as if it were alone, and the text is what was kept."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_local.core.fake import FakeModel
from spec_local.errors import ContextOverflow, InvalidRequest, ModelError, SpecLocalError
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model

# As in test_context.py.
CLOSE = {"atol": 0.05, "rtol": 0}
NEAR = {
    "atol": 1.0,
    "rtol": 0,
}  # for Q4_1 weights, which a single token meets in another kernel: 0.42 at most

TEXT = [random.Random(0).randrange(5, 300) for _ in range(40)]  # several sliding windows long

MODELS = ["tiny_model", "qwen_model", "window_model"]

SHAPES = {
    "chain": [-1, 0, 1, 2, 3],
    "siblings": [-1] * 8,
    "binary": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
    "comb": [-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7],
    "depth first": [-1, 0, 1, 2, 1, 4, 0, 6, -1, 8, 9, 8],
    "afterthoughts": [-1, 0, 1, -1, 0, 1, 3, 0, 2, 8, -1, 9],  # children for nodes that have some
}


@pytest.fixture(scope="module")
def qwen_model(folder):
    return Model(write_tiny_model(folder / "qwen2.gguf", architecture="qwen2"))


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def n_leaves(parents):
    return len(set(range(len(parents))) - set(parents))


def levels(parents):
    """Node numbers level by level, and the same tree with its nodes numbered so: how many a level, and parents."""
    depth = [len(path_to(parents, node)) for node in range(len(parents))]
    order = sorted(range(len(parents)), key=depth.__getitem__)
    sizes = [depth.count(d) for d in range(1, max(depth) + 1)]
    return sizes, [order.index(parents[node]) if parents[node] >= 0 else -1 for node in order]


def cuts(parents):
    """The ways to grow a tree: sizes of calls, and parents in that order."""
    yield [len(parents)], parents
    yield levels(parents)
    yield [1] * len(parents), parents
    yield [3] * (len(parents) // 3) + [len(parents) % 3] * (len(parents) % 3 > 0), parents


def grow_in_calls(model, tokens, parents, sizes):
    rows, start = [], 0
    for size in sizes:
        rows.extend(model.decode_tree(tokens[start : start + size], parents[start : start + size]).copy())
        start += size
    return rows


def check_freed(context):
    assert context._ends == {0: -1}
    ends = [context._lib.llama_memory_seq_pos_max(context._memory, s) for s in range(1, context.max_branches)]
    assert set(ends) <= {-1}


# What a tree computes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model_name", MODELS)
def test_a_row_of_a_tree_is_that_of_its_path_alone(request, make_context, fresh_logits, model_name, shape):
    model = request.getfixturevalue(model_name)
    context = make_context(model, max_branches=n_leaves(SHAPES[shape]))
    tokens = [50 + 7 * i for i in range(len(SHAPES[shape]))]
    context.evaluate(TEXT, 0)
    for sizes, parents in cuts(SHAPES[shape]):
        rows = grow_in_calls(context, tokens, parents, sizes)
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(parents, leaf)
            expected = fresh_logits(model, [*TEXT, *(tokens[node] for node in path)])[len(TEXT) :]
            np.testing.assert_allclose([rows[node] for node in path], expected, **CLOSE)
        context.commit([])
        assert context.cached == TEXT


@pytest.mark.parametrize("model_name", MODELS)
def test_a_tree_without_a_text(request, make_context, fresh_logits, model_name):
    model = request.getfixturevalue(model_name)
    context = make_context(model, max_branches=4)
    rows = [*context.decode_tree([1, 2, 3], [-1, -1, 0]).copy(), *context.decode_tree([4, 5], [0, 1])]
    for path, row in zip([[1], [2], [1, 3], [1, 4], [2, 5]], rows, strict=True):
        np.testing.assert_allclose(row, fresh_logits(model, path)[-1], **CLOSE)
    context.commit([0, 3])
    assert context.cached == [1, 4]
    np.testing.assert_allclose(context.evaluate([6], 1), fresh_logits(model, [1, 4, 6])[-1:], **CLOSE)


@pytest.mark.parametrize("n_logits", [0, 1, 3, 5])
def test_rows_are_those_of_the_last_nodes(make_context, fresh_logits, tiny_model, n_logits):
    context = make_context(tiny_model, max_branches=3)
    context.evaluate(TEXT, 0)
    rows = context.decode_tree([50, 51, 52, 53, 54], [-1, 0, 0, -1, 3], n_logits)
    assert rows.shape == (n_logits, context.n_vocab)
    paths = [[50], [50, 51], [50, 52], [53], [53, 54]]
    for row, path in zip(rows[::-1], paths[::-1], strict=False):
        np.testing.assert_allclose(row, fresh_logits(tiny_model, [*TEXT, *path])[-1], **CLOSE)


@pytest.mark.parametrize("model_name", MODELS)
def test_every_path_can_be_kept(request, make_context, fresh_logits, model_name):
    model = request.getfixturevalue(model_name)
    for shape in SHAPES.values():
        context = make_context(model, max_branches=n_leaves(shape))
        tokens = [50 + 7 * i for i in range(len(shape))]
        for sizes, parents in cuts(shape):
            for node in range(-1, len(parents)):
                context.truncate(0)
                context.evaluate(TEXT, 0)
                grow_in_calls(context, tokens, parents, sizes)
                context.commit(path_to(parents, node))
                kept = [*TEXT, *(tokens[n] for n in path_to(parents, node))]
                assert context.cached == kept
                check_freed(context)
                if node % 3 == 2:  # the others for the caches' own sake only: fresh ones take time
                    expected = fresh_logits(model, [*kept, 33, 34])[-2:]
                    np.testing.assert_allclose(context.evaluate([33, 34], 2), expected, **CLOSE)
        context.close()


@pytest.mark.parametrize("call", ["truncate", "evaluate", "keep nothing"])
def test_a_tree_is_forgotten(make_context, fresh_logits, tiny_model, call):
    context = make_context(tiny_model, max_branches=4)
    context.evaluate(TEXT, 0)
    context.decode_tree([50, 51, 52, 53], [-1, 0, 0, -1])
    kept = TEXT
    if call == "truncate":
        context.truncate(20)
        kept = TEXT[:20]
    elif call == "keep nothing":
        context.commit([])
    else:
        context.evaluate([60], 0)
        kept = [*TEXT, 60]
    assert context.cached == kept
    check_freed(context)
    with pytest.raises(InvalidRequest, match="parent"):
        context.decode_tree([1], [0])
    np.testing.assert_allclose(
        context.decode_tree([33, 34], [-1, -1])[1], fresh_logits(tiny_model, [*kept, 34])[-1], **CLOSE
    )


def test_branches_share_the_cells_of_the_text(make_context, tiny_model):
    context = make_context(tiny_model, n_ctx=256, max_branches=256, max_tokens=64)
    for _ in range(3):
        context.evaluate([7] * 64, 0)
    context.decode_tree([8] * 64, [-1] * 64)
    context.commit([63])
    assert len(context.cached) == 193
    check_freed(context)


@pytest.mark.parametrize(("n_text", "n_chain", "length"), [(6, 5, 27), (5, 7, 26), (20, 0, 24), (20, 0, 10)])
def test_a_window_of_a_text_with_holes_stays_whole(
    make_context, fresh_logits, window_model, n_text, n_chain, length
):
    """llama.cpp reuses cells that have left the window where it finds them behind free ones, as trees leave them."""
    context = make_context(window_model, max_branches=11)
    context.evaluate(TEXT[:20], 0)
    context.decode_tree(range(50, 61), [-1] * 11)
    context.commit([10])  # ten free cells before it
    for token in range(60, 60 + n_text):
        context.evaluate([token], 0)
    for i in range(n_chain):
        context.decode_tree([100 + i], [i - 1])
    context.commit([])
    context.truncate(length)
    expected = fresh_logits(window_model, [*context.cached, 33])[-1]
    np.testing.assert_allclose(context.evaluate([33], 1)[0], expected, **CLOSE)


@pytest.mark.starter
def test_starter_trees_are_its_chains(starter, make_context, fresh_logits):
    context = make_context(starter, max_branches=6)
    text = starter.vocabulary.tokenize("The capital of France is")
    tokens = starter.vocabulary.tokenize(" Paris, and that of Italy is Rome; that of Spain is Madrid")[:12]
    parents = SHAPES["afterthoughts"]
    context.evaluate(text, 0)
    for sizes in ([12], [1] * 12, [3] * 4):
        rows = grow_in_calls(context, tokens, parents, sizes)
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(parents, leaf)
            expected = fresh_logits(starter, [*text, *(tokens[node] for node in path)])[len(text) :]
            np.testing.assert_allclose([rows[node] for node in path], expected, **NEAR)
        path = path_to(parents, 6)  # not in the text's own sequence
        context.commit(path)
        kept = [*text, *(tokens[node] for node in path)]
        expected = fresh_logits(starter, [*kept, *tokens[:1]])[-1:]
        np.testing.assert_allclose(context.evaluate(tokens[:1], 1), expected, **NEAR)
        context.truncate(len(text))


# What a tree may not be

BAD_TREES = [
    ([], []),
    ([1, 2], [-1]),
    ([1], [-1, 0]),
    ([1], [-2]),
    ([1], [2]),
    ([1], [1 << 40]),
    ([1, 2], [3, 2]),
    ([1, 2], [2, 4]),
    ([1] * 65, [-1] * 65),
    ([-1], [-1]),
    ([1 << 40], [-1]),
    ([1, 2, 3], [-1, -1, -1]),
    ([1, 2, 3], [0, 0, 0]),
]
BAD_PATHS = [[2], [-1], [1, 0], [0, 0], [0, 1, 1], [1], [1 << 40], [0, 2]]


@pytest.fixture(params=["fake", "llama.cpp"])
def text_model(request, make_context, tiny_model):
    """A `LanguageModel` of 3 branches with a text of two tokens and a chain of two on top."""
    limits = {"n_ctx": 72, "max_tokens": 64, "max_logits": 32, "max_branches": 3}
    model = FakeModel(**limits) if request.param == "fake" else make_context(tiny_model, **limits)
    model.evaluate([1, 2], 0)
    model.decode_tree([3, 4], [-1, 0])
    return model


def check_untouched(model):
    """The text and the tree of `text_model`."""
    assert list(model.cached) == [1, 2]
    if not isinstance(model, FakeModel):
        sequences = [model._lib.llama_memory_seq_pos_max(model._memory, s) for s in range(3)]
        assert sequences == [3, -1, -1]
    row = model.decode_tree([5], [1])[0].copy()
    model.commit([0, 1, 2])
    model.truncate(2)
    np.testing.assert_allclose(row, model.evaluate([3, 4, 5], 1)[0], **CLOSE)


@pytest.mark.parametrize(("tokens", "parents"), BAD_TREES, ids=str)
def test_bad_trees_are_refused_and_change_nothing(text_model, tokens, parents):
    with pytest.raises(InvalidRequest):
        text_model.decode_tree(tokens, parents, min(len(tokens), 1))
    check_untouched(text_model)


@pytest.mark.parametrize("n_logits", [-1, 3, 1 << 40])
def test_rows_that_are_not_there_are_refused(text_model, n_logits):
    with pytest.raises(InvalidRequest):
        text_model.decode_tree([5, 6], [1, 2], n_logits)
    with pytest.raises(InvalidRequest):
        text_model.decode_tree([5] * 33, range(1, 34))
    check_untouched(text_model)


@pytest.mark.parametrize("path", BAD_PATHS, ids=str)
def test_a_path_that_is_none_is_not_kept(text_model, path):
    with pytest.raises(InvalidRequest, match="is not a child of"):
        text_model.commit(path)
    check_untouched(text_model)


@pytest.mark.parametrize("length", [-1, 3, 4])
def test_a_tree_is_no_text_to_trim(text_model, length):
    with pytest.raises(InvalidRequest):
        text_model.truncate(length)
    check_untouched(text_model)


def test_a_tree_counts_in_a_full_context(text_model):
    text_model.commit([])
    text_model.evaluate([5] * 64, 0)
    text_model.decode_tree([6, 7, 8, 9], [-1, -1, 0, 1])
    with pytest.raises(ContextOverflow):
        text_model.decode_tree([1, 1, 1], [-1, 2, 3])
    assert list(text_model.cached) == [1, 2, *[5] * 64]
    text_model.commit([])
    assert text_model.decode_tree([6, 7, 8, 9, 1, 1], [-1, -1, 0, 1, 2, 3]).shape[0] == 6
    text_model.commit([1, 3, 5])
    assert list(text_model.cached)[-3:] == [7, 9, 1]


@pytest.mark.parametrize("max_branches", [1, 2, 5])
def test_more_branches_than_allowed_are_refused(make_context, tiny_model, max_branches):
    for model in (
        make_context(tiny_model, max_branches=max_branches),
        FakeModel(max_branches=max_branches),
    ):
        model.evaluate([1, 2], 0)
        model.decode_tree([3] * max_branches, [-1] * max_branches)
        for parents in ([-1], [0, 0]):
            with pytest.raises(InvalidRequest, match="branches"):
                model.decode_tree([4] * len(parents), parents)
        model.decode_tree([4] * max_branches, range(max_branches))  # no new branches
        model.commit([max_branches - 1, 2 * max_branches - 1])
        assert list(model.cached) == [1, 2, 3, 4]


def test_a_recurrent_model_takes_chains_and_refuses_trees(make_context, fresh_logits, recurrent_model):
    context = make_context(recurrent_model, max_branches=8)
    assert context.max_branches == 1
    context.evaluate(TEXT, 0)
    for parents in ([-1, -1], [-1, 0, 0]):
        with pytest.raises(ModelError, match=r"recurrent.*chain"):
            context.decode_tree([5] * len(parents), parents)
    assert context.cached == TEXT
    rows = np.concatenate([context.decode_tree([50, 51], [-1, 0]).copy(), context.decode_tree([52], [1])])
    with pytest.raises(ModelError, match=r"recurrent.*chain"):
        context.decode_tree([53], [0])
    context.commit([0, 1, 2])
    assert context.cached == [*TEXT, 50, 51, 52]
    expected = fresh_logits(recurrent_model, [*TEXT, 50, 51, 52, 53])[len(TEXT) :]
    np.testing.assert_allclose([*rows, *context.evaluate([53], 1)], expected, **CLOSE)


# Random walks


def random_parents(rng, tree, n, max_branches):
    """Parents for n more nodes, mostly of the last ones, or fewer where branches would be too many."""
    tree = list(tree)
    new = []
    for _ in range(n):
        node = len(tree)
        parent = rng.randint(-1, node - 1) if rng.random() < 0.5 else max(-1, node - rng.randint(1, 3))
        if n_leaves([*tree, parent]) > max_branches:
            parent = node - 1
        if n_leaves([*tree, parent]) <= max_branches:
            tree.append(parent)
            new.append(parent)
    return new


def walk(model, rng, n_steps, most, check, every):
    """Random trees, kept paths, rollbacks and texts; `check` compares what the model says at the end of some."""
    text = []
    for step in range(n_steps):
        if len(text) > most or rng.random() < 0.15:
            length = rng.randint(0, len(text)) if rng.random() < 0.5 else max(0, len(text) - 4)
            if rng.random() < 0.3:
                model.decode_tree([5, 6], [-1, -1])
            model.truncate(length)
            del text[length:]
        elif rng.random() < 0.15:
            tokens = [rng.randrange(model.n_vocab) for _ in range(rng.randint(1, 6))]
            model.evaluate(tokens, rng.randint(0, len(tokens)))
            text += tokens
        else:
            tokens, parents, rows = [], [], []
            for _ in range(rng.randint(1, 3)):
                new = random_parents(rng, parents, rng.randint(1, 6), model.max_branches)
                tokens += [rng.randrange(model.n_vocab) for _ in new]
                parents += new
                rows += [*model.decode_tree(tokens[-len(new) :], new).copy()]
            if step % every == 0:
                for node in range(len(parents)):
                    check([*text, *(tokens[n] for n in path_to(parents, node))], rows[node])
            path = path_to(parents, rng.randint(-1, len(parents) - 1))
            path = path[: rng.randint(0, len(path))]
            model.commit(path)
            text += [tokens[node] for node in path]
        assert list(model.cached) == text
        if step % every == every - 1:
            probe = rng.randrange(model.n_vocab)
            text.append(probe)
            check(text, model.evaluate([probe], 1)[0])


@pytest.mark.parametrize(
    ("model_name", "n_steps", "most", "every"),
    [("tiny_model", 5000, 60, 250), ("window_model", 2000, 100, 20)],
)
def test_a_random_walk_ends_where_a_straight_way_ends(
    request, make_context, fresh_logits, model_name, n_steps, most, every
):
    model = request.getfixturevalue(model_name)
    context = make_context(model, max_branches=6)

    def check(tokens, row):
        np.testing.assert_allclose(row, fresh_logits(model, tokens)[-1], **CLOSE)
        if not context._tree:
            check_freed(context)

    walk(context, random.Random(0), n_steps, most, check, every)


def test_a_random_walk_on_the_fake_model():
    model = FakeModel(max_branches=6, order=3)

    def check(tokens, row):
        np.testing.assert_array_equal(row, model.logits(tokens))

    walk(model, random.Random(0), 2000, 60, check, 5)


numbers = st.one_of(st.integers(-2, 12), st.integers())
calls = st.one_of(
    st.tuples(
        st.just("decode_tree"),
        st.lists(numbers, max_size=6),
        st.lists(numbers, max_size=6),
        st.one_of(st.none(), numbers),
    ),
    # Those mostly work, so that there is a tree.
    st.lists(st.integers(-1, 5), min_size=1, max_size=5).map(
        lambda parents: ("decode_tree", [7] * len(parents), [min(p, i - 1) for i, p in enumerate(parents)])
    ),
    st.tuples(st.just("commit"), st.lists(numbers, max_size=4)),
    st.tuples(st.just("commit"), st.sampled_from([[], [0], [0, 1], [1]])),
    st.tuples(st.just("truncate"), numbers),
    st.tuples(st.just("evaluate"), st.lists(numbers, max_size=4), numbers),
)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(script=st.lists(calls, max_size=12))
def test_any_calls_are_answered_or_refused_alike(make_context, tiny_model, script):
    """Never a crash; and what llama.cpp refuses, the fake model refuses."""
    limits = {"n_ctx": 24, "max_tokens": 5, "max_logits": 4, "max_branches": 3}
    context = make_context(tiny_model, **limits)
    fake = FakeModel(context.n_vocab, **limits)
    for name, *arguments in script:
        outcomes = []
        for model in (context, fake):
            try:
                logits = getattr(model, name)(*arguments)
                outcomes.append(None if logits is None else logits.shape)
                assert logits is None or np.isfinite(logits).all()
            except SpecLocalError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], (name, arguments)
        assert context.cached == fake.cached
    context.truncate(0)
    check_freed(context)
    context.close()
