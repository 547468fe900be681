"""The forward pass, the loss with its chunked gradient, and bfloat16."""

import numpy as np
import pytest
import torch

from spec_local.training import loss as losses
from spec_local.training import network
from spec_local.training.initial_weights import random_weights
from spec_local.training.loss import cross_entropy
from spec_local.training.model_shape import ModelShape, tensor_shapes

SHAPE = ModelShape(n_vocab=50, n_embd=32, n_layers=2, n_head=4, n_head_kv=2, head_dim=8, n_ff=48)


@pytest.fixture
def parameters():
    return {name: torch.tensor(value) for name, value in random_weights(SHAPE, 1).items()}


@pytest.fixture
def loss_inputs():
    """States, embeddings, ids and weights; one position has a candidate twice, and one has none."""
    rng = torch.Generator().manual_seed(0)
    states, embeddings = torch.randn(7, 16, generator=rng), torch.randn(30, 16, generator=rng)
    ids, weights = torch.randint(0, 30, (7, 5), generator=rng), torch.rand(7, 5, generator=rng)
    ids[2, 3] = ids[2, 1]
    weights[4] = 0
    return states.requires_grad_(), embeddings.requires_grad_(), ids, weights


def test_the_chunked_loss_and_gradient_match_full_logits(loss_inputs, monkeypatch):
    monkeypatch.setattr(losses, "_ROWS", 3)
    states, embeddings, ids, weights = loss_inputs
    logs = torch.log_softmax(states @ embeddings.T, -1)
    plain = -(weights * logs.gather(1, ids)).sum()
    expected = torch.autograd.grad(2 * plain, (states, embeddings))
    found = cross_entropy(states, embeddings, ids, weights)
    assert found.item() == pytest.approx(plain.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(2 * found, (states, embeddings)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_bfloat16_gradient_has_the_same_direction(loss_inputs):
    states, embeddings, ids, weights = loss_inputs
    exact = torch.autograd.grad(cross_entropy(states, embeddings, ids, weights), (states, embeddings))
    rough = cross_entropy(states.bfloat16(), embeddings, ids, weights)
    for one, other in zip(torch.autograd.grad(rough, (states, embeddings)), exact, strict=True):
        assert one.dtype == torch.float32
        assert torch.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.999


def test_attention_is_causal(parameters):
    one = torch.arange(12)[None] % 50
    other = one.clone()
    other[0, 7] = 40
    a, b = (network.hidden_states(parameters, SHAPE, tokens)[0] for tokens in (one, other))
    assert torch.equal(a[:7], b[:7])
    assert ((a - b)[7:].abs().amax(1) > 1e-3).all()


def test_padding_changes_nothing(parameters):
    tokens = torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    both = network.hidden_states(parameters, SHAPE, tokens)
    alone = network.hidden_states(parameters, SHAPE, tokens[:1, :3])
    torch.testing.assert_close(both[0, :3], alone[0])


def test_bfloat16_states_are_close_to_float32(parameters):
    tokens = torch.arange(20)[None] % 50
    exact, rough = (
        network.hidden_states(parameters, SHAPE, tokens, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert rough.dtype == torch.bfloat16
    assert (exact - rough).abs().mean() < 0.02


def test_random_weights_are_complete_and_reproducible():
    weights = random_weights(SHAPE, 3)
    assert {name: value.shape for name, value in weights.items()} == tensor_shapes(SHAPE)
    assert all(value.dtype == np.float32 for value in weights.values())
    again, other = random_weights(SHAPE, 3), random_weights(SHAPE, 4)
    assert all((weights[name] == again[name]).all() for name in weights)
    assert (weights["token_embd.weight"] != other["token_embd.weight"]).any()
