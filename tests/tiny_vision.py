"""Tiny language models with random weights, to which a projector of `tests.tiny_projectors` fits.

Their vocabularies have the tokens that llama.cpp puts around pictures. They are the last ones, and all these
models have the same vocabulary: any two of them can be a model and its draft model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.llama.tiny import random_weights, write_tiny_model
from tests.tiny_architectures import (
    Architecture,
    Tensor,
    _attention,
    _ffn,
    _vector,
    write_architecture,
    write_tiny,
)

N_EMBD = 64
_N_LAYERS = 4  # with two, a single cell, or a token before a picture, would hardly change the answer
N_DEEPSTACK = 2
"""Number of layers of a tiny qwen3vl to which a part of a picture's vectors is added."""
MAX_TILES = 4
"""Number of rows, and of columns, of a picture's tiles that have tokens."""

CONTROL_TOKENS = (
    *("<start_of_image>", "<end_of_image>"),  # gemma3
    *("<|vision_start|>", "<|vision_end|>"),  # qwen2vl, qwen3vl
    *("<fake_token_around_image>", "<global-img>"),  # idefics3
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(MAX_TILES) for column in range(MAX_TILES)),
)
"""The tokens around pictures."""
TOKENS = (*CONTROL_TOKENS, "\n\n")
"""All that these vocabularies have in addition; idefics3 has an empty line before a picture."""


def write_vision_model(
    path: Path | str, architecture: str, *, n_deepstack: int | None = None, **options: Any
) -> Path:
    """Write a model of one of `ARCHITECTURES`.

    Args:
        path: an existing file is overwritten.
        architecture: its name in the file.
        n_deepstack: of qwen3vl; by default, `N_DEEPSTACK`. The projector must have as many such layers, and
            the model more layers: with deepstack in the last one, llama.cpp aborts.
        options: ``noise``, ``n_layers``, ``n_ctx`` and others that `spec_local.llama.tiny.write_tiny_model`
            has for llama and gemma3, and `tests.tiny_architectures.write_architecture` for the others.

    Returns:
        `path`.
    """
    usual: dict[str, Any] = {"extra_tokens": TOKENS, "control": CONTROL_TOKENS}
    options = usual | {"n_embd": N_EMBD, "n_layers": _N_LAYERS} | options
    if architecture in ("llama", "gemma3"):
        return write_tiny_model(path, architecture=architecture, weights=_weights, **options)
    if architecture == "qwen35":
        return write_tiny(path, architecture, change=_without_pictures, **options)
    known = _MROPE[architecture]
    if architecture == "qwen3vl":
        n = N_DEEPSTACK if n_deepstack is None else n_deepstack
        known = known._replace(settings=lambda *_: {**_sections(), "n_deepstack_layers": n})
    return write_architecture(path, architecture, known, change=_without_pictures, **options)


def _weights(name: str, shape: tuple[int, ...], scale: float, seed: int, noise: float) -> NDArray[np.float32]:
    return _without_pictures(name, random_weights(name, shape, scale, seed, noise))


def _without_pictures(name: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the same weights, with which the tokens around pictures are almost never chosen."""
    if name == "output.weight":
        weights[-len(TOKENS) :] = 0
    return weights


def _layer(n: int, *, norms: bool) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _attention(n, norms=norms)
    yield _vector("ffn_norm", n)
    yield from _ffn(n)


def _sections(*_: int) -> dict[str, Any]:
    """Return how many pairs of values are rotated by time, row and column; a head has 16 pairs."""
    return {"rope.dimension_sections": [6, 5, 5, 0]}


_MROPE = {
    "qwen2vl": Architecture(lambda n, i: _layer(n, norms=False), _sections),
    "qwen3vl": Architecture(lambda n, i: _layer(n, norms=True), _sections),
}
ARCHITECTURES = ("llama", "gemma3", *_MROPE, "qwen35")
"""The names that `write_vision_model` accepts; qwen35 is a hybrid, and has no window or deepstack."""
