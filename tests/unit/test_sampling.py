"""Sampling settings against a slow reference implementation."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_local.core.rng import SeededRng
from spec_local.core.sampling import Distribution, Sampler, align
from spec_local.core.sampling_settings import SETTINGS, SamplingSettings
from spec_local.errors import BackendError, InvalidRequest
from tests.unfiltered import unfiltered

V = 24
LOGITS = st.integers(0, 2**32).flatmap(
    lambda seed: st.sampled_from([0.0, 0.5, 3.0, 30.0]).map(lambda scale: (seed, scale))
)


def row(key, n=V):
    seed, scale = key
    logits = np.random.default_rng(seed).normal(size=n) * scale
    return np.round(logits, 1).astype(np.float32)  # rounded, so that there are ties


def softmax(logits):
    top = max(logits.values())
    weights = {t: math.exp(x - top) for t, x in logits.items()}
    total = sum(weights.values())
    return {t: w / total for t, w in weights.items()}


def dry_reference(recent, s, breakers):
    """Penalties by token: of all places in the recent tokens, the longest repetition counts."""
    n = longest = len(recent)
    for start in reversed(range(n)):
        lengths = [len(each) for each in breakers if recent[start : start + len(each)] == list(each)]
        if lengths:
            longest = n - start - max(lengths)
            break
    penalties = {}
    if n <= s.dry_allowed_length or longest < s.dry_allowed_length:
        return penalties
    for i in range(1, n):
        length = 0
        while length < min(i, longest) and recent[i - 1 - length] == recent[n - 1 - length]:
            length += 1
        if length >= s.dry_allowed_length and (recent[i],) not in breakers:
            penalty = s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)
            penalties[recent[i]] = max(penalty, penalties.get(recent[i], 0))
    return penalties


def last(history, n):
    return history[max(0, len(history) - n) :] if n else []


def reference(logits, history, s, breakers=()):
    """Probability by token, in llama.cpp's order, with the samplers one after the other."""
    left = {t: float(x) + s.logit_bias.get(t, 0.0) for t, x in enumerate(logits)}
    recent = last(history, s.penalty_window)
    for t in set(recent):
        left[t] = left[t] / s.repeat_penalty if left[t] > 0 else left[t] * s.repeat_penalty
        left[t] -= recent.count(t) * s.frequency_penalty + s.presence_penalty
    for t, penalty in dry_reference(last(history, s.dry_penalty_last_n), s, breakers).items():
        left[t] -= penalty
    by_rank = sorted(left, key=lambda t: (-left[t], t))
    best = left[by_rank[0]]
    if s.top_n_sigma:
        possible = [x for x in left.values() if x > -math.inf]
        mean = sum(possible) / len(possible)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in possible) / len(possible))
        by_rank = [t for t in by_rank if left[t] >= best - s.top_n_sigma * deviation - 1e-5]
    if s.top_k:
        by_rank = by_rank[: s.top_k]
    if s.top_p < 1:
        probs, total, kept = softmax({t: left[t] for t in by_rank}), 0.0, []
        for t in by_rank:
            kept.append(t)
            total += probs[t]
            if total >= s.top_p:
                break
        by_rank = kept
    if s.min_p:
        by_rank = [t for t in by_rank if left[t] >= best + math.log(s.min_p) - 1e-9]

    def at_temperature(tokens):
        return softmax({t: left[t] / s.temperature for t in tokens}) if s.temperature else {tokens[0]: 1.0}

    found = at_temperature(by_rank)
    if s.has_xtc:
        probs = softmax({t: left[t] for t in by_rank if left[t] > -math.inf})
        reach = [t for t in by_rank if np.float32(probs.get(t, -1)) >= np.float32(s.xtc_threshold)]
        others = at_temperature([t for t in by_rank if t not in reach[:-1]])
        share = s.xtc_probability
        found = {t: (1 - share) * found.get(t, 0) + share * others.get(t, 0) for t in by_rank}
    return found


def as_dict(distribution):
    ids = range(len(distribution.probs)) if distribution.ids is None else distribution.ids.tolist()
    return dict(zip(ids, distribution.probs.tolist(), strict=True))


def check(s, logits, history=()):
    before = logits.copy()
    distribution = Sampler(s).distribution(logits, list(history))
    assert np.array_equal(logits, before)
    assert distribution.probs.dtype == np.float64
    assert distribution.probs.sum() == pytest.approx(1, abs=1e-12)
    if distribution.ids is not None:
        assert (np.diff(distribution.ids) > 0).all()
    ours = {t: p for t, p in as_dict(distribution).items() if p > 1e-12}
    expected = {t: p for t, p in reference(logits, list(history), s).items() if p > 1e-12}
    assert ours.keys() == expected.keys()
    np.testing.assert_allclose(  # logits are float32
        [ours[t] for t in expected], list(expected.values()), rtol=1e-5, atol=1e-9
    )


