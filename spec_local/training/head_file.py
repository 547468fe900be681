"""The file of a trained head: write it, and read it to train the head further."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import spec_local
from spec_local.conversion.head import ConvertedHead, HeadTensor, Value
from spec_local.conversion.writer import write_head
from spec_local.errors import InvalidRequest, ModelError, SpecLocalError
from spec_local.llama.gguf_tensors import floats, has_tensor
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.system.files import sha256
from spec_local.training.head_shape import HeadShape, Weights, head_shape, layers_read, tensor_shapes


def export_head(
    path: Path,
    main_path: Path,
    shape: HeadShape,
    weights: Weights,
    *,
    layers: Sequence[int],
    drafted: NDArray[np.int64],
    kind: str = "Q8_0",
    provenance: Mapping[str, Value] = {},
) -> Path:
    """Write a head as a GGUF file of llama.cpp's architecture ``eagle3``, atomically.

    Args:
        weights: all tensors of `tensor_shapes`, and ``output.weight``, float32 (len(drafted), n_embd): rows
            of the output matrix.
        layers: layers of the main model whose outputs the head reads.
        drafted: int64, tokens that the head can draft, ascending.
        kind: type of the matrices; see `spec_local.conversion.writer.write_head`.
        provenance: metadata, stored as ``specdec.*`` with the main model's name and SHA-256.

    Raises:
        InvalidRequest: the file cannot be written or is the main model itself.
        ModelFileError, ModelError: the main model cannot be read, or the head does not fit it.
    """
    if path.exists() and path.samefile(main_path):
        raise InvalidRequest(f"{path} is the main model itself: give another name for the head")
    values: dict[str, NDArray[Any]] = {**weights, "d2t": drafted.astype(np.int64)}
    with closing(Model(main_path, weights=False)) as main:
        fields: dict[str, Value] = {
            "vocab_size": main.vocabulary.n_tokens,
            "context_length": main.n_ctx_train or 2048,
            "embedding_length": shape.n_embd,
            "block_count": 1,
            "feed_forward_length": shape.n_ff,
            "attention.head_count": shape.n_head,
            "attention.head_count_kv": shape.n_head,
            "attention.key_length": shape.head_dim,
            "attention.value_length": shape.head_dim,
            "attention.layer_norm_rms_epsilon": shape.eps,
            "rope.dimension_count": shape.head_dim,
            "rope.freq_base": shape.rope_base,
            "target_layers": [layer + 1 for layer in layers],  # whose inputs these are
            "target_hidden_size": main.n_embd,
            "norm_before_fc": True,
        }
        tensors = {name: HeadTensor(each.shape, partial(np.asarray, each)) for name, each in values.items()}
        head = ConvertedHead("eagle3", "EAGLE-3", fields, tensors, has_tokenizer=False)
        return write_head(path, head, main, kind, _origin(main, provenance))


def _origin(main: Model, provenance: Mapping[str, Value]) -> dict[str, Value]:
    """Where a head comes from, and the main model's licence, from whose weights it was made."""
    name = _name(main)
    licence = main.text("general.license")
    return {
        "general.type": "model",
        "general.name": f"{name} EAGLE-3",
        "general.description": f"EAGLE-3 head of {name} for speculative decoding, trained by specdec",
        "general.base_model.count": 1,
        "general.base_model.0.name": name,
        **({"general.license": licence} if licence else {}),
        "specdec.main.name": name,
        "specdec.main.sha256": sha256(main.path),
        "specdec.version": spec_local.__version__,
        **{f"specdec.{key}": value for key, value in provenance.items()},
    }


def _name(main: Model) -> str:
    return main.text("general.name") or main.path.stem


@dataclass(frozen=True, slots=True, eq=False)
class TrainedWeights:
    """The weights of a head, and the tokens that it can draft, ascending."""

    weights: Weights
    drafted: NDArray[np.int64]


def read_head(path: Path, main: Model) -> TrainedWeights:
    """Read a head of a main model, which `export_head` wrote.

    Raises:
        ModelError: it is damaged, was made for another main model, or not by `specdec draft train`.
    """
    try:
        header = open_header(path)
    except SpecLocalError as error:
        raise ModelError(f"{path} cannot be continued ({error})") from None
    origin, tokens = header.text("specdec.main.name"), header.draft_tokens
    architecture, layers = header.architecture, header.target_layers
    header.close()
    advice = "give a head that specdec draft train made for this main model, or none"
    if architecture != "eagle3" or origin is None or tokens is None:
        raise ModelError(f"{path} is not a head that specdec has trained: {advice}")
    name = _name(main)
    shape = head_shape(main.n_embd)
    if origin != name or tuple(layers or ()) != tuple(i + 1 for i in layers_read(main.n_layers)):
        raise ModelError(f"{path} was made for {origin}, not for {name}: {advice}")
    weights: Weights = {}
    for tensor, size in tensor_shapes(shape).items():
        try:
            if not has_tensor(path, tensor):
                raise ValueError(f"it has no {tensor}")
            values = floats(path, tensor, size[-1])
            if values.size != np.prod(size) or not np.isfinite(values).all():
                raise ValueError(f"its {tensor} has another size, or values that are not finite")
        except (KeyError, ValueError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}): {advice}") from None
        weights[tensor] = values.reshape(size)
    return TrainedWeights(weights, tokens.astype(np.int64))
