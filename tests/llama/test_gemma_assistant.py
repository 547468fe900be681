"""Gemma 4's assistant, which attends to the main model's own cache: its logits, and those of the main model.

In F32. The reference is a second pair of contexts that evaluates everything from the beginning.
"""

import random

import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.errors import InvalidRequest
from spec_local.llama.heads.gemma import open_assistant_sequences
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.open import open_sequences
from tests.llama.test_heads import NOISE, Pair, Walk, walk_together
from tests.tiny_gemma import write_tiny_assistant, write_tiny_gemma

pytestmark = pytest.mark.usefixtures("f32_caches")


@pytest.fixture(scope="module")
def paths(folder):
    return write_tiny_gemma(folder / "gemma.gguf"), write_tiny_assistant(folder / "assistant.gguf")


@pytest.fixture
def pair(paths):
    made = Pair("assistant", *paths)
    yield made
    made.close()


class BranchedWalk(Walk):
    """Beside the draft tokens, the main model evaluates another branch, which may be accepted."""

    def expected(self):
        return self.reference.logits(self.tokens, self.drafted[:-1])

    def verify_call(self):
        before = self.tokens[len(self.main.cached) :]
        tokens = [*before, *self.drafted, 9, 10]
        n = len(before) + len(self.drafted)
        return self.main.call(tokens, [*range(-1, n - 1), len(before) - 1, n], len(tokens))

    def accept(self, call, n, token):
        n_before = len(call.tokens) - len(self.drafted) - 2
        path, accepted = [*range(n_before + n)], self.drafted[:n]
        if not n and self.drafted:  # the other branch
            first = n_before + len(self.drafted)
            path, accepted = [*range(n_before), first, first + 1], [9, 10]
        self.read(call, path)
        self.tokens += [*accepted, token]


@pytest.mark.parametrize(("n_parallel", "n_branches"), [(1, 2), (3, 2), (3, 4)])
def test_logits_are_those_of_a_reference(pair, n_parallel, n_branches):
    """Over random patterns of acceptance, of trees in the main model's cache, too.

    The prompts are longer than the sliding window, and the main model's last layers share others' caches.
    """
    walk_together(
        pair, n_parallel, random.Random(n_parallel), n_steps=20, kind=BranchedWalk, max_branches=n_branches
    )


def test_drafting_leaves_the_main_models_logits_unchanged(pair):
    """Bit for bit, after any number of draft tokens of several rows, and with a part of the cache free."""
    drafting, heads = pair.open(2, n_ctx=64, max_branches=3)
    plain = open_sequences(
        pair.main, 2, n_ctx=64, max_branches=3, max_tokens=64, threads=1, flash_attention=False
    )
    rng = random.Random(0)
    for _ in range(12):
        tokens = [rng.choices(range(5, 800), k=rng.randint(1, 6)) for _ in range(2)]
        results = []
        for rows in (drafting, plain):
            calls = [
                row.call([*t, 7], [*range(-1, len(t) - 1), -1], len(t) + 1)
                for row, t in zip(rows, tokens, strict=True)
            ]
            results.append([logits.copy() for logits in rows[0].context.decode(calls)])
            n_kept = [rng.randint(1, len(t)) for t in tokens] if rows is drafting else n_kept  # noqa: F821
            for i, (row, n) in enumerate(zip(rows, n_kept, strict=True)):
                start, states = len(row.cached), row.states(range(n)) if rows is drafting else None
                row.commit(range(n))
                if states is not None:
                    heads[i].receive(start, tokens[i][:n], states)
        for a, b in zip(*results, strict=True):
            assert np.array_equal(a, b)
        for head in heads:
            for token in rng.choices(range(5, 800), k=rng.randint(0, 6)):
                run(head.call([token], n_logits=1))
            head.truncate(head.n_received)
    assert drafting[0].cached == plain[0].cached
    plain[0].close()


def test_nodes_of_a_tree(pair):
    """Each level is evaluated in one call; a path is committed."""
    (main,), (head,) = pair.open(max_branches=8)
    reference = pair.reference(main)
    tokens = random.Random(0).choices(range(5, 800), k=20)
    run(main.call(tokens[:-1], n_logits=0))
    head.receive(0, tokens[:-1], main.states(range(19)))
    first = run(head.call(tokens[-1:], n_logits=1))[0].copy()
    level = run(head.call([30, 31], [-1, -1])).copy()
    below = run(head.call([40, 41, 42], [0, 1, 1])).copy()
    with pytest.raises(InvalidRequest, match="one by one"):
        run(head.call([50, 51], [4, 5]))
    paths = {(30,): level[0], (31,): level[1], (30, 40): below[0], (31, 41): below[1], (31, 42): below[2]}
    for path, logits in paths.items():
        expected = reference.logits(tokens, path)
        assert np.allclose(expected[0], first, atol=NOISE)
        assert np.allclose(expected[-1], logits, atol=NOISE)
    head.commit([1, 4])
    assert head.cached == [*tokens, 31, 42]
    assert np.allclose(
        run(head.call([60], n_logits=1))[0], reference.logits(tokens, [31, 42, 60])[-1], atol=NOISE
    )


