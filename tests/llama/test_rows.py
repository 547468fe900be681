"""Rows of a llama.cpp context that share calls: each has the logits of a context of its own.

In F32, and with attention that does not round to F16, so that the noise is small. What is left comes from
llama.cpp's F16 table of the activation function.
SPECDEC_STEPS=5000 makes the walks longer, which takes minutes.
"""

import os
import random
from collections import Counter

import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.core.proposal import path_to
from spec_local.core.sequence import common_prefix
from spec_local.llama import runtime
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from spec_local.llama.tiny import SLIDING_WINDOW, write_tiny_model
from spec_local.prompt_cache.cache import PromptCache
from tests import tiny_architectures
from tests.broken_llama import FAILURES, Broken
from tests.rounding import limit

NOISE = limit(0.005)  # on a CPU at most 0.001; logits have a standard deviation of 3
N_CTX, N_ROWS = 48, 8
N_STEPS = int(os.environ.get("SPECDEC_STEPS", "150"))
MAX_DEPTH = SLIDING_WINDOW - 1  # of a tree: real windows are longer than any draft
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"architecture": "qwen2"},  # rotates other pairs of dimensions
    "experts": {"n_experts": 4},
    "gemma3": {"architecture": "gemma3"},  # a sliding window
    "mamba": {"architecture": "mamba"},
}


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *tiny_architectures.ARCHITECTURES])
def model(request, folder):
    path = folder / f"rows-{request.param}.gguf"
    if request.param in ARCHITECTURES:
        write_tiny_model(path, tensor_type="F32", **ARCHITECTURES[request.param])
    else:
        tiny_architectures.write_tiny(path, request.param)
    loaded = Model(path)
    yield loaded
    loaded.close()


@pytest.fixture
def make_rows(f32_caches):
    """A function that creates contexts whose cache is in F32; they are closed after the test."""
    made = []

    def make(model, n_parallel=N_ROWS, **options):
        usual = {"n_ctx": N_CTX, "max_tokens": 160, "max_logits": 160, "threads": 1, "flash_attention": False}
        rows = open_sequences(model, n_parallel, **usual | options)
        made.append(rows[0])
        return rows

    yield make
    for row in made:
        row.close()


class Reference:
    """The logits after a text, from a context that evaluates only texts from their beginning."""

    def __init__(self, context):
        self._context, self._known = context, {}

    def __call__(self, text):
        text = tuple(text)
        if text not in self._known:
            self._context.truncate(0)
            logits = run(self._context.call(text))
            self._known |= {text[: i + 1]: row.copy() for i, row in enumerate(logits)}
        return self._known[text]


class Expected:
    """A row, and what it should contain."""

    def __init__(self, row):
        self.row, self.text, self.tokens, self.parents = row, [], [], []
        # Of a recurrent model: what can be removed, whether the state can be copied, and copies.
        self.n_removable, self.can_copy, self.kept = 0, True, None

    def path(self, node):
        return path_to(self.parents, node)

    def prefix(self, node):
        """The text and the path to a node."""
        return [*self.text, *(self.tokens[n] for n in self.path(node))]

    def drop_tree(self):
        self.tokens, self.parents = [], []

    def commit(self, path):
        self.row.commit(path)
        n_dropped = len(self.tokens) - len(path)
        self.text += [self.tokens[node] for node in path]
        self.keep(len(self.text), n_dropped)

    def truncate(self, length):
        self.row.truncate(length)
        self.keep(length, len(self.text) + len(self.tokens) - length)

    def keep(self, length, n_dropped):
        """A recurrent model goes back to a checkpoint where the state before the last tokens is not kept."""
        self.drop_tree()
        if self.row.model.is_recurrent and n_dropped:
            self.can_copy = not (length and n_dropped <= self.n_removable)
            if self.can_copy:
                length = self.kept if self.kept and self.kept <= length else 0
            self.n_removable = 0
        del self.text[length:]
        if self.kept and self.kept > length:
            self.kept = None

    def checkpoint(self):
        assert self.row.checkpoint() is self.can_copy
        if self.row.model.is_recurrent and self.can_copy:
            self.kept = len(self.text) or self.kept
            self.n_removable = self.row._states._n_removable  # 0 if the state was copied

    def follow(self):
        """After a failure, or a copy of another row's state."""
        kept = list(self.row.cached)
        assert kept == self.text[: len(kept)]
        assert len(kept) == len(self.text) or self.row.model.is_recurrent
        self.text = kept
        self.drop_tree()
        if self.row.model.is_recurrent:
            states = self.row._states
            self.n_removable, self.can_copy = states._n_removable, not states.has_rolled_back
            self.kept = states.checkpoint


