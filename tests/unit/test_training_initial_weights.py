"""The start of a head: a linear prediction, induction heads, and the main model's neurons."""

import numpy as np
import pytest
import torch

from spec_local.training import network
from spec_local.training.head_shape import HeadShape, tensor_shapes
from spec_local.training.initial_weights import Samples, initial_weights
from spec_local.training.main_weights import FeedForward

WIDTH, N_VOCAB, N = 64, 60, 1500
HEAD_DIM = 32


def rms(x, eps=1e-5):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


@pytest.fixture(scope="module")
def samples():
    """The state after a token is a linear function of the state before it and of the token, and noise.

    Channels of the states differ in size; one is constant.
    """
    rng = np.random.default_rng(0)
    vocabulary = rng.normal(size=(N_VOCAB, WIDTH))
    tokens = np.concatenate([rng.permutation(N_VOCAB) for _ in range(N // N_VOCAB + 1)])[:N]  # once each
    states = rng.normal(size=(N, 3 * WIDTH)) * rng.uniform(0.2, 5, 3 * WIDTH)
    states[:, 5] = 3
    a, b, c = (rng.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5 for _ in range(3))
    targets = rms(states[:, -WIDTH:]) @ a + 0.5 * rms(states[:, :WIDTH]) @ b + rms(vocabulary[tokens]) @ c
    targets += 0.1 * rng.normal(size=targets.shape)
    around = (vocabulary[np.roll(tokens, i)] for i in (1, 0, -1))
    return Samples(*(each.astype(np.float32) for each in (states, *around, targets)))


def start_states(shape, weights, states, embeddings):
    """Return the head's inputs to its prediction, for some documents, before the output norm's weights."""
    parameters = {name: torch.tensor(value) for name, value in weights.items()}
    (found,) = network.draft_states(parameters, shape, torch.tensor(states), torch.tensor(embeddings), 1)
    return found.numpy() / weights["output_norm.weight"]


def linear_parts(samples, weights):
    """The fused states, what the values read, and the matrix of the values."""
    fused = rms(samples.states) * weights["enc.output_norm.weight"] @ weights["fc.weight"].T
    change = weights["blk.0.attn_output.weight"] @ weights["blk.0.attn_v.weight"]
    return fused, np.hstack([rms(samples.embeddings), rms(fused)]), change


def two_documents(samples):
    """States and embeddings of documents that have no token twice."""
    return [each[:N_VOCAB].reshape(2, N_VOCAB // 2, -1) for each in (samples.states, samples.embeddings)]


@pytest.mark.parametrize("n_head", [3, 1], ids=["wider", "narrower"])
def test_the_start_is_the_linear_prediction_that_it_claims(samples, n_head):
    shape = HeadShape(n_embd=WIDTH, n_head=n_head, head_dim=HEAD_DIM, n_ff=32)
    norm = np.random.default_rng(2).uniform(0.5, 2, WIDTH).astype(np.float32)
    weights = initial_weights(shape, samples, norm)
    assert {name: value.shape for name, value in weights.items()} == tensor_shapes(shape)
    assert all(value.dtype == np.float32 for value in weights.values())
    # Every channel has the same variance, but the constant one is not blown up.
    norms = weights["enc.output_norm.weight"]
    assert np.median((rms(samples.states) * norms).std(0)) == pytest.approx(1, rel=0.1)
    assert norms[5] == norms.max() <= 25 * np.median(norms)
    # What is claimed: fc estimates the state before, the values are the rest.
    fused, features, change = linear_parts(samples, weights)
    linear = fused + features @ change.T
    if n_head >= 2:
        target = rms(samples.targets)
        error = np.mean((linear - target) ** 2) / np.var(target)
        best = np.linalg.lstsq(np.hstack([features, fused]), target, rcond=None)[0]
        assert error < 1.2 * np.mean((np.hstack([features, fused]) @ best - target) ** 2) / np.var(target)
        assert error < 0.2
    else:  # of the rank of the only head
        assert np.linalg.matrix_rank(change, 1e-4) == HEAD_DIM
    # What it computes: all positions of a document see only their own token.
    np.testing.assert_allclose(weights["output_norm.weight"], 0.7 * norm, rtol=1e-6)
    found = start_states(shape, weights, *two_documents(samples))
    error = (found.reshape(N_VOCAB, -1) - rms(linear[:N_VOCAB])).reshape(2, N_VOCAB // 2, -1)[:, 1:]
    assert np.mean(error**2) < 0.03


def test_induction_heads_predict_what_followed_before():
    """Of the next token, which is in the state, only text that repeats tells anything."""
    rng = np.random.default_rng(0)
    vocabulary = rng.normal(size=(N_VOCAB, WIDTH)).astype(np.float32)
    halves = [rng.permutation(N_VOCAB) for _ in range(40)]
    tokens = np.concatenate([[*half, *half] for half in halves])
    before, after = np.roll(tokens, 1), np.roll(tokens, -1)
    sees, predicts = (rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * WIDTH**-0.5 for _ in range(2))
    highest = vocabulary[tokens] @ sees + vocabulary[after] @ predicts
    targets = highest + 0.1 * rng.normal(size=highest.shape).astype(np.float32)
    states = np.roll(np.hstack([0.1 * targets, 0.1 * targets, targets]), 1, axis=0)
    samples = Samples(states, vocabulary[before], vocabulary[tokens], vocabulary[after], targets)
    errors = []
    for n_head in (3, 4):  # without and with an induction head
        shape = HeadShape(n_embd=WIDTH, n_head=n_head, head_dim=HEAD_DIM, n_ff=32)
        weights = initial_weights(shape, samples, np.ones(WIDTH, np.float32))
        documents = (each.reshape(len(halves), 2 * N_VOCAB, WIDTH) for each in (vocabulary[tokens], targets))
        embeddings, wanted = documents
        found = start_states(shape, weights, states.reshape(len(halves), 2 * N_VOCAB, -1), embeddings)
        error = np.mean((found - rms(wanted)) ** 2, axis=(0, 2))
        errors.append((error[1:N_VOCAB].mean(), error[N_VOCAB:-1].mean()))
    (first, again), (first_with, again_with) = errors
    assert again > 0.9 * first  # no other part copies
    assert again_with < 0.75 * again
    assert first_with < 1.2 * first


@pytest.mark.parametrize("n_ff", [32, 48], ids=["fewer neurons", "more neurons"])
def test_the_feed_forward_part_has_the_main_models_neurons(samples, n_ff):
    """Of 40 neurons, 10 never contribute, because their columns are zero."""
    rng = np.random.default_rng(3)
    gate, up = rng.normal(size=(2, 40, WIDTH)).astype(np.float32) * WIDTH**-0.5
    down = rng.normal(size=(WIDTH, 40)).astype(np.float32)
    down[:, rng.permutation(40)[:10]] = 0
    source = FeedForward(rng.uniform(0.5, 2, WIDTH).astype(np.float32), gate, up, down)
    shape = HeadShape(n_embd=WIDTH, n_head=2, head_dim=HEAD_DIM, n_ff=n_ff)
    norm = np.ones(WIDTH, np.float32)
    plain, copied = (initial_weights(shape, samples, norm, part) for part in (None, source))
    linear, found = (start_states(shape, each, *two_documents(samples)) for each in (plain, copied))
    inputs = linear * source.norm
    activations = inputs @ gate.T
    activations = activations / (1 + np.exp(-activations)) * (inputs @ up.T)
    # The head works on states of about unit size, the main model on its own.
    size = np.median(np.sqrt(np.mean(samples.targets**2, axis=1)))
    fused, features, change = linear_parts(samples, plain)
    prediction = (fused + features @ change.T)[:N_VOCAB].reshape(linear.shape)
    with_size = np.sqrt(np.mean(prediction**2, axis=-1, keepdims=True))
    expected = rms(linear * with_size + activations @ down.T / size)
    assert np.mean((found - expected)[:, 1:] ** 2) < 0.01
    assert np.mean((found - linear)[:, 1:] ** 2) > 0.1


def test_the_same_seed_gives_the_same_weights(samples):
    shape, norm = HeadShape(WIDTH, 2, HEAD_DIM, 32), np.ones(WIDTH, np.float32)
    one, again, other = (initial_weights(shape, samples, norm, seed=seed) for seed in (1, 1, 2))
    assert all((one[name] == again[name]).all() for name in one)
    assert (one["blk.0.attn_q.weight"] != other["blk.0.attn_q.weight"]).any()
    assert not one["blk.0.ffn_down.weight"].any()
