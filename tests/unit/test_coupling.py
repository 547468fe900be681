"""Draws that belong to a place of the text: alike for all who ask there, and otherwise as random as any."""

import itertools

import numpy as np
import pytest

from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Distribution

N_PLACES = 8_000
SPARSE_IDS = np.array([0, 3, 17, 511, 512, 600, 151_000])


def normalised(weights):
    weights = np.asarray(weights, np.float64)
    return weights / weights.sum()


def dense(n, seed=0, scale=1.5):
    """A distribution over n tokens, some a hundred times as probable as others."""
    return normalised(np.exp(scale * np.random.default_rng(seed).normal(size=n)))


def draws(weights, tokens=None, seed=5, n=N_PLACES):
    rng = SeededRng(seed)
    return np.array([rng.choose_at(place, weights, tokens) for place in range(n)])


def as_expected(observed, expected):
    """Whether counts are as near to the expected ones as 99,999 of 100,000 would be (chi-square test)."""
    observed, expected = np.ravel(observed), np.ravel(expected)
    spread = 2 / (9 * (len(expected) - 1))  # Wilson and Hilferty 1931
    quantile = (len(expected) - 1) * (1 - spread + 4.26 * spread**0.5) ** 3
    return ((observed - expected) ** 2 / expected).sum() < quantile


def total_variation(p, q):
    return float(np.abs(p - q).sum() / 2)