class Walk:
    """Rows that change at random, and share calls."""

    def __init__(self, rows, reference, rng, monkeypatch):
        self.rows = [Expected(row) for row in rows]
        self.context, self.reference, self.rng, self.patch = rows[0].context, reference, rng, monkeypatch
        self.is_recurrent, self.has_cache = rows[0].model.is_recurrent, bool(self.context.saved.prompts)
        self.ways = Counter()  # of rolling back
        self.n_calls = self.n_failures = self.n_reused = self.n_checked = self.most_rows = 0
        self.largest = 0.0  # difference from the reference
        self.earlier = []  # texts that rows have left

    def step(self):
        rng = self.rng
        chosen = rng.sample(self.rows, rng.randint(1, len(self.rows)))
        for each in chosen:
            self.change(each)
        calls = [(each, call) for each in chosen if (call := self.next_call(each))]
        if not calls:
            return
        self.n_calls += 1
        self.most_rows = max(self.most_rows, len(calls))
        if rng.random() < 0.05:
            self.fail(calls)
            return
        for (each, call), logits in zip(calls, self.context.decode([c for _, c in calls]), strict=True):
            n = len(each.tokens)
            each.n_removable, each.can_copy = (
                min(len(call.tokens) - 1, each.row.limits.max_rollback),
                True,
            )
            each.tokens += call.tokens
            each.parents += call.parents
            assert len(logits) == call.n_logits
            for node in range(n + len(call.tokens) - call.n_logits, n + len(call.tokens)):
                self.check(each.prefix(node), logits[node - len(each.tokens)])
            if len(call.tokens) > MAX_DEPTH:  # of a prompt
                each.commit(range(len(each.tokens)))

    def check(self, text, logits):
        self.n_checked += 1
        self.largest = max(self.largest, float(np.abs(logits - self.reference(text)).max()))
        assert self.largest <= NOISE, self.largest

    def change(self, each):
        """Commit, roll back, leave or join."""
        kind, n_before = self.rng.random(), len(each.text) + len(each.tokens)
        if kind < 0.6:  # a path of the tree
            each.commit(each.path(self.rng.randint(-1, len(each.parents) - 1)))
        elif kind < 0.65:  # nothing of it
            each.commit([])
        elif kind < 0.69:
            each.truncate(self.rng.randint(max(0, len(each.text) - 2 * SLIDING_WINDOW), len(each.text)))
        elif kind < 0.71:
            each.truncate(0)
        elif kind < (0.85 if self.has_cache else 0.74):
            self.join(each)
        assert each.row.cached == each.text
        if n_before > len(each.text):
            self.ways["kept" if not each.can_copy else "again" if each.text else "all"] += 1
        if not each.tokens and self.rng.random() < 0.4:
            each.checkpoint()
        if not each.tokens and self.rng.random() < 0.2:
            assert each.row.save(most=self.rng.choice([1, None])) in ("all", "some")

    def join(self, each):
        """Begin a text that another row may have begun."""
        other = self.rng.choice([o.text for o in self.rows] + (self.earlier[-20:] if self.has_cache else []))
        self.earlier.append(each.text)
        end = self.rng.randint(0, len(other))
        if self.has_cache and self.rng.random() < 0.5:
            end = len(other)
        text = [*other[:end], *self.random_tokens(3)]
        n = max(common_prefix(o.text, text) for o in self.rows)
        own = common_prefix(each.text, text)
        each.row.reuse(text)
        n_reused = len(each.row.cached)
        self.n_reused += own < n_reused
        if not self.is_recurrent:
            assert n_reused >= n
        if not self.has_cache:
            assert n_reused <= n
        each.text = text[:n_reused]
        each.follow()

    def next_call(self, each):
        """Add to the tree of a row, or to its text."""
        rng, n_before = self.rng, len(each.parents)
        if len(each.text) + n_before == N_CTX:
            each.truncate(0)
            n_before = 0
        n = rng.randint(0, min(6, N_CTX - len(each.text) - n_before))
        if not n_before and rng.random() < 0.3:  # a chain, as of a prompt
            n = rng.randint(MAX_DEPTH + 1, 2 * MAX_DEPTH)
            n = min(n, N_CTX - len(each.text))
            tokens = self.random_tokens(n)
            return each.row.call(tokens, range(-1, n - 1), rng.randint(0, n))
        parents = list(each.parents)
        ends = set(range(n_before)) - set(parents) or {-1}
        n_leaves = len(ends)
        for node in range(n_before, n_before + n):
            parent = node - 1 if self.is_recurrent or rng.random() < 0.4 else rng.randint(-1, node - 1)
            if parent not in ends and n_leaves == each.row.limits.max_branches:
                parent = rng.choice(sorted(ends))
            n_leaves += parent not in ends
            ends = (ends - {parent}) | {node}
            parents.append(parent)
            if len(path_to(parents, node)) > MAX_DEPTH:
                parents.pop()
                break
        new = parents[n_before:]
        return each.row.call(self.random_tokens(len(new)), new, rng.randint(0, len(new))) if new else None

    def random_tokens(self, n):
        return [self.rng.randrange(5, 300) for _ in range(n)]

    def fail(self, calls):
        """A call that fails drops the trees of its rows, and changes no other row."""
        self.n_failures += 1
        decode, error = FAILURES[self.rng.choice(sorted(FAILURES))]
        lib = self.context.lib
        with self.patch.context() as patch:
            patch.setattr(self.context, "lib", Broken(lib, decode))
            with pytest.raises(error):
                self.context.decode([call for _, call in calls])
        for each, _ in calls:
            each.follow()
            assert not each.row._tree
        for each in self.rows:
            assert each.row.cached == each.text
            assert len(each.row._tree) == len(each.tokens)


