"""Cross-entropy against the main model's top candidates, without storing the logits of all positions.

The output matrix, whose rows are the main model's, is not trained. Logits are computed for about a thousand
positions at a time and replaced in place by their gradient.
"""

from typing import Any

import torch

_AT_A_TIME = 1024
"""Number of positions: 25 MB of bfloat16 logits."""


def cross_entropy(
    states: torch.Tensor,
    output: torch.Tensor,
    target_ids: torch.Tensor,
    target_weights: torch.Tensor,
    at_a_time: int = _AT_A_TIME,
) -> torch.Tensor:
    """Sum −weight · ln q(id) over all positions and candidates: KL(p ‖ q), up to a constant.

    Args:
        states: (n, n_embd), in the dtype used for the arithmetic.
        output: (n_drafted, n_embd), in the same dtype.
        target_ids: int64 (n, k), candidates of each position; an id may occur twice.
        target_weights: float32 (n, k), p of each candidate times the weight of its position.
        at_a_time: number of positions whose logits are in memory.

    Returns:
        A float32 scalar, differentiable once, with respect to `states`.
    """
    loss: torch.Tensor = _CrossEntropy.apply(states, output, target_ids, target_weights, at_a_time)
    return loss


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        matrix: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        at_a_time: int,
    ) -> torch.Tensor:
        loss = torch.zeros((), device=states.device)
        grad_states = torch.empty_like(states)
        for start in range(0, len(states), at_a_time):
            rows = slice(start, start + at_a_time)
            q = torch.softmax(states[rows] @ matrix.T, -1)
            probs = q.gather(1, ids[rows]).float()
            loss -= (weights[rows] * probs.clamp_min(1e-30).log()).sum()
            grad = q.mul_(weights[rows].sum(1, keepdim=True).to(q.dtype))
            flat = torch.arange(len(q), device=q.device)[:, None] * q.shape[1] + ids[rows]
            # Flattened: along a dimension, bfloat16 index_add_ takes a tenth of a whole step on CPUs.
            grad.view(-1).index_add_(0, flat.flatten(), -weights[rows].to(q.dtype).flatten())
            grad_states[rows] = grad @ matrix
        ctx.save_for_backward(grad_states)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad_states,) = ctx.saved_tensors
        return grad_states * grad.to(grad_states.dtype), None, None, None, None
