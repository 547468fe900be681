"""Size of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), its tensors, and the layers that it reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import ModelError

Weights = dict[str, NDArray[np.float32]]
"""Tensors by their GGUF names; matrices are (out, in)."""
N_LAYERS_READ = 3
"""Number of the main model's layers whose outputs a head reads: llama.cpp accepts no other."""

_HEAD_DIM = 64
_FF_WIDTH = 2.5  # of the feed-forward part, over the width of the main model


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Size of a head with one layer.

    n_embd: width of the main model. n_head, head_dim: number and width of the attention heads, which share no
    keys. n_ff: width of the feed-forward part. rope_base: base of the RoPE frequencies. eps: of the RMS
    norms.
    """

    n_embd: int
    n_head: int
    head_dim: int
    n_ff: int
    rope_base: float = 1e6
    eps: float = 1e-5


def tensor_shapes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Return the NumPy shapes of all trained tensors by name.

    The token embeddings are the main model's, and the output matrix consists of rows of its own.
    """
    width, inner = shape.n_embd, shape.n_head * shape.head_dim
    return {
        "enc.output_norm.weight": (N_LAYERS_READ * width,),  # of the states, before they are fused
        "fc.weight": (width, N_LAYERS_READ * width),
        "blk.0.attn_norm.weight": (width,),  # of the token embeddings
        "blk.0.attn_norm_2.weight": (width,),  # of the fused states, or of the head's own output
        "blk.0.attn_q.weight": (inner, 2 * width),
        "blk.0.attn_k.weight": (inner, 2 * width),
        "blk.0.attn_v.weight": (inner, 2 * width),
        "blk.0.attn_output.weight": (width, inner),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate.weight": (shape.n_ff, width),
        "blk.0.ffn_up.weight": (shape.n_ff, width),
        "blk.0.ffn_down.weight": (width, shape.n_ff),
        "output_norm.weight": (width,),
    }


def head_shape(width: int) -> HeadShape:
    """Return the size of a head for a main model of this width."""
    n_head = max(1, width // _HEAD_DIM)
    n_ff = round(_FF_WIDTH * width / 64) * 64
    return HeadShape(n_embd=width, n_head=n_head, head_dim=_HEAD_DIM, n_ff=n_ff)


def layers_read(n_layers: int) -> tuple[int, int, int]:
    """Return the layers whose outputs a head reads: in the middle, at four fifths, and the last but one.

    The last but one contributes most: with the third but last, as in the paper, the first draft token was
    accepted a tenth less often. The output of the last layer is not computed for all tokens.

    Raises:
        ModelError: there are too few layers.
    """
    layers = n_layers // 2 - 1, min(4 * n_layers // 5, n_layers - 3), n_layers - 2
    if n_layers < 5:
        raise ModelError(f"a model with {n_layers} layers has too few for a head: at least 5 are needed")
    return layers