def check_empty(shared):
    """Check that no sequence of llama.cpp has cells."""
    ids = range(shared.n_sequences)
    ends = [shared.lib.llama_memory_seq_pos_max(shared.memory, i) for i in ids]
    assert set(ends) == {-1}


def test_random_steps(model, make_rows, monkeypatch):
    """Rows join, with cells of others, and leave; trees grow, are committed and rolled back; calls fail."""
    rows = make_rows(model, max_branches=4)
    reference = Reference(make_rows(model, 1)[0])
    walk = Walk(rows, reference, random.Random(0), monkeypatch)
    for _ in range(N_STEPS):
        walk.step()
    print(f"{N_STEPS} steps, {walk.n_calls} calls, {walk.n_checked} rows of logits, ±{walk.largest:.1e}")
    assert walk.most_rows == N_ROWS
    assert walk.n_failures >= 3
    assert walk.n_reused >= (3 if walk.is_recurrent else 20) * N_STEPS / 300  # whole states only
    if walk.is_recurrent:
        assert walk.ways["again"] > N_STEPS / 5
        assert rows[0].limits.rollback == "fork"
    assert walk.n_checked >= 5 * N_STEPS
    # All cells are free: each row has room for its maximum.
    for row in rows:
        row.truncate(0)
    check_empty(rows[0].context)
    for start in range(0, N_CTX, 8):
        tokens = range(5 + start, 13 + start)
        rows[0].context.decode([row.call(tokens, range(-1, 7), 0) for row in rows])
        for row in rows:
            row.commit(range(8))
    for row in rows:
        row.truncate(0)
    check_empty(rows[0].context)


