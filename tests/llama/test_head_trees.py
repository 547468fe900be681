"""Trees that heads draft: their logits, over random trees, rows, commits and failures, and in the engine."""

import os
import random
from collections import Counter

import numpy as np
import pytest

from spec_local.core.calls import run, together
from spec_local.core.proposal import path_to
from spec_local.core.sequence import common_prefix
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.llama.model import Model
from tests.broken_llama import Broken, aborted_after, aborted_half_way
from tests.llama.test_heads import NOISE, PROMPT, Pair
from tests.tiny_architectures import write_tiny
from tests.tiny_heads import write_tiny_eagle, write_tiny_main
from tests.tiny_layered_heads import write_layered_eagle

pytestmark = pytest.mark.usefixtures("f32_caches")

BRANCHES = 6
N_CTX = 96
N_STEPS = int(os.environ.get("SPECDEC_STEPS", "80"))


@pytest.fixture(scope="module")
def paths(folder):
    main = write_tiny_main(folder / "main.gguf")
    return {
        "eagle": (main, write_tiny_eagle(folder / "eagle.gguf")),
        "layered": (main, write_layered_eagle(folder / "layered.gguf", main)),
        "mtp": (write_tiny(folder / "mtp.gguf", "qwen35", n_mtp=1), folder / "mtp.gguf"),
    }


@pytest.fixture(params=["eagle", "layered", "mtp"])
def pair(request, paths):
    """Of each kind; the main model of the layer in its own file is a hybrid, which evaluates chains only."""
    made = Pair(request.param, *paths[request.param])
    yield made
    made.close()


def n_branches(parents):
    """Number of sequences: one for each node without children."""
    return max(1, len(set(range(len(parents))) - set(parents)))


class Row:
    """A row of the main model and one of the head.

    Attributes:
        text: the history, whose last token the main model has not evaluated. states: the main model's.
        tokens, parents: of the tree.
    """

    def __init__(self, main, head):
        self.main, self.head = main, head
        self.text, self.states, self.tokens, self.parents = [], [], [], []

    def path(self, node):
        """The tokens of the path to a node."""
        return [self.tokens[n] for n in path_to(self.parents, node)]


