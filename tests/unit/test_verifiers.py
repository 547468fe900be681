"""Chain rules on arrays of several rows. Their distributions are enumerated in `test_tree_verifiers`."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.rng import SeededRng
from spec_local.verifiers.block import block_rule
from spec_local.verifiers.chain import verify
from spec_local.verifiers.token import token_rule

CHAIN_RULES = {"token": partial(verify, token_rule), "block": partial(verify, block_rule)}
RULES = pytest.mark.parametrize("rule", CHAIN_RULES.values(), ids=CHAIN_RULES.keys())


def batch(generator, rows, k, v):
    """Random p with zeros, q, draft tokens drawn from q, and numbers of draft tokens."""
    p = generator.dirichlet(np.full(v, 0.5), size=(rows, k + 1)) * (generator.random((rows, k + 1, v)) < 0.5)
    p[..., 0] += 0.3
    q = generator.dirichlet(np.full(v, 0.5), size=(rows, k))
    drafted = np.array([[generator.choice(v, p=probs) for probs in row] for row in q], int).reshape(rows, k)
    return p / p.sum(axis=-1, keepdims=True), q, drafted, generator.integers(0, k + 1, size=rows)


@RULES
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), k=st.integers(0, 6), v=st.integers(2, 9))
def test_a_row_gives_the_same_alone_and_in_a_ragged_batch(rule, seed, rows, k, v):
    p, q, drafted, lengths = batch(np.random.default_rng(seed), rows, k, v)
    together = rule(p, q, drafted, lengths, [SeededRng(b) for b in range(rows)], strict=True)
    for b, n in enumerate(lengths):
        alone = rule(
            p[b : b + 1, : n + 1],
            q[b : b + 1, :n],
            drafted[b : b + 1, :n],
            lengths[b : b + 1],
            [SeededRng(b)],
        )
        assert together.tokens[b, : n + 1].tolist() == alone.tokens[0].tolist()
        assert (together.tokens[b, n + 1 :] == -1).all()
        assert together.accepted[b, :n].tolist() == alone.accepted[0].tolist()
        assert together.accepted_prefix[b, :n].tolist() == alone.accepted_prefix[0].tolist()
        assert not together.accepted_prefix[b, n:].any()


@RULES
def test_padding_is_never_read(rule):
    p, q, drafted, lengths = batch(np.random.default_rng(1), 4, 5, 7)
    lengths[:] = [0, 2, 5, 3]
    clean = rule(p, q, drafted, lengths, [SeededRng(b) for b in range(4)])
    for b, n in enumerate(lengths):
        p[b, n + 1 :], q[b, n:], drafted[b, n:] = np.nan, np.nan, -7
    dirty = rule(p, q, drafted, lengths, [SeededRng(b) for b in range(4)], strict=True)
    assert (clean.tokens == dirty.tokens).all()


def test_counters():
    p, q, drafted, lengths = batch(np.random.default_rng(5), 3, 4, 5)
    q[:], lengths[:] = p[:, :-1], 4
    drafted = p[:, :-1].argmax(-1)
    verdict = verify(token_rule, p, q, drafted, lengths, [SeededRng(b) for b in range(3)])
    assert verdict.acceptance_rate(lengths) == 1
    assert verdict.system_efficiency() == 1


INVALID = {
    "a missing row of p": lambda p, q, drafted, lengths: (p[:, :-1], q, drafted, lengths),
    "float32": lambda p, q, drafted, lengths: (p.astype(np.float32), q, drafted, lengths),
    "another vocabulary": lambda p, q, drafted, lengths: (p, q[..., :-1], drafted, lengths),
    "float tokens": lambda p, q, drafted, lengths: (p, q, drafted.astype(float), lengths),
    "tokens beyond the vocabulary": lambda p, q, drafted, lengths: (p, q, drafted + 4, lengths),
    "negative tokens": lambda p, q, drafted, lengths: (p, q, drafted - 9, lengths),
    "more tokens than drafted": lambda p, q, drafted, lengths: (p, q, drafted, lengths + 1),
    "a missing length": lambda p, q, drafted, lengths: (p, q, drafted, lengths[:1]),
    "a sum of 2": lambda p, q, drafted, lengths: (p * 2, q, drafted, lengths),
    "negative probabilities": lambda p, q, drafted, lengths: (p, -q, drafted, lengths),
    "another number of rows": lambda *arrays: (array[:1] for array in arrays),
}


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID.keys())
def test_strict_rejects_invalid_arrays(change):
    p, q, drafted, lengths = batch(np.random.default_rng(0), 2, 3, 4)
    lengths[:] = 3
    with pytest.raises(ValueError, match=r"\w"):
        verify(block_rule, *change(p, q, drafted, lengths), [SeededRng(0), SeededRng(1)], strict=True)
