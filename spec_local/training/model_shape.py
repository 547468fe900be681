"""The measures of a draft: all that llama's architecture leaves open, and what they make of its weights."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]
"""By the names that tensors have in GGUF files; matrices are (out, in)."""
EMBEDDINGS = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a transformer as llama.cpp's ``llama`` architecture has it, with the embeddings tied to the output.

    n_vocab, n_layers, n_ctx: counts. n_embd, n_ff: widths. n_head, n_head_kv: of attention; head_dim: width of a head, all
    of which is turned. rope_base: base of the positions' frequencies. eps: of the norms (RMS).
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


def measures(shape: ModelShape, biases: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and measures, as NumPy has them, of all weights; biases: queries, keys and values have some."""
    wide, narrow = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    found: dict[str, tuple[int, ...]] = {EMBEDDINGS: (shape.n_vocab, shape.n_embd)}
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        found[f"{block}attn_norm.weight"] = (shape.n_embd,)
        for name, rows in (("attn_q", wide), ("attn_k", narrow), ("attn_v", narrow)):
            found[f"{block}{name}.weight"] = (rows, shape.n_embd)
            if biases:
                found[f"{block}{name}.bias"] = (rows,)
        found[f"{block}attn_output.weight"] = (shape.n_embd, wide)
        found[f"{block}ffn_norm.weight"] = (shape.n_embd,)
        found[f"{block}ffn_gate.weight"] = found[f"{block}ffn_up.weight"] = (shape.n_ff, shape.n_embd)
        found[f"{block}ffn_down.weight"] = (shape.n_embd, shape.n_ff)
    return found | {"output_norm.weight": (shape.n_embd,)}
