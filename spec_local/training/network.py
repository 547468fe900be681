"""An EAGLE-3 head's forward pass in PyTorch, equal to what llama.cpp computes from the same weights.

Weights stay in float32; the arithmetic may be bfloat16, about four times as fast where the hardware supports
it.
"""

import platform
from collections.abc import Iterator, Mapping

import torch
from torch.nn.functional import linear, pad, silu

from spec_local.training.head_shape import HeadShape

Parameters = Mapping[str, torch.Tensor]


def fast_dtype(device: str) -> torch.dtype:
    """Return bfloat16 where the device multiplies it natively, else float32."""
    if device == "cpu":
        # Emulated bfloat16 is several times slower than float32. PyTorch has no such check for ARM.
        native = platform.machine() in ("x86_64", "AMD64") and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if device.startswith("cuda") and torch.cuda.is_bf16_supported() else torch.float32


def draft_states(
    parameters: Parameters,
    shape: HeadShape,
    states: torch.Tensor,
    embeddings: torch.Tensor,
    depth: int,
) -> Iterator[torch.Tensor]:
    """Compute the states from which a head predicts the next token, as first, second, … draft token.

    The k-th draft token is predicted as in decoding ("training-time test", section 3.2 of the paper):
    position i reads its own token and the head's output for the token before it. It attends to what the head
    computed in the same way for the k − 1 latest tokens, and with the main model's states for the others.

    Args:
        parameters: by GGUF name.
        states: (batch, length, 3 * n_embd), the main model's states of the token *before* each position, in
            the dtype of the arithmetic.
        embeddings: (batch, length, n_embd), the main model's embedding of the token at each position.
        depth: number of draft tokens, k.

    Yields:
        (batch, length, n_embd), for each k: after the output norm; the product with the output matrix gives
        the logits. The first k positions are meaningless: they follow fewer than k tokens with states.
    """
    dtype = embeddings.dtype
    weights = {
        name.removesuffix(".weight").removeprefix("blk.0."): p.to(dtype) for name, p in parameters.items()
    }
    attention = _Attention(weights, shape, embeddings.shape[1], dtype)
    tokens = _norm(embeddings, weights["attn_norm"], shape.eps)
    fused = linear(_norm(states, weights["enc.output_norm"], shape.eps), weights["fc"])
    for k in range(depth):
        x = torch.cat((tokens, _norm(fused, weights["attn_norm_2"], shape.eps)), -1)
        x = fused + linear(attention(x), weights["attn_output"])
        y = _norm(x, weights["ffn_norm"], shape.eps)
        x = x + linear(
            silu(linear(y, weights["ffn_gate"])) * linear(y, weights["ffn_up"]), weights["ffn_down"]
        )
        yield _norm(x, weights["output_norm"], shape.eps)
        if k + 1 < depth:
            fused = pad(x[:, :-1], (0, 0, 1, 0))  # the output for the token before


class _Attention:
    """Attention of successive draft tokens.

    Matrix products, because PyTorch's attention kernel for CPUs is slower for some hundred tokens.
    """

    def __init__(self, weights: Parameters, shape: HeadShape, length: int, dtype: torch.dtype) -> None:
        self._shape, self._length = shape, length
        self._q, self._k = (_split_pairs(weights[name], shape) for name in ("attn_q", "attn_k"))
        self._v = weights["attn_v"]
        half, device = shape.head_dim // 2, self._v.device
        frequencies = shape.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.arange(length, device=device)[:, None] * frequencies
        self._rope = angles.cos().to(dtype), angles.sin().to(dtype)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Attend from the next draft token at every position; (batch, length, 2 * n_embd)."""
        length, n_before = self._length, len(self._keys)
        q = self._rotate(self._heads(linear(x, self._q))) * self._shape.head_dim**-0.5
        self._keys.append(self._rotate(self._heads(linear(x, self._k))))
        self._values.append(self._heads(linear(x, self._v)))
        mask = torch.full((length, length), -torch.inf, dtype=q.dtype, device=q.device).triu(1 - n_before)
        mask[:, 0] = -torch.inf  # no state precedes the first token, so decoding leaves it out
        if not n_before:
            mask[0, 0] = 0  # it sees nothing else: a finite, unused result
        scores = [q @ self._keys[0].transpose(-1, -2) + mask]
        # The k-th draft token at i attends to the m-th one at i − (k − m).
        latest = [
            (_shifted(keys, n_before - m), _shifted(values, n_before - m))
            for m, (keys, values) in enumerate(zip(self._keys, self._values, strict=True))
            if m
        ]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in latest]
        shares = torch.softmax(torch.cat(scores, -1) if latest else scores[0], -1)
        mixed = shares[..., :length] @ self._values[0]
        for m, (_, values) in enumerate(latest):
            mixed = mixed + shares[..., length + m, None] * values
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self._shape.n_head, -1)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply RoPE; (batch, n_head, length, head_dim) (Su et al. 2021, "RoFormer", section 3.2)."""
        a, b = x.chunk(2, -1)
        cos, sin = self._rope
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    """Move a tensor (batch, n_head, length, head_dim) by n positions towards the end."""
    return pad(x[:, :, : x.shape[2] - n], (0, 0, n, 0)) if n else x


def _split_pairs(matrix: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """Reorder each head's rows: the first elements of all RoPE pairs, then the second ones.

    llama.cpp rotates neighbouring elements, and separating them in every activation is slow. As queries and
    keys are permuted in the same way, their products stay the same.
    """
    return matrix.unflatten(0, (-1, shape.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, summed in float32 (Zhang and Sennrich 2019)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * (length.square() / x.shape[-1] + eps).rsqrt().to(x.dtype) * weight
