"""Llama's forward pass in PyTorch, as llama.cpp computes it from the same weights.

Weights go by their names in GGUF files and stay in float32; the arithmetic may be done in bfloat16, which machines that
have it do about four times as fast. Only what a draft has is here: attention of grouped heads, SwiGLU, norms by the root
mean square, and one matrix for the embeddings and the output.
"""

import platform
from collections.abc import Mapping

import torch

from spec_local.training.model_shape import EMBEDDINGS, ModelShape

Parameters = Mapping[str, torch.Tensor]


def fast_dtype(device: str) -> torch.dtype:
    """What matrices are best multiplied in there: bfloat16, where the processor has instructions for it."""
    if device == "cpu":
        # Without them bfloat16 is emulated, several times slower than float32. Of ARM, PyTorch says nothing.
        has = platform.machine() in ("x86_64", "AMD64") and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if has else torch.float32
    return torch.bfloat16 if device.startswith("cuda") and torch.cuda.is_bf16_supported() else torch.float32


def states(
    parameters: Parameters, shape: ModelShape, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What the network thinks after each token: multiplied by the embeddings, the logits of the next one.

    Args:
        parameters: by GGUF names, as `measures` has them, float32.
        tokens: int64 (batch, length); what stands right of a text is not seen by it.
        dtype: of the arithmetic.

    Returns:
        `dtype` (batch, length, n_embd), after the last norm.
    """
    length, half = tokens.shape[1], shape.head_dim // 2
    frequencies = shape.rope_base ** (-torch.arange(half, device=tokens.device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=tokens.device)[:, None] * frequencies
    turn = (angles.cos().to(dtype), angles.sin().to(dtype))
    later = torch.full((length, length), -torch.inf, dtype=dtype, device=tokens.device).triu(1)
    x = torch.nn.functional.embedding(tokens, parameters[EMBEDDINGS]).to(dtype)
    for layer in range(shape.n_layers):
        own = {
            name.split(".", 2)[2]: value.to(dtype)
            for name, value in parameters.items()
            if name.startswith(f"blk.{layer}.")
        }
        x = x + _attention(own, shape, _norm(x, own["attn_norm.weight"], shape.eps), turn, later)
        y = _norm(x, own["ffn_norm.weight"], shape.eps)
        gate, up = _times(y, own, "ffn_gate"), _times(y, own, "ffn_up")
        x = x + _times(torch.nn.functional.silu(gate) * up, own, "ffn_down")
    return _norm(x, parameters["output_norm.weight"].to(dtype), shape.eps)


def _attention(
    own: Parameters,
    shape: ModelShape,
    x: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    later: torch.Tensor,
) -> torch.Tensor:
    """Products of matrices, and no fused kernel: PyTorch's takes half as long again on CPUs, for texts of some 100 tokens."""
    batch, length, _ = x.shape
    group = shape.n_head // shape.n_head_kv  # of heads that share keys and values
    q = _turned(_times(x, _apart(own, "attn_q", shape), "attn_q"), shape.n_head, turn)
    k = _turned(_times(x, _apart(own, "attn_k", shape), "attn_k"), shape.n_head_kv, turn)
    v = _times(x, own, "attn_v").view(batch, length, shape.n_head_kv, shape.head_dim).transpose(1, 2)
    q = (q * shape.head_dim**-0.5).reshape(batch, shape.n_head_kv, group * length, shape.head_dim)
    scores = (q @ k.transpose(-1, -2)).view(batch, shape.n_head_kv, group, length, length) + later
    mixed = torch.softmax(scores, -1).view(batch, shape.n_head_kv, group * length, length) @ v
    mixed = mixed.view(batch, shape.n_head, length, shape.head_dim).transpose(1, 2)
    return _times(mixed.reshape(batch, length, -1), own, "attn_output")


def _apart(own: Parameters, name: str, shape: ModelShape) -> Parameters:
    """The rows of a head in another order: the first ones of all pairs, then the second ones.

    llama.cpp turns neighbours, which are slow to take apart in every activation; of queries and keys in the same other
    order the products are the same.
    """
    return {
        f"{name}.{part}": own[f"{name}.{part}"]
        .unflatten(0, (-1, shape.head_dim // 2, 2))
        .transpose(1, 2)
        .flatten(0, 2)
        for part in ("weight", "bias")
        if f"{name}.{part}" in own
    }


def _turned(x: torch.Tensor, n_head: int, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(batch, n_head, length, head_dim), turned by the places (Su et al. 2021, "RoFormer", section 3.2)."""
    a, b = x.unflatten(-1, (n_head, -1)).transpose(1, 2).chunk(2, -1)
    cos, sin = turn
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """By the root mean square, which is summed in float32 (Zhang and Sennrich 2019)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * (length.square() / x.shape[-1] + eps).rsqrt().to(x.dtype) * weight


def _times(x: torch.Tensor, own: Parameters, name: str) -> torch.Tensor:
    return torch.nn.functional.linear(x, own[f"{name}.weight"], own.get(f"{name}.bias"))
