"""Initial weights of a head, from what the main model gives for nothing.

A head starts with the best linear prediction (ridge regression) of the main model's state after a token, in
the highest layer that it reads, from that token and from the states before it. What is not linear comes from
the main model and from what attention is known to learn; training improves all of it.

- `fc` estimates the state after the previous token.
- Most attention heads find the position's own token, because queries and keys are the same random projection
  of the token embeddings, so that only equal tokens match. Their values are the rest of the prediction, the
  change from one state to the next.
- The others are induction heads (Olsson et al. 2022, "In-context Learning and Induction Heads"): they find
  the tokens that followed earlier occurrences of the position's own token. Queries are projections of the
  token's embedding, keys those of the previous token's, estimated from its state; values say how the next
  token changes the state.
- The feed-forward part consists of the most active neurons of the main model's last layer, which is the one
  that the head has to replace.
- The output norm is the main model's.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.training.head_shape import HeadShape, Weights, tensor_shapes
from spec_local.training.main_weights import FeedForward

_RIDGE = 1e-3  # regularization, as a share of the features' mean square
_MAX_SCALE = 20.0  # of a channel, over the median: some channels are almost constant
_MATCH = 2.0  # scale of the projections that find equal tokens; with less, other tokens dilute the match
_CONFIDENCE = 0.7  # scale of the logits: a linear prediction is less certain than the main model
_HEADS_PER_INDUCTION_HEAD = 4
_INDUCTION_MATCH = 3.0  # as _MATCH: keys are estimated, and therefore shorter
_SLOW_SHARE = 3 / 8  # of the RoPE pairs: these hardly turn within some hundred tokens
_INDUCTION_GAIN = 0.5  # of the values: a token that followed before often does not follow again

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Positions of the main model's texts, for the regression.

    Attributes:
        states: float32 (n, 3 * n_embd), of the token before each position.
        embeddings_before, embeddings, embeddings_after: float32 (n, n_embd), of the token before each
            position, at it, and after it.
        targets: float32 (n, n_embd), state of the highest layer, of the token at each position.
    """

    states: Array
    embeddings_before: Array
    embeddings: Array
    embeddings_after: Array
    targets: Array


def initial_weights(
    shape: HeadShape,
    samples: Samples,
    output_norm: Array,
    feed_forward: FeedForward | None = None,
    seed: int = 0,
) -> Weights:
    """Fit the start of a head.

    Args:
        samples: some ten times as many as there are channels.
        output_norm: float32 (n_embd,), weights of the main model's output norm.
        feed_forward: that of the main model's last layer; None: this part starts at zero.
    """
    width = shape.n_embd
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, size in tensor_shapes(shape).items():
        if len(size) == 1:
            weights[name] = np.ones(size, np.float32)
        else:
            weights[name] = rng.standard_normal(size, np.float32) * np.float32(size[1] ** -0.5)
    norm = _input_norm(samples.states)
    weights["enc.output_norm.weight"] = norm
    inputs: Array = _normalized(samples.states, shape.eps) * norm
    before, after, own_before, own, own_after = (
        _normalized(each, shape.eps)
        for each in (
            samples.states[:, -width:],
            samples.targets,
            samples.embeddings_before,
            samples.embeddings,
            samples.embeddings_after,
        )
    )
    fused_weights = _ridge(inputs, before)
    weights["fc.weight"] = fused_weights
    fused = inputs @ fused_weights.T
    normalized = _normalized(fused, shape.eps)
    features = np.hstack([own, normalized])
    values = _ridge(features, after - fused)
    predicted = fused + features @ values.T

    n_induction = shape.n_head // _HEADS_PER_INDUCTION_HEAD
    attention = _Attention(shape, weights)
    own_token = slice(0, shape.n_head - n_induction)
    attention.set_values(own_token, values)
    attention.match_own_token(own_token, rng)
    if n_induction:
        induction = slice(own_token.stop, shape.n_head)
        attention.set_values(induction, _INDUCTION_GAIN * _ridge(own_after, after - predicted))
        attention.match_token_before(induction, _ridge(normalized, own_before), rng)
    weights["blk.0.ffn_down.weight"][:] = 0
    if feed_forward:
        rms = float(np.median(np.sqrt(np.mean(samples.targets**2, axis=1))))
        _copy_neurons(weights, feed_forward, _normalized(predicted, shape.eps), rms)
    weights["output_norm.weight"] = (_CONFIDENCE * output_norm).astype(np.float32)
    return weights


