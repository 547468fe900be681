"""Gumbel-coupled sampling: draws at one position agree, and are otherwise random."""

import functools

import numpy as np
import pytest

from spec_local.core.rng import SeededRng, _times
from spec_local.core.sampling import Distribution

N_POSITIONS = 2_000
SPARSE_IDS = np.array([0, 3, 17, 511, 512, 600, 151_000])


def normalized(weights):
    weights = np.asarray(weights, np.float64)
    return weights / weights.sum()


def dense(n, seed=0, scale=1.5):
    """A distribution over n tokens, some a hundred times as probable as others."""
    return normalized(np.exp(scale * np.random.default_rng(seed).normal(size=n)))


def draws(weights, tokens=None, seed=5, n=N_POSITIONS):
    rng = SeededRng(seed)
    return np.array([rng.choose_at(position, weights, tokens) for position in range(n)])


def as_expected(observed, expected):
    """Return whether counts pass a chi-square test that random ones fail once in 100,000 times."""
    observed, expected = np.ravel(observed), np.ravel(expected)
    spread = 2 / (9 * (len(expected) - 1))  # Wilson and Hilferty 1931
    quantile = (len(expected) - 1) * (1 - spread + 4.26 * spread**0.5) ** 3
    return ((observed - expected) ** 2 / expected).sum() < quantile


def total_variation(p, q):
    return float(np.abs(p - q).sum() / 2)


