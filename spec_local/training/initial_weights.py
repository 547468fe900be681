"""Initial weights of a head, from what the main model gives for nothing.

A head starts as the best linear prediction of the main model's state after a token, in the highest layer that
it reads, from that token and from the states before it (ridge regression), followed by the main model's
output norm and output rows. Training then adds what is not linear.

These parts make it linear: `fc` estimates the state after the previous token. The attention heads find the
position's own token, because queries and keys are the same random projection of the token embeddings, so that
only equal tokens match; their values are the rest of the prediction, the change from one state to the next.
The feed-forward part starts at zero.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.training.head_shape import HeadShape, Weights, tensor_shapes

_RIDGE = 1e-3  # regularization, as a share of the features' mean square
_MAX_SCALE = 20.0  # of a channel, over the median: some channels are almost constant
_MATCH = 2.0  # scale of the projections that find equal tokens; with less, other tokens dilute the match
_CONFIDENCE = 0.7  # scale of the logits: a linear prediction is less certain than the main model

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Positions of the main model's texts, for the regression.

    Attributes:
        states: float32 (n, 3 * n_embd), of the token before each position.
        embeddings: float32 (n, n_embd), of the token at each position.
        targets: float32 (n, n_embd), state of the highest layer, of the token at each position.
    """

    states: Array
    embeddings: Array
    targets: Array


def initial_weights(shape: HeadShape, samples: Samples, output_norm: Array, seed: int = 0) -> Weights:
    """Fit the linear start of a head.

    Args:
        samples: some ten times as many as there are channels.
        output_norm: float32 (n_embd,), weights of the main model's output norm.
    """
    width, inner = shape.n_embd, shape.n_head * shape.head_dim
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, size in tensor_shapes(shape).items():
        if len(size) == 1:
            weights[name] = np.ones(size, np.float32)
        else:
            weights[name] = rng.standard_normal(size, np.float32) * np.float32(size[1] ** -0.5)
    scale = 1 / np.maximum(samples.states.std(0), 1e-6)
    scale = np.minimum(scale, _MAX_SCALE * np.median(scale))
    rms = np.sqrt(np.mean(samples.states**2, axis=1)).mean()
    norm = (scale * rms).astype(np.float32)  # unit variance of each channel
    weights["enc.output_norm.weight"] = norm
    inputs: Array = _normalized(samples.states, shape.eps) * norm
    before, after = (_normalized(each, shape.eps) for each in (samples.states[:, -width:], samples.targets))
    fused_weights = _ridge(inputs, before)
    fused = inputs @ fused_weights.T
    features = np.hstack([_normalized(samples.embeddings, shape.eps), _normalized(fused, shape.eps)])
    values = _ridge(features, after - fused)
    weights["fc.weight"] = fused_weights
    if inner >= width:
        weights["blk.0.attn_v.weight"] = np.zeros((inner, 2 * width), np.float32)
        weights["blk.0.attn_v.weight"][:width] = values
        weights["blk.0.attn_output.weight"] = np.eye(width, inner, dtype=np.float32)
    else:  # the best approximation of this rank
        left, sizes, right = np.linalg.svd(values, full_matrices=False)
        root = np.sqrt(sizes[:inner])
        weights["blk.0.attn_output.weight"] = left[:, :inner] * root
        weights["blk.0.attn_v.weight"] = root[:, None] * right[:inner]
    match = rng.standard_normal((inner, width), np.float32) * np.float32(_MATCH * width**-0.5)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        weights[name][:, :width] = match
        weights[name][:, width:] *= 0.1
    weights["blk.0.ffn_down.weight"][:] = 0
    weights["output_norm.weight"] = (_CONFIDENCE * output_norm).astype(np.float32)
    return weights


def _ridge(features: Array, targets: Array) -> Array:
    """Return the matrix (targets, features) with the least regularized squared error."""
    square = features.T @ features
    regularization = _RIDGE * np.diagonal(square).mean() * np.eye(len(square), dtype=np.float32)
    solution: Array = np.linalg.solve(square + regularization, features.T @ targets)
    return np.ascontiguousarray(solution.T)


def _normalized(x: Array, eps: float) -> Array:
    """RMS norm without weights."""
    normalized: Array = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + np.float32(eps))
    return normalized
