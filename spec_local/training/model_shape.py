"""Hyperparameters of a draft model in llama.cpp's ``llama`` architecture, and the shapes of its tensors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]
"""Tensors by their GGUF names; matrices are (out, in)."""
EMBEDDINGS = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a ``llama`` transformer whose output matrix is tied to its embeddings.

    n_embd, n_ff: widths. head_dim: width of a head, all of which is rotated. rope_base: base of the RoPE
    frequencies. eps: epsilon of the RMS norms.
    """

    n_vocab: int
    n_embd: int
    n_layers: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rope_base: float = 10000.0
    eps: float = 1e-5
    n_ctx: int = 2048


def tensor_shapes(shape: ModelShape, biases: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the NumPy shapes of all tensors by name; biases: include biases of queries, keys and values."""
    q_rows, kv_rows = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDINGS: (shape.n_vocab, shape.n_embd)}
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        shapes[f"{block}attn_norm.weight"] = (shape.n_embd,)
        for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
            shapes[f"{block}{name}.weight"] = (rows, shape.n_embd)
            if biases:
                shapes[f"{block}{name}.bias"] = (rows,)
        shapes[f"{block}attn_output.weight"] = (shape.n_embd, q_rows)
        shapes[f"{block}ffn_norm.weight"] = (shape.n_embd,)
        shapes[f"{block}ffn_gate.weight"] = shapes[f"{block}ffn_up.weight"] = (shape.n_ff, shape.n_embd)
        shapes[f"{block}ffn_down.weight"] = (shape.n_embd, shape.n_ff)
    return shapes | {"output_norm.weight": (shape.n_embd,)}