DISTRIBUTIONS = {
    "sparse": (normalized([5, 1, 0.2, 2, 1, 0.5, 3]), SPARSE_IDS),
    "small and dense": (normalized([5, 1, 0.2, 2, 1]), None),
    "three blocks": (dense(1_400), None),
    "one block heavy": (normalized([1.0] * 512 + [20.0] * 512 + [0.1] * 500), None),
}
EVERY_DISTRIBUTION = pytest.mark.parametrize(
    ("weights", "tokens"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys()
)


@EVERY_DISTRIBUTION
def test_one_position_gives_one_token_regardless_of_other_calls(weights, tokens):
    positions = [0, 1, 7, 255, 256, 4_000, 2**33]
    first, second = SeededRng(3), SeededRng(3)
    first_draws = {position: first.choose_at(position, weights, tokens) for position in positions}
    for position in reversed(positions):
        second.accept(0.3)
        second.choose(weights)
        assert second.choose_at(position, weights, tokens) == first_draws[position]
        assert second.choose_at(position, weights, tokens) == first_draws[position]


@EVERY_DISTRIBUTION
def test_the_scale_of_the_weights_does_not_matter(weights, tokens):
    assert (draws(weights, tokens, n=300) == draws(8 * weights, tokens, n=300)).all()


def test_the_draw_depends_on_ids_not_on_columns():
    """A draft model whose nucleus has further tokens still draws the main model's token."""
    for position in range(300):
        few = SeededRng(1).choose_at(position, normalized([1, 2]), np.array([10, 90]))
        more = SeededRng(1).choose_at(position, normalized([1e-12, 1, 1e-12, 2]), np.array([3, 10, 50, 90]))
        assert [10, 90][few] == [3, 10, 50, 90][more]


@EVERY_DISTRIBUTION
def test_draws_are_in_proportion_to_the_weights(weights, tokens):
    order = np.argsort(-weights, kind="stable")
    n_bins = min(30, len(weights))
    bins = np.empty(len(weights), np.intp)
    bins[order] = np.arange(len(weights)) % n_bins  # large and small weights of all blocks in every bin
    found = np.bincount(bins[draws(weights, tokens)], minlength=n_bins)
    expected = N_POSITIONS * np.bincount(bins, weights, n_bins)
    assert as_expected(found, expected)


def test_blocks_and_entries_of_a_block_are_drawn_in_proportion():
    weights = dense(25 * 512, seed=2)
    found = draws(weights)
    for bins in (np.arange(len(weights)) // 512, np.arange(len(weights)) % 512 // 21):
        expected = N_POSITIONS * np.bincount(bins, weights)
        assert as_expected(np.bincount(bins[found], minlength=25), expected)


@pytest.mark.parametrize("n", [6, 512, 513, 1_600])
def test_a_weight_of_0_is_never_drawn(n):
    weights = dense(n, seed=n)
    weights[[0, n // 2, n - 1]] = 0.0
    if n > 1_024:
        weights[512:1_024] = 0.0  # a whole block
    assert (weights[draws(weights, n=600)] > 0).all()
    ids = np.arange(n) * 7
    assert (weights[draws(weights, ids, n=600)] > 0).all()


def test_a_single_possible_token_is_always_drawn():
    for weights, tokens in [([1.0], None), ([0.0, 2.0, 0.0], None), ([0.0, 1e-300], np.array([4, 9]))]:
        for position in range(50):
            assert weights[SeededRng(0).choose_at(position, np.array(weights), tokens)] > 0


@functools.cache
def drawn(n, sparse=False, scale=1.5):
    """A distribution over n tokens, and its draws."""
    p = dense(n, seed=1, scale=scale)
    return p, draws(p, SPARSE_IDS if sparse else None)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_similar_distributions_mostly_agree(noise, sparse):
    """At least (1 − TV) / (1 + TV): Daliri, Musco and Suresh 2024, theorem 4; more than independent draws."""
    n = len(SPARSE_IDS) if sparse else 40
    p, drawn_from_p = drawn(n, sparse)
    q = normalized(p * np.exp(noise * np.random.default_rng(2).normal(size=n)))
    share = float((drawn_from_p == draws(q, SPARSE_IDS if sparse else None)).mean())
    tv = total_variation(p, q)
    spread = 4 * np.sqrt(share * (1 - share) / N_POSITIONS)
    assert (1 - tv) / (1 + tv) - spread < share < 1 - tv + spread  # 1 − TV is the upper bound of any coupling
    assert share > float(p @ q) + spread


@EVERY_DISTRIBUTION
@pytest.mark.parametrize("k", [1, 2, 4])
def test_ranked_tokens_begin_with_the_draw(weights, tokens, k):
    rng = SeededRng(5)
    for position in range(60):
        indices, probs = rng.rank_at(position, weights, tokens, k)
        assert indices[0] == rng.choose_at(position, weights, tokens)
        assert len(set(indices.tolist())) == len(indices) == k
        assert (probs > 0).all()
        assert probs.sum() < 1 + 1e-9
        assert (np.diff(probs[1:]) <= 0).all()


def test_a_weight_of_0_is_never_ranked():
    for tokens in (None, np.array([3, 9, 10])):
        indices, probs = SeededRng(0).rank_at(0, normalized([1, 0, 3]), tokens, 3)
        assert sorted(indices.tolist()) == [0, 2]
        assert probs.sum() == pytest.approx(1)


@pytest.mark.slow
def test_several_ranked_tokens_contain_the_draw_of_a_similar_distribution_more_often_than_drawn_ones():
    """As often as the best rule for drawn children (within 4 %)."""
    rng = np.random.default_rng(0)
    found, estimated, best = np.zeros(4), np.zeros(4), np.zeros(4)
    tokens = np.arange(40)
    for seed in range(600):
        logits = 4 * rng.normal(size=40)
        p, q = (normalized(np.exp(logits + noise)) for noise in (0.0, 1.28 * rng.normal(size=40)))
        indices, probs = SeededRng(seed).rank_at(0, q, tokens, 4)
        found += np.cumsum(indices == SeededRng(seed).choose_at(0, p, tokens))
        estimated += np.cumsum(probs)
        order = np.argsort(-q)
        for k in range(4):
            rest = normalized(np.where(np.isin(tokens, order[:k]), 0.0, q))
            best[k] += p[order[:k]].sum() + np.minimum(p, rest).sum()
    found, estimated, best = (x / 600 for x in (found, estimated, best))
    assert (found[1:] > best[1:] - 0.04).all()
    assert found[0] > best[0] - 0.08  # 1 − TV
    assert np.abs(found - estimated).max() < 0.05  # as large as that of Gumbel noise


def finalized(x):
    """The last three steps of splitmix64, as in `spec_local.core.rng`, inverted."""
    mask = 2**64 - 1
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return x ^ (x >> 30) ^ (x >> 60)


@pytest.mark.parametrize("bits", [0, 2**64 - 1, 2**64 - 2**11, 2**63])
def test_extreme_random_numbers_draw_no_impossible_token(bits):
    """A number that is rounded to 1 would make 0/0 of an impossible token's weight."""
    key = finalized(bits).to_bytes(8, "little")
    times = _times(np.array([0.0, 1.0]), np.array([0, 0]), key)
    assert times[0] == np.inf
    assert 0 < times[1] < np.inf


def test_draws_at_two_positions_are_independent():
    weights = normalized([4, 2, 1, 2, 1])
    found = draws(weights, n=3_000)
    for apart in (1, 2, 16, 256):
        pairs = np.bincount(5 * found[:-apart] + found[apart:], minlength=25)
        expected = len(found[apart:]) * np.outer(weights, weights).ravel()
        assert as_expected(pairs, expected)


def test_draws_of_two_seeds_are_independent():
    weights = normalized([4, 2, 1, 2, 1])
    pairs = np.bincount(5 * draws(weights, seed=1) + draws(weights, seed=2), minlength=25)
    assert as_expected(pairs, N_POSITIONS * np.outer(weights, weights))
    unseeded = [draws(weights, seed=None, n=60) for _ in range(2)]
    assert (unseeded[0] != unseeded[1]).any()


def test_coupled_draws_do_not_change_other_draws():
    weights = normalized([4, 2, 1, 2, 1])
    alone, beside = SeededRng(9), SeededRng(9)
    pairs = np.zeros((5, 5))
    for position in range(N_POSITIONS):
        there, chosen = beside.choose_at(position, weights), beside.choose(weights)
        assert alone.choose(weights) == chosen
        assert alone.accept(0.4) == beside.accept(0.4)
        pairs[there, chosen] += 1
    assert as_expected(pairs, N_POSITIONS * np.outer(weights, weights))


def test_sparse_and_dense_distributions_draw_the_same_token():
    sparse, whole = Distribution(np.array([2, 40]), normalized([1, 3])), np.zeros(41)
    sparse.fill(whole)
    found = [sparse.draw(SeededRng(4), position) for position in range(100)]
    assert set(found) == {2, 40}
    # They agree exactly if both fit into one block.
    same = [Distribution(np.arange(41), whole).draw(SeededRng(4), position) for position in range(100)]
    assert found == same
