"""Weights to begin with: random ones, or main's own embeddings and some of its layers.

Layers that were not made to follow each other say little at first, but a little training heals them, and main's
embeddings know already what its tokens mean.
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
from spec_local.training.model_shape import EMBEDDINGS, ModelShape, Weights, measures
from spec_local.training.network import states

_OUTPUT = "output.weight"
_NORM = "output_norm.weight"
# Llama 3 slows the turning of far places with the last of these; what a draft sees is mostly near.
_WHOLE = {EMBEDDINGS, _OUTPUT, _NORM, "rope_freqs.weight"}
_HALVES = {"llama": False, "qwen2": True}
"""Architectures that can be cut; whether a pair that is turned together is half a head apart, and not neighbours."""


def from_scratch(shape: ModelShape, seed: int = 0) -> Weights:
    """Random weights, as they are usually drawn: what a layer adds is the smaller, the more layers there are."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, size in measures(shape).items():
        if len(size) == 1:
            weights[name] = np.ones(size, np.float32)
            continue
        scale = size[1] ** -0.5
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            scale /= math.sqrt(2 * shape.n_layers)
        weights[name] = rng.standard_normal(size, np.float32) * np.float32(scale)
    return weights


def from_main(
    main_path: Path, kept: NDArray[np.integer], layers: Sequence[int] = (0, -1)
) -> tuple[ModelShape, Weights]:
    """Some of main's layers, with the embeddings of some of its tokens.

    Where main has one matrix for its output and another for what it reads, the draft's only one is the former: the
    layers learn to read it sooner than they would learn to foretell with the other.

    Args:
        kept: main's tokens, in the draft's order.
        layers: main's, in the draft's order; −1 is the last one.

    Raises:
        ModelFileError: there is no such file, or it is not GGUF.
        ModelError: it has parts that a draft cannot have.
    """
    import gguf  # 0.1 s, which only this needs

    check_header(main_path)
    try:
        source = _Source(gguf.GGUFReader(main_path))
        return _cut(source, kept, layers)
    except (KeyError, ValueError, IndexError, NotImplementedError) as error:
        raise ModelError(
            f"{main_path.name} cannot be cut into a draft ({error}): train one from scratch"
        ) from None


def calmed(shape: ModelShape, weights: Weights) -> Weights:
    """The same with logits as wide as a new model's: without its middle a main is as sure as before, and mostly wrong."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(shape.n_vocab, size=(4, 64)))
    with torch.inference_mode():
        parameters = {name: torch.from_numpy(values) for name, values in weights.items()}
        logits = states(parameters, shape, tokens) @ parameters[EMBEDDINGS].T
    # Rounded: its last digits hang on the number of threads, and a run that goes on knows its weights again.
    return weights | {_NORM: weights[_NORM] / np.float32(round(float(logits.std()), 3))}


def _cut(source: "_Source", kept: NDArray[np.integer], layers: Sequence[int]) -> tuple[ModelShape, Weights]:
    odd = {name for name in source.tensors if not name.startswith("blk.")} - _WHOLE
    if odd:
        raise ValueError(f"it has {min(odd)}")
    n_head, n_embd = source.number("attention.head_count"), source.number("embedding_length")
    head_dim = source.number("attention.key_length", n_embd // n_head)
    shape = ModelShape(
        n_vocab=len(kept),
        n_embd=n_embd,
        n_layers=len(layers),
        n_head=n_head,
        n_head_kv=source.number("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_ff=source.number("feed_forward_length"),
        rope_base=float(source.value("rope.freq_base", 10000.0)),
        eps=float(source.value("attention.layer_norm_rms_epsilon")),
        n_ctx=source.number("context_length"),
    )
    if source.number("rope.dimension_count", head_dim) != head_dim:
        raise ValueError("only a part of each head is turned")
    weights = {EMBEDDINGS: source.weights(_OUTPUT if _OUTPUT in source.tensors else EMBEDDINGS, kept)}
    every = range(source.number("block_count"))
    for layer, origin in enumerate(every[i] for i in layers):
        for name in source.tensors:
            if name.startswith(f"blk.{origin}."):
                part = name.split(".", 2)[2]
                values = source.weights(name)
                if source.halves and part.startswith(("attn_q.", "attn_k.")):
                    values = _neighbours(values, head_dim)
                weights[f"blk.{layer}.{part}"] = values
    weights[_NORM] = source.weights(_NORM)
    expected = measures(shape, biases=any(name.endswith("bias") for name in weights))
    for name in sorted(expected.keys() | weights.keys()):
        found = weights[name].shape if name in weights else "missing"
        if found != expected.get(name):
            raise ValueError(f"{name} is {found}")
    return shape, weights


def _neighbours(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of each head, or a bias, from halves to pairs of neighbours."""
    apart = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(values.shape)


class _Source:
    """A GGUF file of an architecture that can be cut.

    Raises ValueError: it is of another one.
    """

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        self._architecture = str(reader.fields["general.architecture"].contents())
        if self._architecture not in _HALVES:
            raise ValueError(f"its architecture is {self._architecture}")
        self.halves = _HALVES[self._architecture]
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """Raises ValueError: the file does not say it."""
        field = self._fields.get(f"{self._architecture}.{key}")
        if field is None and default is None:
            raise ValueError(f"it does not say its {key}")
        return default if field is None else field.contents()

    def number(self, key: str, default: int | None = None) -> int:
        """Raises ValueError: it is missing, or another one in each layer."""
        value = self.value(key, default)
        if not isinstance(value, int):
            raise ValueError(f"its {key} is {value}")
        return value

    def weights(self, name: str, rows: NDArray[np.integer] | None = None) -> NDArray[np.float32]:
        """A tensor, or some rows of it, whatever it is stored as."""
        import gguf

        tensor = self.tensors[name]
        data = tensor.data if rows is None else tensor.data[rows]
        values: NDArray[np.float32] = gguf.quants.dequantize(data, tensor.tensor_type)
        return np.array(values, np.float32)  # of its own: the file stays mapped no longer than needed
