"""Verifiers for chains are lossless: exact enumeration of all their branches."""

import itertools
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_local.core.fake import enumerate_outcomes
from spec_local.core.rng import SeededRng
from spec_local.verifiers.block import block_rule
from spec_local.verifiers.chain import verify
from spec_local.verifiers.token import token_rule

CHAIN_RULES = {"token": partial(verify, token_rule), "block": partial(verify, block_rule)}
RULES = pytest.mark.parametrize("rule", CHAIN_RULES.values(), ids=CHAIN_RULES.keys())


def random_rows(generator, kind, n, v):
    """n distributions over v tokens: dense, with zeros, or one-hot."""
    rows = generator.dirichlet(np.full(v, 0.5), size=n)
    if kind == "zeros":
        rows *= generator.random((n, v)) < 0.5
        rows[np.arange(n), generator.integers(v, size=n)] += 0.3
    if kind == "one-hot":
        rows = np.eye(v)[generator.integers(v, size=n)]
    return rows / rows.sum(axis=1, keepdims=True)


class Conditional:
    """A table of the distributions after each prefix: p of the main model, q of the draft model."""

    def __init__(self, generator, kind, v, k):
        self.v, self.k = v, k
        self.p, self.q = {}, {}
        for depth in range(k + 1):
            for prefix in itertools.product(range(v), repeat=depth):
                p_kind, q_kind = kind if isinstance(kind, tuple) else (kind, kind)
                p = random_rows(generator, p_kind if p_kind in ("zeros", "one-hot") else "dense", 1, v)[0]
                q = random_rows(generator, q_kind if q_kind in ("zeros", "one-hot") else "dense", 1, v)[0]
                if kind == "equal":
                    q = p
                if kind == "disjoint":
                    half = np.arange(v) < v // 2
                    p, q = p * half / (p * half).sum(), q * ~half / (q * ~half).sum()
                if kind == "nearly equal":
                    q = p * (1 + 1e-15 * generator.normal(size=v))
                self.p[prefix], self.q[prefix] = p, q

    def sequence_probability(self, tokens):
        return np.prod([self.p[tuple(tokens[:i])][t] for i, t in enumerate(tokens)])


def outcomes(rule, model):
    """The exact joint distribution of k+1 tokens: those of the verifier, then draws from p."""
    k, v = model.k, model.v

    def draw(rng):
        drafted = []
        for _ in range(k):
            drafted.append(rng.choose(model.q[tuple(drafted)]))
        return tuple(drafted)

    def run(drafted, rng):
        p = np.array([model.p[drafted[:i]] for i in range(k + 1)])[None]
        q = np.array([model.q[drafted[:i]] for i in range(k)]).reshape(1, k, v)
        verdict = rule(p, q, np.array([drafted], int).reshape(1, k), np.array([k]), [rng], strict=True)
        n = int(verdict.n_accepted[0])
        output = verdict.tokens[0, : n + 1].tolist()
        while len(output) < k + 1:
            output.append(rng.choose(model.p[tuple(output)]))
        return n, tuple(output)

    found = defaultdict(float)
    for drafted, p_drafted in enumerate_outcomes(draw).items():
        for outcome, probability in enumerate_outcomes(partial(run, drafted)).items():
            found[outcome] += p_drafted * probability
    return found


KINDS = [
    "dense",
    "zeros",
    "one-hot",
    "equal",
    "nearly equal",
    "disjoint",
    ("dense", "one-hot"),
    ("one-hot", "dense"),
]


