"""Sampling settings give the same distribution as llama.cpp's samplers, in the order of its commands."""

import contextlib
import ctypes
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from spec_local.core.sampling import Sampler
from spec_local.llama import runtime
from spec_local.llama.breakers import breaker_tokens
from tests.unfiltered import unfiltered

ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


@contextlib.contextmanager
def sampler_chain(n_vocab, s, history, vocabulary, seed=0):
    """A chain of llama.cpp's samplers, as its command line builds it, after `history`."""
    lib = runtime.library()
    breakers = [text.encode() for text in s.dry_sequence_breakers]
    biases = [lib.llama_logit_bias(token, bias) for token, bias in s.logit_bias.items()]
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in (
        lib.llama_sampler_init_logit_bias(
            n_vocab, len(biases), (lib.llama_logit_bias * len(biases))(*biases)
        ),
        lib.llama_sampler_init_penalties(
            n_vocab, s.penalty_window, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        ),
        lib.llama_sampler_init_dry(
            vocabulary._handle,
            *(s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n),
            *((ctypes.c_char_p * len(breakers))(*breakers), len(breakers)),
        ),
        lib.llama_sampler_init_top_n_sigma(s.top_n_sigma),
        lib.llama_sampler_init_top_k(s.top_k),
        lib.llama_sampler_init_top_p(s.top_p, 0),
        lib.llama_sampler_init_min_p(s.min_p, 0),
        lib.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, 0, seed),
        lib.llama_sampler_init_temp(s.temperature),
    ):
        lib.llama_sampler_chain_add(chain, sampler)
    for token in history:
        lib.llama_sampler_accept(chain, token)
    try:
        yield chain
    finally:
        lib.llama_sampler_free(chain)


def llama_cpp_distribution(logits, history, s, vocabulary, seed=0):
    """Probability by token after llama.cpp's samplers, and the relative error of float32."""
    lib = runtime.library()
    entries = np.zeros(len(logits), ENTRY)
    entries["id"], entries["logit"] = range(len(logits)), logits
    data = entries.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
    array = lib.llama_token_data_array(data, len(logits), -1, False)
    with sampler_chain(len(logits), s, history, vocabulary, seed) as chain:
        lib.llama_sampler_apply(chain, ctypes.byref(array))
    first = (ctypes.addressof(array.data.contents) - entries.ctypes.data) // ENTRY.itemsize  # XTC moves it
    left = entries[first : first + array.size]
    left = left[left["logit"] > -np.inf]
    weights = np.exp(left["logit"].astype(float) - float(left["logit"].max()))
    error = 1e-6 + 2e-7 * float(np.abs(left["logit"]).max())  # the logits are rounded a few times
    return dict(zip(left["id"].tolist(), (weights / weights.sum()).tolist(), strict=True)), error


def our_distribution(logits, history, s, vocabulary):
    breakers = breaker_tokens(vocabulary, s.dry_sequence_breakers) if s.has_dry else None
    distribution = Sampler(s, breakers=breakers).distribution(logits, history)
    ids = range(len(distribution.probs)) if distribution.ids is None else distribution.ids.tolist()
    return {t: p for t, p in zip(ids, distribution.probs.tolist(), strict=True) if p}


def equal(ours, theirs, error):
    """Of several equally probable tokens at a limit, llama.cpp keeps any: its sort is not stable."""
    if len(ours) != len(theirs):
        return False
    least = min(theirs.values())
    return np.allclose(sorted(ours.values()), sorted(theirs.values()), rtol=error, atol=1e-30) and all(
        ours.get(token, least) == pytest.approx(theirs.get(token, least), rel=error, abs=1e-30)
        for token in ours.keys() | theirs.keys()
    )


def random_case(rng):
    n_vocab = rng.choice([2, 30, 300, 1500])  # llama.cpp sorts in several ways
    logits = np.random.default_rng(rng.getrandbits(32)).normal(size=n_vocab) * rng.choice([0.1, 1.0, 4.0])
    xtc_probability = rng.choice([0.0, 1.0])  # between them, llama.cpp has one of two results
    if rng.random() < 0.3 and not xtc_probability:  # of equally probable tokens, XTC keeps another one there
        logits = np.round(logits)  # ties
    # Half of the history consists of probable tokens, so that penalties matter.
    probable = np.argsort(-logits)[:8].tolist()
    history = [
        rng.choice(probable) if rng.random() < 0.5 else rng.randrange(n_vocab)
        for _ in range(rng.choice([0, 3, 20, 100]))
    ]
    biased = {rng.choice([*probable, *history, n_vocab, n_vocab + 7]) for _ in range(rng.randrange(5))}
    bias = {token: rng.choice([-3.0, -0.5, 0.7, 4.0, -math.inf]) for token in biased}
    if not any(bias.get(token, 0.0) > -math.inf for token in range(n_vocab)):
        bias = {}
    settings = unfiltered(
        temperature=rng.choice([0.0, 0.1, 0.8, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 200, n_vocab, n_vocab + 3]),
        top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 1.0, 1.0]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.1, 0.5, 1.0]),
        repeat_penalty=rng.choice([0.8, 1.0, 1.1, 1.5]),
        frequency_penalty=rng.choice([-0.3, 0.0, 0.2, 1.0]),
        presence_penalty=rng.choice([-0.5, 0.0, 0.4]),
        penalty_window=rng.choice([0, 1, 8, 64, 200]),
        logit_bias=bias,
        top_n_sigma=rng.choice([0.0, 0.0, 0.4, 1.1, 3.2]),
        xtc_probability=xtc_probability,
        xtc_threshold=rng.choice([0.01, 0.1, 0.3, 0.5, 0.6]),
        dry_multiplier=rng.choice([0.0, 0.8, 3.0]),
        dry_base=rng.choice([1.0, 1.75, 4.0]),
        dry_allowed_length=rng.choice([0, 1, 2, 5]),
        dry_penalty_last_n=rng.choice([0, 3, 64, 300]),
        dry_sequence_breakers=rng.choice([("\n", ":"), ("the", "an"), ("ab", "\n\n", "e"), ()]),
    )
    return logits.astype(np.float32), history, settings