DISTRIBUTIONS = {
    "sparse": (normalised([5, 1, 0.2, 2, 1, 0.5, 3]), SPARSE_IDS),
    "small and dense": (normalised([5, 1, 0.2, 2, 1]), None),
    "three blocks": (dense(1_400), None),
    "one block heavy": (normalised([1.0] * 512 + [20.0] * 512 + [0.1] * 500), None),
}
EVERY_DISTRIBUTION = pytest.mark.parametrize(
    ("weights", "tokens"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys()
)


@EVERY_DISTRIBUTION
def test_one_place_gives_one_answer_whatever_else_was_asked(weights, tokens):
    places = [0, 1, 7, 255, 256, 4_000, 2**33]
    first, second = SeededRng(3), SeededRng(3)
    asked = {place: first.choose_at(place, weights, tokens) for place in places}
    for place in reversed(places):
        second.accept(0.3)
        second.choose(weights)
        assert second.choose_at(place, weights, tokens) == asked[place]
        assert second.choose_at(place, weights, tokens) == asked[place]


@EVERY_DISTRIBUTION
def test_other_weights_of_a_size_do_not_matter(weights, tokens):
    assert (draws(weights, tokens, n=300) == draws(8 * weights, tokens, n=300)).all()


def test_what_a_place_draws_hangs_on_ids_and_not_on_columns():
    """A draft whose nucleus holds other tokens as well still draws main's token where it can."""
    for place in range(300):
        few = SeededRng(1).choose_at(place, normalised([1, 2]), np.array([10, 90]))
        more = SeededRng(1).choose_at(place, normalised([1e-12, 1, 1e-12, 2]), np.array([3, 10, 50, 90]))
        assert [10, 90][few] == [3, 10, 50, 90][more]


@EVERY_DISTRIBUTION
def test_draws_are_in_proportion_to_the_weights(weights, tokens):
    order = np.argsort(-weights, kind="stable")
    n_bins = min(30, len(weights))
    bins = np.empty(len(weights), np.intp)
    bins[order] = np.arange(len(weights)) % n_bins  # large and small ones, and all blocks, in every bin
    found = np.bincount(bins[draws(weights, tokens)], minlength=n_bins)
    expected = N_PLACES * np.bincount(bins, weights, n_bins)
    assert as_expected(found, expected)


def test_blocks_and_entries_of_a_block_are_drawn_in_proportion():
    weights = dense(25 * 512, seed=2)
    found = draws(weights)
    for bins in (np.arange(len(weights)) // 512, np.arange(len(weights)) % 512 // 21):
        expected = N_PLACES * np.bincount(bins, weights)
        assert as_expected(np.bincount(bins[found], minlength=25), expected)


@pytest.mark.parametrize("n", [6, 512, 513, 1_600])
def test_what_weighs_nothing_is_never_drawn(n):
    weights = dense(n, seed=n)
    weights[[0, n // 2, n - 1]] = 0.0
    if n > 1_024:
        weights[512:1_024] = 0.0  # a whole block
    assert (weights[draws(weights, n=2_000)] > 0).all()
    ids = np.arange(n) * 7
    assert (weights[draws(weights, ids, n=2_000)] > 0).all()


def test_a_single_token_is_certain():
    for weights, tokens in [([1.0], None), ([0.0, 2.0, 0.0], None), ([0.0, 1e-300], np.array([4, 9]))]:
        for place in range(50):
            assert weights[SeededRng(0).choose_at(place, np.array(weights), tokens)] > 0


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("tokens", [None, SPARSE_IDS], ids=["dense", "sparse"])
def test_near_distributions_mostly_draw_the_same(noise, tokens):
    """(1 − TV) / (1 + TV) or more: Daliri, Musco and Suresh 2024, theorem 4. Independent draws agree far less."""
    n = len(SPARSE_IDS) if tokens is not None else 40
    p = dense(n, seed=1)
    q = normalised(p * np.exp(noise * np.random.default_rng(2).normal(size=n)))
    share = float((draws(p, tokens) == draws(q, tokens)).mean())
    tv = total_variation(p, q)
    spread = 4 * np.sqrt(share * (1 - share) / N_PLACES)
    assert (1 - tv) / (1 + tv) - spread < share < 1 - tv + spread  # the latter is the most of any coupling
    assert share > float(p @ q) + spread


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_near_distributions_mostly_draw_the_same_over_several_blocks(noise):
    p = dense(3_000, seed=3, scale=3.0)
    q = normalised(p * np.exp(noise * np.random.default_rng(4).normal(size=3_000)))
    share = float((draws(p) == draws(q)).mean())
    tv = total_variation(p, q)
    assert (1 - tv) / (1 + tv) - 0.02 < share < 1 - tv + 0.02


def test_draws_at_two_places_are_independent():
    weights = normalised([4, 2, 1, 2, 1])
    found = draws(weights, n=12_000)
    for apart in (1, 2, 16, 256):
        pairs = np.bincount(5 * found[:-apart] + found[apart:], minlength=25)
        expected = len(found[apart:]) * np.outer(weights, weights).ravel()
        assert as_expected(pairs, expected)


def test_draws_of_two_seeds_are_independent():
    weights = normalised([4, 2, 1, 2, 1])
    pairs = np.bincount(5 * draws(weights, seed=1) + draws(weights, seed=2), minlength=25)
    assert as_expected(pairs, N_PLACES * np.outer(weights, weights))
    unseeded = [draws(weights, seed=None, n=60) for _ in range(2)]
    assert (unseeded[0] != unseeded[1]).any()


def test_places_leave_the_other_questions_alone():
    """So that a rule which draws at places may stand beside one that does not."""
    weights = normalised([4, 2, 1, 2, 1])
    alone, beside = SeededRng(9), SeededRng(9)
    pairs = np.zeros((5, 5))
    for place in range(N_PLACES):
        there, chosen = beside.choose_at(place, weights), beside.choose(weights)
        assert alone.choose(weights) == chosen
        assert alone.accept(0.4) == beside.accept(0.4)
        pairs[there, chosen] += 1
    assert as_expected(pairs, N_PLACES * np.outer(weights, weights))


def test_a_distribution_is_drawn_from_at_a_place_by_token():
    sparse, whole = Distribution(np.array([2, 40]), normalised([1, 3])), np.zeros(41)
    sparse.fill(whole)
    found = [sparse.draw(SeededRng(4), place) for place in range(100)]
    assert set(found) == {2, 40}
    # A row of few tokens and a row with all of them draw alike where both have no more than one block.
    same = [Distribution(np.arange(41), whole).draw(SeededRng(4), place) for place in range(100)]
    assert found == same


def test_agreement_is_not_perfect_where_it_cannot_be():
    """The check above has teeth: with disjoint distributions nobody agrees, with equal ones everybody."""
    p, q = normalised([1, 1, 0, 0]), normalised([0, 0, 1, 1])
    assert not (draws(p, n=500) == draws(q, n=500)).any()
    assert (draws(p, n=500) == draws(p, n=500)).all()
    for a, b in itertools.combinations(range(3), 2):
        assert (draws(p, seed=a, n=500) == draws(p, seed=b, n=500)).mean() < 0.7