BIASES = st.dictionaries(st.integers(0, V - 1), st.floats(-50, 50) | st.just(-math.inf), max_size=V - 1)
HISTORIES = st.lists(st.integers(0, V - 1), max_size=20)
FILTERS = {
    "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5, 100.0]),
    "top_k": st.integers(0, V + 3),
    "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.31, 1.0]),
    "logit_bias": BIASES,
    "top_n_sigma": st.sampled_from([0.0, 0.01, 0.71, 1.93, 3.07]),
    "xtc_probability": st.sampled_from([0.0, 0.3, 1.0]),
    "xtc_threshold": st.sampled_from([0.0, 0.0613, 0.1117, 0.31, 0.5, 0.51]),
}
PENALTIES = {
    "repeat_penalty": st.sampled_from([0.5, 1.0, 1.3]),
    "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
    "presence_penalty": st.sampled_from([0.0, 0.4, -1.1]),
    "penalty_window": st.sampled_from([0, 1, 5, 64]),
}
DRY = {
    "dry_multiplier": st.sampled_from([0.0, 0.8, 5.0]),
    "dry_base": st.sampled_from([1.0, 1.75, 40.0]),
    "dry_allowed_length": st.integers(0, 4),
    "dry_penalty_last_n": st.sampled_from([0, 1, 9, 64]),
}


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=50)
@given(key=LOGITS, data=st.data())
def test_each_setting_alone(name, key, data):
    check(unfiltered(**{name: data.draw(FILTERS[name])}), row(key))


BREAKERS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=2)


@settings(max_examples=300)
@given(
    LOGITS,
    st.lists(st.integers(0, 3), max_size=30) | st.just([1] * 30),
    st.fixed_dictionaries(DRY),
    BREAKERS,
)
def test_dry(key, history, dry, breakers):
    """Sequence breakers begin with their first token; of those that begin there, the longest one counts."""
    s, logits = unfiltered(**dry | {"penalty_window": 0}), row(key)
    tails = {each[0]: [b[1:] for b in breakers if b[0] == each[0]] for each in breakers}
    sampler = Sampler(s, breakers=tails)
    assert sampler.window == (s.dry_penalty_last_n if s.dry_multiplier else 0)
    expected = reference(logits, history, s, [tuple(each) for each in breakers])
    for known in (history, last(history, sampler.window)):
        found = sampler.distribution(logits, known).dense(V)
        np.testing.assert_allclose(found, [expected[t] for t in range(V)], rtol=1e-4, atol=1e-9)


def test_dry_penalizes_what_prolongs_a_repetition():
    s = unfiltered(dry_multiplier=1.0, dry_base=2.0)
    history = [7, 1, 2, 3, 4, 9, 2, 3, 5, 0, 1, 2, 3]  # 1 2 3 was followed by 4, and 2 3 by 5
    probs = Sampler(s).distribution(np.zeros(V, np.float32), history).probs
    penalties = np.log(probs[0] / probs).round(5)
    assert penalties.tolist() == [2.0 if t == 4 else 1.0 if t == 5 else 0 for t in range(V)]
    long = Sampler(replace(s, dry_multiplier=9.0, dry_penalty_last_n=1000))
    assert long.distribution(np.zeros(V, np.float32), [1, 2] * 500).dense(V)[1] == 0  # not NaN


def test_of_the_breakers_that_begin_at_a_token_the_longest_counts():
    s, history = unfiltered(dry_multiplier=1.0, dry_allowed_length=1), [5, 6, 7, 9, 5, 6, 7]
    cases = [({}, 1.75**2), ({5: [()]}, 1.75), ({5: [(), (6,)]}, 1), ({5: [(), (6,), (8,)], 9: [()]}, 0)]
    for breakers, penalty in cases:
        probs = Sampler(s, breakers=breakers).distribution(np.zeros(V, np.float32), history).probs
        assert np.log(probs[0] / probs[9]) == pytest.approx(penalty, rel=1e-5)