class Walk:
    """Rows that draft trees at random, in the same calls."""

    def __init__(self, mains, heads, reference, rng, patch):
        self.rows = [Row(*each) for each in zip(mains, heads, strict=True)]
        self.reference, self.rng, self.patch = reference, rng, patch
        self.counts, self.known = Counter(), {}
        for row in self.rows:
            self.begin(row)

    def random_tokens(self, n):
        return self.rng.choices(range(5, 800), k=n)

    def begin(self, row):
        """Begin a text whose beginning a row may have."""
        other = self.rng.choice(self.rows).text
        n = len(other) if self.rng.random() < 0.5 else self.rng.randint(0, len(other))
        text = [*other[:n][: N_CTX // 2], *self.random_tokens(2)]
        best = max(self.rows, key=lambda each: common_prefix(each.text[: len(each.states)], text))
        states = list(best.states)
        row.main.reuse(text[:-1])
        row.head.reuse(text)
        if row.head.n_received < len(row.main.cached):
            row.main.truncate(row.head.n_received)
        self.counts["reused"] += len(row.main.cached) > 0
        row.text, row.states = text, states[: len(row.main.cached)]
        while (start := len(row.main.cached)) < len(text) - 1:
            chunk = text[start:-1][: self.rng.randint(1, 32)]
            self.evaluate(row, chunk)
            run(row.head.read())

    def evaluate(self, row, tokens):
        """Let the main model evaluate tokens, and hand their states to the head."""
        start = len(row.main.cached)
        run(row.main.call(tokens, n_logits=0))
        states = row.main.states(range(len(tokens)))
        row.states += list(states)
        row.head.receive(start, tokens, states)

    def check(self, row, node, logits):
        """Compare the logits after a node with the reference."""
        key = tuple(row.text)
        path = tuple(row.path(node))
        if (key, path) not in self.known:
            found = self.reference.logits(row.text, row.states, path)
            self.known |= {(key, path[:i]): each for i, each in enumerate(found)}
        expected = self.known[key, path]
        finite = np.isfinite(expected)
        assert np.array_equal(np.isfinite(logits), finite)
        assert np.allclose(logits[finite], expected[finite], atol=NOISE)
        self.counts["checked"] += 1

    async def draft(self, row):
        """Draft a tree, in several additions: often a level, sometimes any nodes in any order."""
        rng, head = self.rng, row.head
        row.tokens, row.parents = [], []
        logits = await head.call(row.text[len(head.cached) :], n_logits=1)
        self.check(row, -1, logits[0])
        for _ in range(rng.randint(0, 4)):
            n_before, parents = len(row.tokens), list(row.parents)
            is_level = rng.random() < 0.6
            for _ in range(rng.randint(1, 5)):
                parent = rng.randint(-1, (n_before if is_level else len(parents)) - 1)
                if n_branches([*parents, parent]) <= BRANCHES:
                    parents.append(parent)
            new = parents[n_before:]
            if not new or len(row.text) + len(parents) > N_CTX:
                break
            tokens = self.random_tokens(len(new))
            n_logits = rng.choice([None, 0, 1, len(new)])
            row.tokens, row.parents = [*row.tokens, *tokens], parents
            found = (await head.call(tokens, new, n_logits)).copy()
            n_logits = len(new) if n_logits is None else n_logits
            assert len(found) == n_logits
            for node, logits in enumerate(found, len(parents) - n_logits):
                self.check(row, node, logits)
            self.counts["branched"] += n_branches(parents) > 1

    def accept(self, row):
        """Accept a path of the tree, or commit one that is not accepted as a whole."""
        rng, head = self.rng, row.head
        node = rng.randint(-1, len(row.tokens) - 1)
        path, tokens = path_to(row.parents, node), row.path(node)
        n = len(path) if rng.random() < 0.7 else rng.randint(0, len(path))
        accepted = [*tokens[:n], *self.random_tokens(1)]
        end = len(row.text)
        n_kept = len(head.cached)  # less than the text if a call has failed
        if n_kept == end:
            head.commit(path)
            assert head.cached == [*row.text, *tokens]
            if rng.random() < 0.3 and len(head.cached) < N_CTX:  # it may be continued
                row.tokens, row.parents = [*row.tokens, *self.random_tokens(1)], [*row.parents, node]
                self.check(row, len(row.tokens) - 1, run(head.call(row.tokens[-1:], n_logits=1))[0])
            head.truncate(end + common_prefix(tokens, accepted))
        last = row.text[-1]
        row.text += accepted
        assert head.cached == row.text[: len(head.cached)]
        self.evaluate(row, [last, *accepted[:-1]])
        assert head.cached == row.text[: len(head.cached)]
        assert len(head.cached) >= n_kept  # all of these were evaluated with the main model's states

    def decode(self, lib, handle, batch):
        """llama_decode, which sometimes fails."""
        failures = [lambda *_: 1, lambda *_: -3, aborted_after, aborted_half_way]
        if self.rng.random() < 0.7:
            return lib.llama_decode(handle, batch)
        return self.rng.choice(failures)(lib, handle, batch)

    def step(self):
        rng = self.rng
        active = rng.sample(self.rows, rng.randint(1, len(self.rows)))
        for row in active:
            if rng.random() < 0.06 or len(row.text) > N_CTX - 16:
                self.begin(row)
        shared = active[0].head.context
        with self.patch.context() as patch:
            may_fail = rng.random() < 0.1
            if may_fail:
                patch.setattr(shared, "lib", Broken(shared.lib, self.decode))
            results = together([self.draft(row) for row in active])
        for row, result in zip(active, results, strict=True):
            if result is not None:
                assert may_fail, result
                assert isinstance(result, SpecLocalError)
                self.counts["failed"] += 1
                self.counts["failed in a tree"] += len(row.tokens) > 0
                row.tokens, row.parents = [], []
                assert row.head.cached == row.text[: len(row.head.cached)]
        for row in active:
            self.accept(row)


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_logits_are_those_of_a_reference(pair, n_parallel, monkeypatch):
    """The reference evaluates each path from the beginning, token by token."""
    mains, heads = pair.open(n_parallel, max_branches=BRANCHES, n_ctx=N_CTX, max_tokens=48)
    assert heads[0].limits.max_branches == BRANCHES
    walk = Walk(mains, heads, pair.reference(mains[0]), random.Random(n_parallel), monkeypatch)
    for _ in range(N_STEPS):
        walk.step()
    assert min(walk.counts[name] for name in ("reused", "failed", "failed in a tree")), walk.counts
    assert walk.counts["branched"] > N_STEPS
    assert walk.counts["checked"] > 3 * N_STEPS


def test_a_second_sequence_keeps_the_history_of_a_model_with_a_window(pair, monkeypatch):
    """Of a single one, llama.cpp reuses cells that have left the window, although drafts are rolled back."""
    monkeypatch.setattr(Model, "has_window", True)
    mains, heads = pair.open(3, max_branches=BRANCHES, n_ctx=N_CTX, max_tokens=48)
    walk = Walk(mains, heads, pair.reference(mains[0]), random.Random(0), monkeypatch)
    shared = heads[0].context

    def ends(sequence):
        lib, memory = shared.lib, shared.memory
        return lib.llama_memory_seq_pos_min(memory, sequence), lib.llama_memory_seq_pos_max(memory, sequence)

    for _ in range(30):
        walk.step()
        for i, head in enumerate(heads):
            assert ends(shared.first_guard + i) == ends(head._seq_id)
            assert shared.length(head._seq_id) in (len(head.cached), 0)


def test_a_level_is_one_call(pair, monkeypatch):
    """Whatever the order in which its nodes are given; the rows of logits are in that order."""
    (main,), (head,) = pair.open(max_branches=BRANCHES)
    run(main.call(PROMPT[:-1], n_logits=0))
    head.receive(0, PROMPT[:-1], main.states(range(len(PROMPT) - 1)))
    run(head.call(PROMPT, n_logits=1))
    calls, decode = [], head.context.decode
    monkeypatch.setattr(
        head.context, "decode", lambda each: calls.append(len(each[0].tokens)) or decode(each)
    )
    levels = run(head.call([10, 11, 12, 13], [-1, -1, -1, -1]))
    assert calls == [4]
    again = levels.copy()
    head.commit([])
    run(head.call([10, 20, 11, 21, 12, 13], [-1, 0, -1, 2, -1, -1]))
    assert calls[1:] == [1, 2, 3]
    head.commit([])
    for i, token in enumerate((10, 11, 12, 13)):
        assert np.allclose(run(head.call([token], [-1]))[0], again[i], atol=NOISE, equal_nan=True)
        head.commit([])


@pytest.mark.parametrize("n_parallel", [1, 2, 8, 40])
def test_the_widest_trees_of_many_rows(pair, n_parallel):
    """llama.cpp ends the process where it has less room for logits than sequences."""
    _, heads = pair.open(n_parallel, max_branches=64, n_ctx=128, max_tokens=96)
    width = heads[0].limits.max_branches
    assert n_parallel * width <= 96

    async def draft(head):
        await head.call(PROMPT[:2], n_logits=1)
        return (await head.call(range(10, 10 + width), [-1] * width)).copy()

    first, *others = together([draft(head) for head in heads])
    assert first.shape == (width, pair.main.vocabulary.n_tokens)
    for logits in others:
        assert np.allclose(logits, first, atol=NOISE)


def test_what_a_tree_must_not_be(pair):
    _, (head,) = pair.open(max_branches=2)
    run(head.call(PROMPT[:2], n_logits=1))
    run(head.call([10, 11], [-1, -1]))
    for parents, why in (
        ([-1], "a tree with 3 branches: give at most 2"),
        ([2], "node 2 has parent 2"),
        ([0, 0], "3 branches"),
        ([], "1 tokens with 0 parents"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            run(head.call([12] * max(1, len(parents)), parents))
    with pytest.raises(InvalidRequest, match="node 1 is not a child of node 0"):
        head.commit([0, 1])
    run(head.call([12], [0]))
    head.commit([0, 2])
    assert head.cached == [*PROMPT[:2], 10, 12]


def test_branches_free_their_entries(pair):
    """Their sequences are empty after each change of the history, and the cache does not fill up."""
    _, (head,) = pair.open(max_branches=4, n_ctx=32)
    run(head.call(PROMPT[:4], n_logits=1))
    changes = [lambda: head.commit([]), lambda: head.commit([1]), lambda: head.truncate(4), head.resync]
    for i in range(40):
        run(head.call([10, 11, 12], [-1, -1, -1]))
        run(head.call([13, 14], [0, 1]))
        changes[i % 4]()
        assert [head.context.length(sequence) for sequence in range(1, 4)] == [0, 0, 0]
        head.truncate(4)
