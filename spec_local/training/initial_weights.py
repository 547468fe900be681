"""Initial weights of a draft model: random, or some of the main model's layers (layer pruning).

Layers that were not trained to follow each other predict poorly at first, but a short training fixes that,
and the main model's embeddings are already trained.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spec_local.errors import ModelError
from spec_local.llama.model import check_header
from spec_local.training.model_shape import EMBEDDINGS, ModelShape, Weights, tensor_shapes
from spec_local.training.network import hidden_states

_OUTPUT = "output.weight"
_NORM = "output_norm.weight"
# The last tensor, which slows RoPE at long distances (Llama 3), is dropped: nearby tokens matter most.
_SUPPORTED = {EMBEDDINGS, _OUTPUT, _NORM, "rope_freqs.weight"}
_PAIRS_ARE_HALVES = {"llama": False, "qwen2": True}
"""Architectures that can be pruned, and whether their RoPE pairs are half a head apart, not neighbours."""


def random_weights(shape: ModelShape, seed: int = 0) -> Weights:
    """Draw weights from a normal distribution; residual outputs are scaled down by the number of layers."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, size in tensor_shapes(shape).items():
        if len(size) == 1:
            weights[name] = np.ones(size, np.float32)
            continue
        scale = size[1] ** -0.5
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            scale /= math.sqrt(2 * shape.n_layers)
        weights[name] = rng.standard_normal(size, np.float32) * np.float32(scale)
    return weights


def pruned_weights(
    main_path: Path, kept: NDArray[np.integer], layers: Sequence[int] = (0, -1)
) -> tuple[ModelShape, Weights]:
    """Extract some layers of the main model, and the embeddings of some of its tokens.

    If its output matrix is separate from its embeddings, the draft model's tied matrix is the output matrix:
    layers adapt to a different input faster than to a different output.

    Args:
        kept: tokens of the main model, in the draft model's order.
        layers: layers of the main model, in the draft model's order; −1 is the last one.

    Raises:
        ModelFileError: the file does not exist or is not GGUF.
        ModelError: the model has parts that are not supported in a draft model.
    """
    import gguf  # takes 0.1 s

    check_header(main_path)
    try:
        return _prune(_Source(gguf.GGUFReader(main_path)), kept, layers)
    except (KeyError, ValueError, IndexError, NotImplementedError) as error:
        raise ModelError(
            f"{main_path.name} cannot be pruned to a draft model ({error}): train one from random weights"
        ) from None


def rescaled(shape: ModelShape, weights: Weights) -> Weights:
    """Scale the logits to standard deviation 1: a pruned model is still confident, but usually wrong."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(shape.n_vocab, size=(4, 64)))
    with torch.inference_mode():
        parameters = {name: torch.from_numpy(values) for name, values in weights.items()}
        logits = hidden_states(parameters, shape, tokens) @ parameters[EMBEDDINGS].T
    # Rounded: the last digits depend on the number of threads, and a resumed run needs the same weights.
    return weights | {_NORM: weights[_NORM] / np.float32(round(float(logits.std()), 3))}


def _prune(source: "_Source", kept: NDArray[np.integer], layers: Sequence[int]) -> tuple[ModelShape, Weights]:
    unsupported = {name for name in source.tensors if not name.startswith("blk.")} - _SUPPORTED
    if unsupported:
        raise ValueError(f"it has {min(unsupported)}")
    n_head, n_embd = source.integer("attention.head_count"), source.integer("embedding_length")
    head_dim = source.integer("attention.key_length", n_embd // n_head)
    shape = ModelShape(
        n_vocab=len(kept),
        n_embd=n_embd,
        n_layers=len(layers),
        n_head=n_head,
        n_head_kv=source.integer("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_ff=source.integer("feed_forward_length"),
        rope_base=float(source.value("rope.freq_base", 10000.0)),
        eps=float(source.value("attention.layer_norm_rms_epsilon")),
        n_ctx=source.integer("context_length"),
    )
    if source.integer("rope.dimension_count", head_dim) != head_dim:
        raise ValueError("only a part of each head is rotated")
    weights = {EMBEDDINGS: source.weights(_OUTPUT if _OUTPUT in source.tensors else EMBEDDINGS, kept)}
    indices = range(source.integer("block_count"))
    for layer, origin in enumerate(indices[i] for i in layers):
        for name in source.tensors:
            if name.startswith(f"blk.{origin}."):
                part = name.split(".", 2)[2]
                values = source.weights(name)
                if source.pairs_are_halves and part.startswith(("attn_q.", "attn_k.")):
                    values = _interleave_pairs(values, head_dim)
                weights[f"blk.{layer}.{part}"] = values
    weights[_NORM] = source.weights(_NORM)
    expected = tensor_shapes(shape, biases=any(name.endswith("bias") for name in weights))
    for name in sorted(expected.keys() | weights.keys()):
        found = weights[name].shape if name in weights else "missing"
        if found != expected.get(name):
            raise ValueError(f"{name} is {found}")
    return shape, weights


def _interleave_pairs(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder the rows of each head, or a bias, so that RoPE pairs half a head apart become neighbours."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


class _Source:
    """A GGUF file of an architecture that can be pruned.

    Raises ValueError: its architecture is not supported.
    """

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        self._architecture = str(reader.fields["general.architecture"].contents())
        if self._architecture not in _PAIRS_ARE_HALVES:
            raise ValueError(f"its architecture is {self._architecture}")
        self.pairs_are_halves = _PAIRS_ARE_HALVES[self._architecture]
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """Return a metadata value. Raises ValueError: it is missing, and there is no default."""
        field = self._fields.get(f"{self._architecture}.{key}")
        if field is None and default is None:
            raise ValueError(f"its {key} is missing")
        return default if field is None else field.contents()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer. Raises ValueError: it is missing, or differs between layers."""
        value = self.value(key, default)
        if not isinstance(value, int):
            raise ValueError(f"its {key} is {value}")
        return value

    def weights(self, name: str, rows: NDArray[np.integer] | None = None) -> NDArray[np.float32]:
        """Return a dequantized tensor, or some of its rows."""
        import gguf

        tensor = self.tensors[name]
        data = tensor.data if rows is None else tensor.data[rows]
        values: NDArray[np.float32] = gguf.quants.dequantize(data, tensor.tensor_type)
        return np.array(values, np.float32)  # a copy, so that the file is not kept mapped
