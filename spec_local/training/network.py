"""The draft model's forward pass in PyTorch, equal to what llama.cpp computes from the same weights.

It covers what a draft model has: grouped-query attention, SwiGLU, RMS norms and tied embeddings. Weights stay
in float32; the arithmetic may be bfloat16, about four times as fast where the hardware supports it.
"""

import platform
from collections.abc import Mapping

import torch

from spec_local.training.model_shape import EMBEDDINGS, ModelShape

Parameters = Mapping[str, torch.Tensor]


def fast_dtype(device: str) -> torch.dtype:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device == "cpu":
        # Emulated bfloat16 is several times slower than float32. PyTorch has no such check for ARM.
        native = platform.machine() in ("x86_64", "AMD64") and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if device.startswith("cuda") and torch.cuda.is_bf16_supported() else torch.float32


def hidden_states(
    parameters: Parameters, shape: ModelShape, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute the final hidden states; their product with the transposed embeddings gives the logits.

    Args:
        parameters: float32, by GGUF name.
        tokens: int64 (batch, length), padded on the right.
        dtype: dtype of the arithmetic.

    Returns:
        `dtype` (batch, length, n_embd), after the output norm.
    """
    length, half = tokens.shape[1], shape.head_dim // 2
    frequencies = shape.rope_base ** (-torch.arange(half, device=tokens.device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=tokens.device)[:, None] * frequencies
    rope = (angles.cos().to(dtype), angles.sin().to(dtype))
    mask = torch.full((length, length), -torch.inf, dtype=dtype, device=tokens.device).triu(1)
    x = torch.nn.functional.embedding(tokens, parameters[EMBEDDINGS]).to(dtype)
    for i in range(shape.n_layers):
        prefix = f"blk.{i}."
        layer = {n.removeprefix(prefix): p.to(dtype) for n, p in parameters.items() if n.startswith(prefix)}
        x = x + _attention(layer, shape, _norm(x, layer["attn_norm.weight"], shape.eps), rope, mask)
        y = _norm(x, layer["ffn_norm.weight"], shape.eps)
        gate, up = _linear(y, layer, "ffn_gate"), _linear(y, layer, "ffn_up")
        x = x + _linear(torch.nn.functional.silu(gate) * up, layer, "ffn_down")
    return _norm(x, parameters["output_norm.weight"].to(dtype), shape.eps)


def _attention(
    layer: Parameters,
    shape: ModelShape,
    x: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """Compute causal attention with matrix products: PyTorch's CPU kernel is slower for some 100 tokens."""
    batch, length, _ = x.shape
    group = shape.n_head // shape.n_head_kv  # query heads that share keys and values
    q = _rotate(_linear(x, _split_pairs(layer, "attn_q", shape), "attn_q"), shape.n_head, rope)
    k = _rotate(_linear(x, _split_pairs(layer, "attn_k", shape), "attn_k"), shape.n_head_kv, rope)
    v = _linear(x, layer, "attn_v").view(batch, length, shape.n_head_kv, shape.head_dim).transpose(1, 2)
    q = (q * shape.head_dim**-0.5).reshape(batch, shape.n_head_kv, group * length, shape.head_dim)
    scores = (q @ k.transpose(-1, -2)).view(batch, shape.n_head_kv, group, length, length) + mask
    mixed = torch.softmax(scores, -1).view(batch, shape.n_head_kv, group * length, length) @ v
    mixed = mixed.view(batch, shape.n_head, length, shape.head_dim).transpose(1, 2)
    return _linear(mixed.reshape(batch, length, -1), layer, "attn_output")


def _split_pairs(layer: Parameters, name: str, shape: ModelShape) -> Parameters:
    """Reorder each head's rows: the first elements of all RoPE pairs, then the second ones.

    llama.cpp rotates neighbouring elements, and separating them in every activation is slow. As queries and
    keys are permuted in the same way, their products stay the same.
    """
    return {
        f"{name}.{part}": layer[f"{name}.{part}"]
        .unflatten(0, (-1, shape.head_dim // 2, 2))
        .transpose(1, 2)
        .flatten(0, 2)
        for part in ("weight", "bias")
        if f"{name}.{part}" in layer
    }


def _rotate(x: torch.Tensor, n_head: int, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply RoPE; (batch, n_head, length, head_dim) (Su et al. 2021, "RoFormer", section 3.2)."""
    a, b = x.unflatten(-1, (n_head, -1)).transpose(1, 2).chunk(2, -1)
    cos, sin = rope
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, summed in float32 (Zhang and Sennrich 2019)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * (length.square() / x.shape[-1] + eps).rsqrt().to(x.dtype) * weight


def _linear(x: torch.Tensor, layer: Parameters, name: str) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))
