"""The forward pass of a head, and the loss with its chunked gradient; see also tests/llama."""

import pytest
import torch

from spec_local.training import network
from spec_local.training.head_shape import HeadShape, tensor_shapes
from spec_local.training.loss import cross_entropy

SHAPE = HeadShape(n_embd=32, n_head=4, head_dim=8, n_ff=48)


@pytest.fixture
def parameters():
    rng = torch.Generator().manual_seed(1)
    return {
        name: torch.ones(size)
        if len(size) == 1
        else 2 * size[1] ** -0.5 * torch.randn(size, generator=rng, dtype=torch.float32)
        for name, size in tensor_shapes(SHAPE).items()
    }


def texts(n, length, seed=0):
    """States and embeddings."""
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, length, width, generator=rng) for width in (96, 32))


@pytest.fixture
def loss_inputs():
    """States, output rows, ids and weights; one position has a candidate twice, and one has none."""
    rng = torch.Generator().manual_seed(0)
    states, output = torch.randn(7, 16, generator=rng), torch.randn(30, 16, generator=rng)
    ids, weights = torch.randint(0, 30, (7, 5), generator=rng), torch.rand(7, 5, generator=rng)
    ids[2, 3] = ids[2, 1]
    weights[4] = 0
    return states.requires_grad_(), output, ids, weights


def test_the_chunked_loss_and_gradient_match_full_logits(loss_inputs):
    states, output, ids, weights = loss_inputs
    logs = torch.log_softmax(states @ output.T, -1)
    plain = -(weights * logs.gather(1, ids)).sum()
    (expected,) = torch.autograd.grad(2 * plain, states)
    loss = cross_entropy(states, output, ids, weights, at_a_time=3)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    (found,) = torch.autograd.grad(2 * loss, states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing(parameters):
    states, embeddings = texts(2, 8)
    both = network.draft_states(parameters, SHAPE, states, embeddings, 3)
    alone = network.draft_states(parameters, SHAPE, states[:1, :5], embeddings[:1, :5], 3)
    for a, b in zip(both, alone, strict=True):
        torch.testing.assert_close(a[0, :5], b[0])


def test_gradients_are_finite_for_every_weight(parameters):
    """Masked and meaningless positions included."""
    for value in parameters.values():
        value.requires_grad_()
    states, embeddings = texts(2, 6)
    states[:, 0] = 0
    torch.stack(
        [each.sum() for each in network.draft_states(parameters, SHAPE, states, embeddings, 3)]
    ).sum().backward()
    assert all(value.grad.isfinite().all() and value.grad.any() for value in parameters.values())


def test_windows_give_the_same_as_all_positions(parameters):
    states, embeddings = texts(2, 20)
    windows = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
    whole = network.draft_states(parameters, SHAPE, states, embeddings, 3)
    some = network.draft_states(parameters, SHAPE, states, embeddings, 3, windows)
    for k, (one, other) in enumerate(zip(whole, some, strict=True)):
        expected = one[torch.arange(2)[:, None], windows]
        torch.testing.assert_close(other[:, k:], expected[:, k:], rtol=1e-5, atol=1e-5)