def test_xtc_is_a_mixture_of_both_cases():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
    s = unfiltered(xtc_probability=0.25, xtc_threshold=0.15)
    found = Sampler(s).distribution(logits).probs
    expected = 0.75 * np.array([0.4, 0.3, 0.2, 0.06, 0.04]) + 0.25 * np.array([0, 0, 0.2, 0.06, 0.04]) / 0.3
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    greedy = Sampler(replace(s, temperature=0))
    assert as_dict(greedy.distribution(logits)) == {0: 0.75, 1: 0, 2: 0.25, 3: 0, 4: 0}
    assert not greedy.settings.is_greedy
    assert greedy.most_probable(logits, 4)[0].tolist() == [0, 2]
    assert replace(s, temperature=0, xtc_threshold=0.6).is_greedy


@given(LOGITS, st.floats(0, 1))
@example((0, 0.0), 1 / 3)  # all equal
def test_top_p(key, top_p):
    logits = row(key)
    ours = set(as_dict(Sampler(unfiltered(top_p=top_p)).distribution(logits)))
    probs = softmax(dict(enumerate(logits.tolist())))
    n, total = len(ours), sum(probs[t] for t in ours)
    # It is the most probable set of its size, reaches top_p, and needs all its members.
    assert total == pytest.approx(sum(sorted(probs.values())[-n:]), abs=1e-9)
    assert total >= top_p - 1e-9
    assert n == 1 or sum(sorted(probs.values())[-n + 1 :]) < top_p + 1e-9


def test_top_p_prefers_lower_ids_among_equals():
    logits = np.array([0, 1, 1, 1, 1, -9], np.float32)
    distribution = Sampler(unfiltered(top_p=0.4)).distribution(logits)
    assert distribution.ids.tolist() == [1, 2]


@settings(max_examples=150)
@given(
    LOGITS,
    HISTORIES,
    st.fixed_dictionaries(FILTERS | PENALTIES | DRY),
    st.sampled_from([0.213, 0.777, 1.0]),
)
def test_all_settings_together(key, history, others, top_p):
    seed, scale = key
    # Without ties, rounding matters only where a sum equals top_p to the last bit.
    logits = (np.random.default_rng(seed).normal(size=V) * (scale + 0.5)).astype(np.float32)
    check(unfiltered(**others, top_p=top_p), logits, history)


@given(
    key=LOGITS,
    chosen=st.sets(st.integers(0, V - 1), min_size=1),
    history=HISTORIES,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.777, 1.0]),
)
def test_sampling_from_some_tokens_is_that_with_the_others_impossible(
    key, chosen, history, temperature, top_k, top_p
):
    """The logits of the others are not read: NaN would be an error."""
    s = SamplingSettings(
        temperature, top_k, top_p, min_p=0.05, repeat_penalty=1.2, logit_bias={3: 1.5, 5: -1.0}
    )
    tokens = np.array(sorted(chosen))
    possible, logits = np.full(V, -np.inf, np.float32), np.full(V, np.nan, np.float32)
    possible[tokens] = logits[tokens] = row(key)[tokens]
    sampler = Sampler(s)
    expected = sampler.distribution(possible, history).dense(V)
    assert np.allclose(sampler.distribution(logits, history, tokens).dense(V), expected, atol=1e-12)
    usual = sampler.most_probable(possible, 2, history)
    for a, b in zip(usual, sampler.most_probable(logits, 2, history, tokens), strict=True):
        n = np.count_nonzero(b)  # beyond them, tokens that are not possible
        assert np.allclose(a[:n], b[:n])


@given(LOGITS, st.lists(st.integers(0, V - 1), max_size=80), st.integers(0, 9))
def test_the_history_matters_only_within_the_penalty_window(key, history, window):
    plain = Sampler(unfiltered(top_p=0.9, penalty_window=window))
    assert as_dict(plain.distribution(row(key), history)) == as_dict(plain.distribution(row(key)))
    penalized = Sampler(unfiltered(top_p=0.9, penalty_window=window, repeat_penalty=1.4))
    recent = history[len(history) - window :] if window < len(history) else history
    assert as_dict(penalized.distribution(row(key), history)) == as_dict(
        penalized.distribution(row(key), recent)
    )


def test_the_prompt_need_not_be_penalized():
    how = unfiltered(repeat_penalty=1.5, frequency_penalty=0.5, penalty_window=4)
    logits, history = row((0, 3.0)), [5, 5, 7, 9, 5, 8]
    for n_prompt in range(len(history) + 1):
        sampler = Sampler(replace(how, penalize_prompt=False), n_prompt=n_prompt)
        found = sampler.distribution(logits, history[-sampler.window :])
        expected = Sampler(how).distribution(logits, history[n_prompt:])
        assert found.probs.tolist() == expected.probs.tolist()
        assert Sampler(how, n_prompt=n_prompt).window == 4