@pytest.mark.parametrize("n_parallel", [1, 4])
@pytest.mark.parametrize("model", ["llama", "gemma3", "mamba", "lfm2", "qwen35", "falcon-h1"], indirect=True)
def test_random_steps_with_a_prompt_cache(model, make_rows, monkeypatch, n_parallel, tmp_path):
    """Texts that no row has any more come back from memory or disk, with the logits that they had."""
    monkeypatch.setattr("spec_local.llama.saved.BLOCK", 16)
    monkeypatch.setattr("spec_local.llama.sequence._MIN_RESTORED", 2)
    rows = make_rows(model, n_parallel, max_branches=4)
    saved = rows[0].context.saved
    cache = PromptCache(1 << 19, folder=tmp_path, limit=1 << 22)
    saved.prompts, saved.saves_all = cache.prompts("the model", saved.block), True
    walk = Walk(rows, Reference(make_rows(model, 1)[0]), random.Random(1), monkeypatch)
    lib, restored = runtime.library(), []
    put = lib.llama_state_seq_set_data_ext

    def recorded(context, data, size, *more):
        n = put(context, data, size, *more)
        restored.append(n == size)
        return n

    monkeypatch.setattr(lib, "llama_state_seq_set_data_ext", recorded)
    for i in range((4 if n_parallel == 1 else 1) * N_STEPS):
        walk.step()
        if i % 50 == 49:  # another session
            cache.close()
            cache = PromptCache(1 << 19, folder=tmp_path, limit=1 << 22)
            saved.prompts = cache.prompts("the model", saved.block)
    print(f"{len(restored)} parts restored, {walk.n_checked} rows of logits, ±{walk.largest:.1e}")
    assert len(restored) >= 4
    assert all(restored)
    for row in rows:
        row.truncate(0)
    check_empty(rows[0].context)
    cache.close()


@pytest.mark.parametrize("model", ["gemma3", "lfm2", "qwen35", "nemotron_h"], indirect=True)
def test_random_steps_of_a_single_row(model, make_rows, monkeypatch):
    """With kept states: where several rows share a call, llama.cpp moves a row's state, but not those kept.

    With a sliding window: llama.cpp reuses the cells outside that of a single sequence.
    """
    rows = make_rows(model, 1, max_branches=4)
    assert rows[0].limits.rollback == ("bounded" if model.is_recurrent else "any")
    walk = Walk(rows, Reference(make_rows(model, 1)[0]), random.Random(0), monkeypatch)
    for _ in range(N_STEPS):
        walk.step()
    assert walk.ways["again"] > N_STEPS / 10
    if model.is_recurrent:
        assert walk.ways["kept"] > N_STEPS / 10


@pytest.mark.parametrize("unified", [True, False])
def test_states_of_layers_belong_to_their_tokens(model, make_rows, unified):
    """Also where llama.cpp divides a call of rows that have different numbers of tokens."""
    layers = tuple(range(model.n_layers - 1))
    if not layers:
        pytest.skip("the only layer is the last one")
    rng = random.Random(7)
    options = {"hidden": HiddenStates(layers), "unified": unified}
    rows = make_rows(model, 5, **options)
    (alone,) = make_rows(model, 1, **options | {"unified": True})
    for row in rows:
        run(
            row.call([rng.randrange(model.vocabulary.n_tokens) for _ in range(rng.randint(1, 4))], n_logits=0)
        )
    for step in range(6):
        # In ascending order, and not always with all rows, whose ids are then not consecutive.
        chosen = [row for row in rows if step % 2 == 0 or row is not rows[2]]
        texts = [[rng.randrange(model.vocabulary.n_tokens) for _ in range(rng.randint(1, 5))] for _ in chosen]
        before = [list(row.cached) for row in chosen]
        calls = [row.call(text, range(-1, len(text) - 1), 1) for row, text in zip(chosen, texts, strict=True)]
        rows[0].context.decode(calls)
        found = rows[0].context.states(range(sum(map(len, texts))))
        for row, text, history in zip(chosen, texts, before, strict=True):
            row.commit(range(len(text)))
            alone.truncate(0)
            run(alone.call([*history, *text], n_logits=0))
            expected = alone.states(range(len(history), len(history) + len(text)))
            most = limit(2e-4, 5e-3) * np.abs(expected).max()
            np.testing.assert_allclose(found[: len(text)], expected, atol=most, rtol=1e-5)
            found = found[len(text) :]
