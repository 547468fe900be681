"""Write a head as a GGUF file of llama.cpp's architecture ``eagle3``."""

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import spec_local
from spec_local.errors import BackendError, InvalidRequest, ModelFileError
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.system.files import saving, sha256
from spec_local.training.head_shape import HeadShape, Weights

_OUTPUT, _DRAFTED = "output.weight", "d2t"


def write_head(
    path: Path,
    main_path: Path,
    shape: HeadShape,
    weights: Weights,
    output: NDArray[np.float32],
    *,
    layers: Sequence[int],
    drafted: NDArray[np.int64],
    provenance: Mapping[str, str | int | float] = {},
) -> Path:
    """Write a head, atomically; an existing file is replaced.

    Matrices are Q8_0, or F16 where their rows cannot be divided into blocks of 32.

    Args:
        weights: all tensors of `tensor_shapes`.
        output: float32 (len(drafted), n_embd), rows of the output matrix.
        layers: layers of the main model whose outputs the head reads.
        drafted: int64, tokens that the head can draft, ascending.
        provenance: metadata, stored as ``specdec.*`` with the main model's name and SHA-256.

    Raises:
        InvalidRequest: the file cannot be written or is the main model itself.
        BackendError: llama.cpp rejects these weights with this shape.
        ModelFileError, ModelError: the main model cannot be read.
    """
    if path.exists() and path.samefile(main_path):
        raise InvalidRequest(f"{path} is the main model itself: give another name for the head")
    with saving(path) as target:
        # With this prefix, the next `saving` removes what a killed process left behind.
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f"{target.name}.", suffix=".part", delete=False
        ) as file:
            temporary = Path(file.name)
        try:
            _write(temporary, main_path, shape, {_OUTPUT: output, **weights}, layers, drafted, provenance)
            try:
                Model(temporary, weights=False).close()
            except (BackendError, ModelFileError):
                raise BackendError(
                    f"llama.cpp rejects the head ({runtime.failure_reason()}): "
                    "check that its weights match its shape"
                ) from None
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        shutil.copymode(main_path, target)  # temporary files are private to their owner
    return path


def _write(
    path: Path,
    main_path: Path,
    shape: HeadShape,
    weights: Weights,
    layers: Sequence[int],
    drafted: NDArray[np.int64],
    provenance: Mapping[str, str | int | float],
) -> None:
    import gguf  # takes 0.1 s

    main = Model(main_path, weights=False)
    writer = gguf.GGUFWriter(path, "eagle3")
    try:
        _add_shape(writer, shape, main)
        writer.add_array("eagle3.target_layers", [layer + 1 for layer in layers])  # whose inputs these are
        writer.add_uint32("eagle3.target_hidden_size", main.n_embd)
        writer.add_bool("eagle3.norm_before_fc", True)
        writer.add_tokenizer_model("none")
        _add_origin(writer, main, provenance)
        writer.add_tensor(_DRAFTED, drafted.astype(np.int64))
        for name, values in weights.items():
            kind = _kind(values)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is None:  # a short write by NumPy has no error number
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise
    finally:
        writer.close()
        main.close()


def _kind(values: NDArray[np.float32]) -> Any:
    import gguf

    kinds = gguf.GGMLQuantizationType
    if values.ndim == 1:
        return kinds.F32
    return kinds.F16 if values.shape[1] % 32 else kinds.Q8_0


def _add_shape(writer: Any, shape: HeadShape, main: Model) -> None:
    writer.add_vocab_size(main.vocabulary.n_tokens)
    writer.add_context_length(main.n_ctx_train or 2048)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)


def _add_origin(writer: Any, main: Model, provenance: Mapping[str, str | int | float]) -> None:
    """Add where the head comes from, and the main model's licence, from whose weights it was made."""
    name = main.text("general.name") or main.path.stem
    writer.add_type("model")
    writer.add_name(f"{name} EAGLE-3")
    writer.add_description(f"EAGLE-3 head of {name} for speculative decoding, trained by specdec")
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, name)
    if licence := main.text("general.license"):
        writer.add_license(licence)
    about = {
        "main.name": name,
        "main.sha256": sha256(main.path),
        "version": spec_local.__version__,
        **provenance,
    }
    for key, value in about.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float64
        add = writer.add_int64 if isinstance(value, int) else add
        add(f"specdec.{key}", value)