@given(LOGITS, st.integers(1, V + 3), st.lists(st.integers(0, V - 1), max_size=9), st.booleans())
def test_most_probable_agrees_with_the_distribution(key, k, history, greedy):
    """At temperature 0 with the distribution at temperature 1."""
    s = unfiltered(temperature=0 if greedy else 0.7, repeat_penalty=1.3, logit_bias={2: -1.0})
    probs = reference(row(key), history, replace(s, temperature=1.0) if greedy else s)
    tokens, values = Sampler(s).most_probable(row(key), k, history)
    assert len(tokens) == len(set(tokens.tolist())) == min(k, V)
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose(values, [probs[t] for t in tokens.tolist()], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(values, sorted(probs.values())[::-1][:k], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [V, 2000])  # small vocabularies are sorted as a whole
def test_nan_and_infinite_logits_are_an_error(temperature, bad, n):
    for token in (0, n - 1):
        logits = row((1, 1.0), n)
        logits[token] = bad
        for how in ({}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.9}):
            with pytest.raises(BackendError, match="not numbers"):
                Sampler(unfiltered(temperature=temperature, **how)).distribution(logits)
        with pytest.raises(BackendError, match="not numbers"):
            Sampler(unfiltered(temperature=temperature)).most_probable(logits, 3)