class _Attention:
    """Sets the weights of groups of attention heads, each a slice of their numbers."""

    def __init__(self, shape: HeadShape, weights: Weights) -> None:
        self._shape, self._dim = shape, shape.head_dim
        self._q, self._k, self._v, self._output = (
            weights[f"blk.0.attn_{name}.weight"] for name in ("q", "k", "v", "output")
        )

    def set_values(self, heads: slice, matrix: Array) -> None:
        """Make the heads compute a matrix of what they attend to, or its best approximation of their rank.

        matrix: float32 (n_embd, n_embd or 2 * n_embd), of the token embedding (and the fused state).
        """
        rows = self._rows(heads)
        left, sizes, right = np.linalg.svd(matrix, full_matrices=False)
        root = np.sqrt(sizes[: rows.stop - rows.start])
        n = len(root)
        self._v[rows], self._output[:, rows] = 0, 0
        self._v[rows][:n, : matrix.shape[1]] = root[:, None] * right[:n]
        self._output[:, rows][:, :n] = left[:, :n] * root

    def match_own_token(self, heads: slice, rng: np.random.Generator) -> None:
        """Make the heads attend to positions with the same token, above all to their own."""
        rows, width = self._rows(heads), self._shape.n_embd
        match = _projection(rows.stop - rows.start, width, _MATCH, rng)
        for matrix in (self._q, self._k):
            matrix[rows, :width] = match
            matrix[rows, width:] *= 0.1

    def match_token_before(self, heads: slice, estimate: Array, rng: np.random.Generator) -> None:
        """Make the heads attend to the positions after their own token's earlier occurrences.

        estimate: float32 (n_embd, n_embd), from the fused state to the embedding of its token.
        """
        width = self._shape.n_embd
        n = round(_SLOW_SHARE * self._dim / 2) * 2
        rows = self._rows(heads)
        self._q[rows], self._k[rows] = 0, 0
        for end in range(rows.start + self._dim, rows.stop + 1, self._dim):
            match = _projection(n, width, _INDUCTION_MATCH, rng)
            self._q[end - n : end, :width] = match
            self._k[end - n : end, width:] = match @ estimate

    def _rows(self, heads: slice) -> slice:
        return slice(heads.start * self._dim, heads.stop * self._dim)


def _copy_neurons(weights: Weights, source: FeedForward, states: Array, rms: float) -> None:
    """Copy the neurons that contribute most.

    Args:
        states: float32 (n, n_embd), normalized, which the part reads.
        rms: root mean square of the main model's states; those of the head are 1 / rms as large.
    """
    inputs = states * source.norm
    gate = inputs @ source.gate.T
    with np.errstate(over="ignore"):
        activations = gate / (1 + np.exp(-gate)) * (inputs @ source.up.T)
    contributions = np.sqrt(np.mean(activations**2, axis=0)) * np.linalg.norm(source.down, axis=0)
    n = len(weights["blk.0.ffn_gate.weight"])
    chosen = np.sort(np.argsort(-contributions)[:n])
    weights["blk.0.ffn_norm.weight"] = source.norm.copy()
    weights["blk.0.ffn_gate.weight"][: len(chosen)] = source.gate[chosen]
    weights["blk.0.ffn_up.weight"][: len(chosen)] = source.up[chosen]
    weights["blk.0.ffn_down.weight"][:, : len(chosen)] = source.down[:, chosen] / np.float32(rms)


def _input_norm(states: Array) -> Array:
    """Return norm weights that give each channel unit variance."""
    scale = 1 / np.maximum(states.std(0), 1e-6)
    scale = np.minimum(scale, _MAX_SCALE * np.median(scale))
    rms = np.sqrt(np.mean(states**2, axis=1)).mean()
    norm: Array = (scale * rms).astype(np.float32)
    return norm


def _projection(n: int, width: int, scale: float, rng: np.random.Generator) -> Array:
    return rng.standard_normal((n, width), np.float32) * np.float32(scale * width**-0.5)


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
