"""The forward pass of a head, and the loss with its chunked gradient; see also tests/llama."""

import pytest
import torch

from spec_local.training import loss as losses
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


def test_the_chunked_loss_and_gradient_match_full_logits(loss_inputs, monkeypatch):
    monkeypatch.setattr(losses, "_ROWS", 3)
    states, output, ids, weights = loss_inputs
    logs = torch.log_softmax(states @ output.T, -1)
    plain = -(weights * logs.gather(1, ids)).sum()
    (expected,) = torch.autograd.grad(2 * plain, states)
    loss = cross_entropy(states, output, ids, weights)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    (found,) = torch.autograd.grad(2 * loss, states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_bfloat16_gradient_has_the_same_direction(loss_inputs):
    states, output, ids, weights = loss_inputs
    (exact,) = torch.autograd.grad(cross_entropy(states, output, ids, weights), states)
    rough_loss = cross_entropy(states.bfloat16(), output.bfloat16(), ids, weights)
    assert rough_loss.dtype == torch.float32
    (rough,) = torch.autograd.grad(rough_loss, states)
    assert torch.cosine_similarity(rough.flatten(), exact.flatten(), 0) > 0.999


def test_a_draft_token_depends_on_nothing_after_it(parameters):
    """The k-th one reads the states up to k positions before it, and the embeddings up to its own."""
    states, embeddings = texts(1, 12)
    before = [each[0] for each in network.draft_states(parameters, SHAPE, states, embeddings, 3)]
    for what in (states, embeddings):
        other = what.clone()
        other[0, 6] = 1
        changed = (other, embeddings) if what is states else (states, other)
        after = network.draft_states(parameters, SHAPE, *changed, 3)
        for depth, (a, b) in enumerate(zip(before, after, strict=True)):
            first = 6 + depth if what is states else 6
            assert torch.equal(a[:first], b[0, :first])
            assert ((a - b[0])[first:].abs().amax(1) > 1e-4).all()


def test_draft_tokens_read_their_predecessors_output(parameters):
    """Without attention, the second is the first one with the output before the norm in place of states."""
    shape = HeadShape(n_embd=32, n_head=4, head_dim=8, n_ff=48, eps=0.0)
    parameters["blk.0.attn_output.weight"].zero_()
    states, embeddings = texts(1, 9)
    first, second = network.draft_states(parameters, shape, states, embeddings, 2)
    normed = network._norm(states, parameters["enc.output_norm.weight"], 0.0)
    fused = torch.nn.functional.linear(normed, parameters["fc.weight"])
    assert not torch.allclose(first[:, 2:], second[:, 2:], atol=0.1)

    def feed_forward(x):
        y = network._norm(x, parameters["blk.0.ffn_norm.weight"], 0.0)
        gate, up, down = (parameters[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T

    once, twice = feed_forward(fused), feed_forward(feed_forward(fused))
    norm = parameters["output_norm.weight"]
    torch.testing.assert_close(first, network._norm(once, norm, 0.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[:, 1:], network._norm(twice, norm, 0.0)[:, :-1], rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(parameters):
    states, embeddings = texts(2, 8)
    both = network.draft_states(parameters, SHAPE, states, embeddings, 3)
    alone = network.draft_states(parameters, SHAPE, states[:1, :5], embeddings[:1, :5], 3)
    for a, b in zip(both, alone, strict=True):
        torch.testing.assert_close(a[0, :5], b[0])


def test_bfloat16_states_are_close_to_float32(parameters):
    states, embeddings = texts(1, 20)
    exact = network.draft_states(parameters, SHAPE, states, embeddings, 3)
    rough = network.draft_states(parameters, SHAPE, states.bfloat16(), embeddings.bfloat16(), 3)
    for a, b in zip(exact, rough, strict=True):
        assert b.dtype == torch.bfloat16
        assert (a - b).abs().mean() < 0.03


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