@RULES
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("v", "k"), [(2, 1), (3, 2), (2, 3), (6, 1), (4, 2), (3, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_output_has_exactly_the_main_distribution(rule, kind, v, k, seed):
    model = Conditional(np.random.default_rng(seed), kind, v, k)
    output = dict.fromkeys(itertools.product(range(v), repeat=k + 1), 0.0)
    for (_, tokens), probability in outcomes(rule, model).items():
        output[tokens] += probability
    for tokens, probability in output.items():
        assert probability == pytest.approx(model.sequence_probability(tokens), abs=1e-12)


def mean_accepted(rule, model):
    return sum(n * p for (n, _), p in outcomes(CHAIN_RULES[rule], model).items())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_at_least_as_many_tokens_as_token(kind, seed):
    model = Conditional(np.random.default_rng(seed), kind, 3, 2)
    assert mean_accepted("block", model) >= mean_accepted("token", model) - 1e-12


def test_the_example_of_the_block_verification_paper():
    """p = (1/3, 2/3), q = (2/3, 1/3), k = 2: 11/9 accepted against 10/9 (Sun et al., section 3)."""
    model = Conditional(np.random.default_rng(0), "dense", 2, 2)
    model.p = dict.fromkeys(model.p, np.array([1, 2]) / 3)
    model.q = dict.fromkeys(model.q, np.array([2, 1]) / 3)
    for name, expected in [("token", 10 / 9), ("block", 11 / 9)]:
        assert mean_accepted(name, model) == pytest.approx(expected, abs=1e-12)


def test_token_accepts_with_one_minus_total_variation():
    model = Conditional(np.random.default_rng(3), "zeros", 6, 1)
    expected = np.minimum(model.p[()], model.q[()]).sum()
    assert mean_accepted("token", model) == pytest.approx(expected, abs=1e-12)


def batch(generator, rows, k, v):
    p = random_rows(generator, "zeros", rows * (k + 1), v).reshape(rows, k + 1, v)
    q = random_rows(generator, "dense", rows * k, v).reshape(rows, k, v)
    drafted = np.array(
        [[generator.choice(v, p=q[b, i]) for i in range(k)] for b in range(rows)], int
    ).reshape(rows, k)
    return p, q, drafted, generator.integers(0, k + 1, size=rows)


@RULES
@settings(max_examples=60, deadline=None)
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
}


@RULES
@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID.keys())
def test_strict_rejects_invalid_arrays(rule, change):
    p, q, drafted, lengths = batch(np.random.default_rng(0), 2, 3, 4)
    lengths[:] = 3
    with pytest.raises(ValueError, match=r"\w"):
        rule(*change(p, q, drafted, lengths), [SeededRng(0), SeededRng(1)], strict=True)


@RULES
def test_strict_needs_an_rng_for_each_row(rule):
    with pytest.raises(ValueError, match="rng"):
        rule(*batch(np.random.default_rng(0), 2, 3, 4), [SeededRng(0)], strict=True)


@RULES
def test_a_draft_token_with_q_0_is_an_error(rule):
    p = np.full((1, 2, 3), 1 / 3)
    q = np.array([[[0.5, 0.5, 0.0]]])
    with pytest.raises(ValueError, match="probability 0"):
        rule(p, q, np.array([[2]]), np.array([1]), [SeededRng(0)])


@pytest.mark.slow
@RULES
@pytest.mark.parametrize("kind", ["random", "equal", "nearly disjoint"])
def test_sampled_distribution_converges_to_p_only(rule, kind):
    """The distance to p falls as 1/√N, the distance to other distributions does not."""
    generator = np.random.default_rng(11)
    v = 10
    p, q = generator.dirichlet(np.ones(v)), generator.dirichlet(np.ones(v))
    if kind == "equal":
        q = p
    if kind == "nearly disjoint":
        p, q = (
            0.999 * np.append(x, y) + 1e-4
            for x, y in [
                (generator.dirichlet(np.ones(5)), np.zeros(5)),
                (np.zeros(5), generator.dirichlet(np.ones(5))),
            ]
        )
        p, q = p / p.sum(), q / q.sum()
    references = generator.dirichlet(np.ones(v), size=100)
    sizes, n = [100, 300, 1_000, 3_000, 10_000], 10_000
    drafted = generator.choice(v, size=(n, 1), p=q)
    rng = [SeededRng(0)] * n
    verdict = rule(
        np.broadcast_to(p, (n, 2, v)), np.broadcast_to(q, (n, 1, v)), drafted, np.ones(n, int), rng
    )
    first = verdict.tokens[:, 0]
    frequencies = np.array([np.bincount(first[:size], minlength=v) / size for size in sizes])
    distances = np.sqrt(((frequencies - p) ** 2).mean(axis=1))
    slope = np.polyfit(np.log(sizes), np.log(distances), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.2)
    to_references = np.sqrt(((frequencies[:, None] - references) ** 2).mean(axis=2))
    assert (to_references[-1] > 0.5 * to_references[0]).all()
    assert distances[-1] < 0.1 * to_references[-1].min()