def test_a_cache_that_is_not_at_the_history(pair):
    """llama.cpp would refuse the call, or attend to other tokens."""
    (main,), (head,) = pair.open()
    with pytest.raises(Exception, match="needs a token in the main model's cache"):
        run(head.call([5], n_logits=1))
    run(main.call([5, 6, 7], n_logits=0))
    head.receive(0, [5, 6, 7], main.states(range(3)))
    run(head.call([8], n_logits=1))
    run(main.call([8], [-1]))
    with pytest.raises(InvalidRequest, match="must contain the history"):
        run(head.call([9], n_logits=1))
    main.commit([])
    head.truncate(3)
    main.truncate(2)
    with pytest.raises(InvalidRequest, match="must contain the history"):
        run(head.call([8], n_logits=1))
    run(main.call([70], n_logits=0))
    with pytest.raises(InvalidRequest, match="must contain the history"):
        run(head.call([8], n_logits=1))
    with pytest.raises(InvalidRequest, match="missing"):
        head.receive(4, [1], np.zeros((1, 64), np.float32))


def test_the_prompt_of_another_row(pair):
    """Its state is known; without it, the last token is evaluated again."""
    mains, heads = pair.open(3)
    reference = pair.reference(mains[0])
    tokens = random.Random(0).choices(range(5, 800), k=20)
    heads[0].reuse(tokens)
    assert heads[0].n_received == 19
    run(mains[0].call(tokens, n_logits=0))
    heads[0].receive(0, tokens, mains[0].states(range(20)))
    for main, head in zip(mains[1:], heads[1:], strict=True):
        main.reuse(tokens)
        head.reuse(tokens)
        assert (head.n_received, len(main.cached)) == (20, 20)
        assert np.allclose(
            run(head.call([9], n_logits=1))[0], reference.logits([*tokens, 9], [])[0], atol=NOISE
        )
    heads[0].truncate(10)
    heads[0].reuse(tokens[:10])
    assert heads[0].n_received == 9
    heads[0].reuse(tokens)
    assert heads[0].n_received == 20
    mains[0].truncate(11)
    heads[0].truncate(12)
    run(mains[0].call(tokens[11:12], n_logits=0))
    heads[0].receive(11, tokens[11:12], mains[0].states([0]))
    expected = reference.logits([*tokens[:12], 9], [])[0]
    assert np.allclose(run(heads[0].call([9], n_logits=1))[0], expected, atol=NOISE)
    heads[0].reuse(tokens[:15])
    assert heads[0].n_received == 14
    run(mains[0].call(tokens[12:15], n_logits=0))
    heads[0].receive(12, tokens[12:15], mains[0].states(range(3)))
    expected = reference.logits([*tokens[:15], 9], [])[0]
    assert np.allclose(run(heads[0].call([9], n_logits=1))[0], expected, atol=NOISE)


def test_opening_an_assistant_empties_the_main_models_cache(pair):
    """llama.cpp does so; the main model's rows must know it."""
    plain = open_sequences(pair.main, 1, n_ctx=64, threads=1)[0]
    (main,) = open_sequences(pair.main, 1, n_ctx=64, threads=1, hidden=HiddenStates())
    tokens = random.Random(0).choices(range(5, 800), k=20)
    run(main.call(tokens, n_logits=1))
    (head,) = open_assistant_sequences(pair.head, [main])
    assert main.cached == []
    assert np.array_equal(run(main.call(tokens[:9], n_logits=3)), run(plain.call(tokens[:9], n_logits=3)))
    for each in (head, main, plain):
        each.close()


def test_hidden_states_leave_the_logits_unchanged(pair):
    kept = open_sequences(pair.main, 1, n_ctx=64, threads=1, hidden=HiddenStates())[0]
    plain = open_sequences(pair.main, 1, n_ctx=64, threads=1)[0]
    tokens = random.Random(0).choices(range(5, 800), k=30)
    for start, n in ((0, 20), (20, 3), (23, 1)):
        part = tokens[start : start + n]
        assert np.array_equal(
            run(kept.call(part, n_logits=min(n, 5))), run(plain.call(part, n_logits=min(n, 5)))
        )
    for row in (kept, plain):
        row.close()
