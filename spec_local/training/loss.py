"""How far a draft's distribution is from what main had in mind, and the way down, without logits of all places at once.

With ten thousand tokens the logits are the dearest part of such a small model: they are made for some hundred places at a
time, and turned into their own gradient where they lie.
"""

from typing import Any

import torch

_ROWS = 1024
"""Places at a time: logits of 25 MB, in bfloat16."""


def cross_entropy(
    states: torch.Tensor, embeddings: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """The sum of −share · ln q(id) over all places and candidates; up to a constant, the divergence KL(p ‖ q).

    Args:
        states: (n, n_embd), in the dtype to reckon in.
        embeddings: float32 (n_vocab, n_embd).
        ids: int64 (n, k): candidates of each place; one may stand there twice.
        shares: float32 (n, k): p of each candidate, times the weight of the place; zero for none.

    Returns:
        float32, of no dimension; it can be differentiated by `states` and `embeddings`, once.
    """
    loss: torch.Tensor = _CrossEntropy.apply(states, embeddings, ids, shares)
    return loss


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, embeddings: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        matrix = embeddings.to(states.dtype)
        loss = torch.zeros((), device=states.device)
        by_state = torch.empty_like(states)
        by_matrix = torch.zeros_like(embeddings)
        for start in range(0, len(states), _ROWS):
            rows = slice(start, start + _ROWS)
            own, wanted = states[rows], shares[rows]
            q = torch.softmax(own @ matrix.T, -1)
            chances = q.gather(1, ids[rows]).float()
            loss -= (wanted * chances.clamp_min(1e-30).log()).sum()
            slope = q.mul_(wanted.sum(1, keepdim=True).to(q.dtype))
            flat = torch.arange(len(q), device=q.device)[:, None] * q.shape[1] + ids[rows]
            # Of bfloat16, adding along a dimension takes as long on CPUs as a tenth of all the step.
            slope.view(-1).index_add_(0, flat.flatten(), -wanted.to(q.dtype).flatten())
            by_state[rows] = slope @ matrix
            by_matrix += slope.T @ own
        ctx.save_for_backward(by_state, by_matrix)
        return loss

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        by_state, by_matrix = ctx.saved_tensors
        return by_state * slope.to(by_state.dtype), by_matrix * slope, None, None