@pytest.mark.parametrize("n", [1, 30, 1023, 1024, 5000])
def test_top_is_in_descending_order_with_the_lower_id_first(n):
    generator = np.random.default_rng(n)
    probs = generator.integers(0, 9, size=n) ** 8.0  # ties, zeros, and very small values
    probs[0] += 1
    probs /= probs.sum()
    for ids in (None, np.sort(generator.choice(3 * n, size=n, replace=False))):
        for k in (1, 2, n // 2 + 1, n, n + 5):
            tokens, values = Distribution(ids, probs).top(k)
            by_rank = sorted(probs.nonzero()[0].tolist(), key=lambda i: (-probs[i], i))[:k]
            assert tokens.tolist() == (by_rank if ids is None else ids[by_rank].tolist())
            assert values.tolist() == probs[by_rank].tolist()


def test_without_keeps_the_proportions_of_other_tokens():
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    for ids in (None, np.array([2, 5, 6, 9])):
        whole = Distribution(ids, probs)
        names = range(4) if ids is None else ids.tolist()
        left = as_dict(whole.without([names[1], names[3]]))
        assert [left[names[i]] for i in range(4)] == pytest.approx([0.25, 0, 0.75, 0])
        assert whole.without([]) is whole
        assert whole.probs.tolist() == probs.tolist()  # unchanged


def test_tokens_with_logits_of_minus_infinity_are_never_drawn():
    logits = np.full(V, -np.inf, np.float32)
    with pytest.raises(BackendError):
        Sampler(unfiltered()).distribution(logits)
    logits[[4, 9]] = 1
    for s in (unfiltered(), unfiltered(top_k=5), unfiltered(top_p=0.9999), unfiltered(min_p=0.01)):
        found = as_dict(Sampler(s).distribution(logits))
        assert {t: p for t, p in found.items() if p} == {4: 0.5, 9: 0.5}


def test_forbidding_every_token_is_an_error():
    s = unfiltered(logit_bias=dict.fromkeys(range(V), -math.inf))
    with pytest.raises(BackendError, match="forbids every token"):
        Sampler(s).distribution(row((1, 1.0)))


def test_temperature_0_prefers_the_lowest_id_among_equals():
    logits = np.array([0, 7, 7, 7], np.float32)
    assert as_dict(Sampler(SamplingSettings(temperature=0)).distribution(logits)) == {1: 1.0}
    assert as_dict(Sampler(unfiltered(top_k=1)).distribution(logits)) == {1: 1.0}
    assert set(as_dict(Sampler(unfiltered(top_k=2)).distribution(logits))) == {1, 2}


def test_bias_and_penalties_of_tokens_beyond_a_smaller_vocabulary():
    s = unfiltered(logit_bias={V + 5: 3.0, 2: -math.inf}, repeat_penalty=2.0)
    distribution = Sampler(s).distribution(row((1, 1.0)), [V + 5, 1])
    assert len(distribution.probs) == V
    assert distribution.probs[2] == 0


@given(st.lists(st.tuples(LOGITS, st.sampled_from([0, 1, 3, 7])), min_size=1, max_size=5))
def test_align(keys):
    distributions = [Sampler(unfiltered(top_k=k)).distribution(row(key)) for key, k in keys]
    rows, columns = align(distributions, V)
    dense = np.stack([d.dense(V) for d in distributions])
    if columns is None:
        assert np.array_equal(rows, dense)
        return
    assert (np.diff(columns) > 0).all()
    assert set(columns.tolist()) == {int(t) for d in distributions for t in d.ids}
    assert np.array_equal(rows, dense[:, columns])


def test_align_of_different_vocabulary_sizes():
    small = Distribution(None, np.full(V - 2, 1 / (V - 2)))
    rows, columns = align([Distribution.certain(V - 1), small], V)
    assert columns is None
    assert rows.shape == (2, V)
    assert rows[0, V - 1] == 1
    assert rows[1, V - 2 :].tolist() == [0, 0]


def test_draws_are_in_proportion_to_probabilities():
    distribution = Distribution(np.array([3, 8, 11]), np.array([0.25, 0.0, 0.75]))
    rng = SeededRng(0)
    drawn = [distribution.draw(rng) for _ in range(4000)]
    assert set(drawn) == {3, 11}
    assert drawn.count(3) / 4000 == pytest.approx(0.25, abs=0.03)
    assert as_dict(distribution.most_probable()) == {11: 1.0}
    assert as_dict(Distribution(None, np.array([0.4, 0.4, 0.2])).most_probable()) == {0: 1.0}


@pytest.mark.parametrize("n", [1, 7, 64, 65, 2000, 151_936])
def test_rng_chooses_in_proportion_to_weights(n):
    generator = np.random.default_rng(n)
    weights = generator.exponential(size=n) * (generator.random(n) < 0.7)
    weights[generator.integers(n)] = weights.sum() + 1  # half of it on one
    rng = SeededRng(n)
    drawn = np.array([rng.choose(weights) for _ in range(600)])
    assert (weights[drawn] > 0).all()
    for cut in (n // 4, n // 2, 3 * n // 4):
        expected = weights[:cut].sum() / weights.sum()
        assert (drawn < cut).mean() == pytest.approx(expected, abs=0.08)


def test_rng_accepts_with_the_given_probability():
    rng = SeededRng(0)
    shares = [np.mean([rng.accept(probability) for _ in range(4000)]) for probability in (0, 0.3, 1)]
    assert shares == pytest.approx([0, 0.3, 1], abs=0.03)
    assert (shares[0], shares[2]) == (0, 1)


INVALID = {
    "temperature": [-0.1, math.nan, math.inf, 101],
    "top_k": [-1, 2**31],
    "top_p": [-0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repeat_penalty": [0, -1, math.nan, math.inf],
    "frequency_penalty": [math.nan, math.inf, -101],
    "presence_penalty": [math.nan, -math.inf, 101],
    "penalty_window": [-1],
    "logit_bias": [{1: math.nan}, {1: math.inf}, {1: 1e300}],
    "top_n_sigma": [-0.1, math.nan, math.inf],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [-0.1, 1.1],
    "dry_multiplier": [-0.1, math.inf],
    "dry_base": [0.9, math.nan],
    "dry_allowed_length": [-1],
    "dry_penalty_last_n": [-1],
    "dry_sequence_breakers": ["\n", [1], ["x" * 41], ["x"] * 65],
    "penalize_prompt": [1],
}


def test_each_setting_has_invalid_values():
    assert set(INVALID) == {setting.field for setting in SETTINGS}


@pytest.mark.parametrize(("name", "value"), [(name, each) for name in INVALID for each in INVALID[name]])
def test_invalid_settings(name, value):
    with pytest.raises(InvalidRequest, match="give"):
        unfiltered(**{name: value})


def test_the_smallest_temperature_equals_0():
    s = unfiltered(temperature=5e-324)
    assert as_dict(Sampler(s).distribution(np.array([1, 3, 2], np.float32)))[1] == 1.0


def test_a_bias_below_float32_forbids():
    s = unfiltered(logit_bias={1: -1e300})
    assert as_dict(Sampler(s).distribution(np.array([1, 3, 2], np.float32)))[1] == 0.0


def test_a_large_vocabulary():
    """Equal to the reference where the sort is partial, and fast."""
    generator = np.random.default_rng(3)
    for scale in (0.01, 4.0):
        logits = (generator.normal(size=20_000) * scale).astype(np.float32)
        for s in (unfiltered(top_p=0.95), unfiltered(top_k=40, top_p=0.8, min_p=0.02, temperature=0.7)):
            check(s, logits)
    started = time.process_time()
    logits = generator.normal(size=151_936).astype(np.float32) * 4
    for _ in range(5):
        Sampler(unfiltered(top_p=0.95, temperature=0.8)).distribution(logits)
    assert time.process_time() - started < 2  # a full sort of each takes about as long