def test_random_settings(tiny_model):
    rng, n_rounded, vocabulary = random.Random(0), 0, tiny_model.vocabulary
    for _ in range(400):
        logits, history, s = random_case(rng)
        theirs, error = llama_cpp_distribution(logits, history, s, vocabulary)
        if not equal(our_distribution(logits, history, s, vocabulary), theirs, error):
            # llama.cpp adds up in float32: where a sum equals a limit but for rounding, one token is dropped
            # or added.
            near = [replace(s, top_p=np.clip(s.top_p + d, 0, 1)) for d in (-1e-5, 1e-5)]
            near += [replace(s, top_n_sigma=s.top_n_sigma * (1 + d)) for d in (-1e-5, 1e-5)]
            near += [replace(s, xtc_threshold=s.xtc_threshold * (1 + d)) for d in (-1e-5, 1e-5)]
            ours = [our_distribution(logits, history, each, vocabulary) for each in near]
            assert any(equal(each, theirs, error) for each in ours), s
            n_rounded += 1
    assert n_rounded <= 4


def test_dry_of_text(tiny_model):
    """Sequence breakers of several tokens, and tokens that contain one or in which one begins."""
    rng, vocabulary = random.Random(0), tiny_model.vocabulary
    logits = np.random.default_rng(0).normal(size=vocabulary.n_tokens).astype(np.float32)
    words = ["the cat", " sat", " on", "\n\n", "ab", ": ", "the dog"]
    breakers, n_penalized = ["he c", "\n\n", "t o", "b", "n", "cat s", "b: t"], 0
    for _ in range(300):
        s = unfiltered(
            dry_multiplier=2.0,
            dry_allowed_length=rng.choice([1, 2, 4]),
            dry_penalty_last_n=rng.choice([20, 200]),
            dry_sequence_breakers=rng.choices(breakers, k=rng.randrange(3)),
        )
        history = vocabulary.tokenize("".join(rng.choices(words, k=rng.choice([8, 20]))))
        ours = our_distribution(logits, history, s, vocabulary)
        assert equal(ours, *llama_cpp_distribution(logits, history, s, vocabulary)), (s, history)
        n_penalized += not equal(ours, *llama_cpp_distribution(logits, [], s, vocabulary))
    assert n_penalized > 100


def test_xtc_is_as_frequent_as_in_llama_cpp(tiny_model):
    """llama.cpp decides by chance; here, the distribution is the mean over its decisions."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
    for temperature in (0.0, 0.7):
        s = unfiltered(temperature=temperature, xtc_probability=0.3, xtc_threshold=0.15)
        mean = np.zeros(5)
        for seed in range(2000):
            for token, p in llama_cpp_distribution(logits, [], s, tiny_model.vocabulary, seed)[0].items():
                mean[token] += p / 2000
        ours = our_distribution(logits, [], s, tiny_model.vocabulary)
        assert [ours.get(t, 0) for t in range(5)] == pytest.approx(mean.tolist(), abs=0.03)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_a_nucleus_ends_with_the_token_that_reaches_top_p_exactly(n, min_p, tiny_model):
    vocabulary, logits = tiny_model.vocabulary, np.full(n, 0.3, np.float32)
    for kept in range(n + 1):
        s = unfiltered(top_p=kept / n, min_p=min_p)
        ours = our_distribution(logits, [], s, vocabulary)
        assert len(ours) == max(kept, 1)
        assert equal(ours, *llama_cpp_distribution(logits, [], s, vocabulary))


def test_a_logit_at_the_limit_of_min_p_is_kept(tiny_model):
    vocabulary, rng = tiny_model.vocabulary, np.random.default_rng(0)
    for min_p in [*rng.uniform(0, 1, size=300), 1e-30, 1e-50, 1.0]:
        top = np.float32(rng.normal() * 10)
        limit = top + np.float32(math.log(min_p))
        logits = np.array([limit, top, np.nextafter(limit, np.float32(-np.inf))], np.float32)
        s = unfiltered(min_p=min_p)
        ours = our_distribution(logits, [], s, vocabulary)
        assert equal(ours, *llama_cpp_distribution(logits, [], s, vocabulary)), min_p


@pytest.mark.parametrize("bias", [-1e38, -math.inf])
def test_a_biased_and_penalized_logit_below_the_range_of_float32(bias, tiny_model):
    s, vocabulary = unfiltered(repeat_penalty=1000, logit_bias={0: bias}), tiny_model.vocabulary
    ours = our_distribution(np.zeros(2, np.float32), [0], s, vocabulary)
    assert ours == {1: 1.0}
    assert equal(ours, *llama_cpp_distribution(np.zeros(2, np.float32), [0], s, vocabulary))
