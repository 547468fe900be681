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
    positions: torch.Tensor | None = None,
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
        positions: int64 (batch, n), consecutive positions of each row to predict at; the others are only
            attended to. None: all.

    Yields:
        (batch, n, n_embd), for each k: after the output norm; the product with the output matrix gives the
        logits. The k-th states of the first k − 1 of `positions` are meaningless, and so are those of the
        first k tokens of a text: they follow fewer than k tokens with states.
    """
    dtype = embeddings.dtype
    weights = {
        name.removesuffix(".weight").removeprefix("blk.0."): values.to(dtype)
        for name, values in parameters.items()
    }
    tokens = _norm(embeddings, weights["attn_norm"], shape.eps)
    fused = linear(_norm(states, weights["enc.output_norm"], shape.eps), weights["fc"])
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    all_inputs = torch.cat((tokens, _norm(fused, weights["attn_norm_2"], shape.eps)), -1)
    attention = _Attention(weights, shape, all_inputs, positions)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    tokens, fused = tokens[rows, positions], fused[rows, positions]
    for k in range(depth):
        x = torch.cat((tokens, _norm(fused, weights["attn_norm_2"], shape.eps)), -1)
        x = fused + linear(attention(x), weights["attn_output"])
        y = _norm(x, weights["ffn_norm"], shape.eps)
        inner = silu(linear(y, weights["ffn_gate"])) * linear(y, weights["ffn_up"])
        x = x + linear(inner, weights["ffn_down"])
        yield _norm(x, weights["output_norm"], shape.eps)
        if k + 1 < depth:
            fused = pad(x[:, :-1], (0, 0, 1, 0))  # the output for the token before


class _Attention:
    """Attention of successive draft tokens at some positions.

    Matrix products, because PyTorch's attention kernel for CPUs is slower for some hundred tokens.

    Args:
        inputs: (batch, length, 2 * n_embd), of all positions, with the main model's states.
        positions: see `draft_states`.
    """

    def __init__(
        self, weights: Parameters, shape: HeadShape, inputs: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self._shape, self._positions = shape, positions
        self._q, self._k = (_split_pairs(weights[name], shape) for name in ("attn_q", "attn_k"))
        self._v = weights["attn_v"]
        half, device, length = shape.head_dim // 2, inputs.device, inputs.shape[1]
        self._frequencies = shape.rope_base ** (
            -torch.arange(half, device=device, dtype=torch.float32) / half
        )
        self._all = torch.arange(length, device=device)
        self._all_keys = self._rotate(linear(inputs, self._k), self._all)
        self._all_values = self._heads(linear(inputs, self._v))
        self._latest: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of later draft tokens
        self._n_calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Attend from the next draft token; (batch, n, 2 * n_embd), inputs at the positions."""
        q = self._rotate(linear(x, self._q), self._positions) * self._shape.head_dim**-0.5
        if self._n_calls:
            self._latest.append(
                (self._rotate(linear(x, self._k), self._positions), self._heads(linear(x, self._v)))
            )
        scores = [q @ self._all_keys.transpose(-1, -2) + self._mask(q.dtype)]
        # The k-th draft token at i attends to the m-th one at i − (k − m).
        latest = [
            (_shifted(keys, self._n_calls - m), _shifted(values, self._n_calls - m))
            for m, (keys, values) in enumerate(self._latest, 1)
        ]
        self._n_calls += 1
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in latest]
        shares = torch.softmax(torch.cat(scores, -1) if latest else scores[0], -1)
        length = len(self._all)
        mixed = shares[..., :length] @ self._all_values
        for m, (_, values) in enumerate(latest):
            mixed = mixed + shares[..., length + m, None] * values
        return mixed.transpose(1, 2).flatten(2)

    def _mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(batch, 1, n, length): 0 for tokens that are seen with the main model's states, −∞ for others."""
        last = self._positions[:, None, :, None] - self._n_calls
        # No state precedes the first token, so decoding leaves it out.
        is_seen = (self._all <= last) & (self._all > 0)
        if not self._n_calls:  # the first token sees nothing else: a finite, unused result
            is_seen |= (last == 0) & (self._all == 0)
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
        return mask.masked_fill_(~is_seen, -torch.inf)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self._shape.n_head, -1)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Split into heads, and apply RoPE (Su et al. 2021, "RoFormer", section 3.2).

        Args:
            x: (batch, n, n_head * head_dim).
            positions: (n,), or (batch, n).

        Returns:
            (batch, n_head, n, head_dim).
        """
        angles = positions[..., None] * self._frequencies
        cos, sin = (each.to(x.dtype).view(-1, 1, *angles.shape[-2:]) for each in (angles.cos(), angles.sin()))
        a, b = self._heads(x).chunk(2, -1)
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
