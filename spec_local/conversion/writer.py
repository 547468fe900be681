"""Write a head as a GGUF file, and check that llama.cpp can use it with its main model."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spec_local.conversion.head import ConvertedHead, HeadTensor, Value
from spec_local.errors import InvalidRequest, ModelError, ModelFileError
from spec_local.llama.gguf_header import read_tokenizer
from spec_local.llama.headers import open_header
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.model import Model
from spec_local.system.files import format_size, saving

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0")
"""Types of a converted head's matrices: those that the gguf package can write."""


def write_head(
    path: Path, head: ConvertedHead, main: Model, kind: str, origin: Mapping[str, Value] = {}
) -> Path:
    """Write a head, atomically; an existing file is replaced.

    Matrices whose rows cannot be divided into blocks of the type are F16.

    Args:
        main: its main model.
        kind: one of `KINDS`.
        origin: further fields with their full names, such as ``general.name``.

    Raises:
        InvalidRequest: an unknown `kind`, or the file cannot be written.
        ModelFileError: the head, or the main model's file, is damaged.
        ModelError: it does not fit the main model.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"kind is {kind!r}: give one of {', '.join(KINDS)}")
    with saving(path) as temporary:
        models = [head, head.rest, head.rest] if head.rest else [head]  # the rest is copied
        room = sum(n for model in models for _, _, n in _sizes(model, kind))
        free = shutil.disk_usage(temporary.parent).free
        if room > free:
            raise InvalidRequest(
                f"the head needs {format_size(room)} and {temporary.parent} has {format_size(free)} free: "
                "free some space, or give a path on another disk"
            )
        _write(temporary, head, main, kind, origin)
        try:
            with closing(open_header(temporary)) as written:
                choose_head(main, written)
        except (ModelError, ModelFileError) as error:
            raise type(error)(str(error).replace(temporary.name, path.name)) from None
        shutil.copymode(main.path, temporary)  # temporary files are private to their owner
    return path


def _write(path: Path, head: ConvertedHead, main: Model, kind: str, origin: Mapping[str, Value]) -> None:
    """Write a model and its rest."""
    import gguf  # takes 0.1 s

    writer = gguf.GGUFWriter(path, head.architecture)
    try:
        for name, value in head.fields.items():
            _add(writer, f"{head.architecture}.{name}", value)
        for name, value in origin.items():
            _add(writer, name, value)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
        if head.has_tokenizer:
            _copy_tokenizer(writer, main.path)
        else:
            writer.add_tokenizer_model("none")
        if head.mask is not None:
            writer.add_mask_token_id(head.mask)
        for name, values in head.arrays.items():  # last, as `gguf_header` reads the beginning only
            writer.add_array(f"{head.architecture}.{name}", values.tolist())
        for name, raw, n_bytes in _sizes(head, kind):
            # The package computes the shape from that of the bytes.
            shape: tuple[int, ...] = head.tensors[name].shape
            data: np.dtype[Any] = np.dtype(np.uint8)
            if raw in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.I64):
                data = np.dtype(np.float32)
            else:
                shape = gguf.quants.quant_shape_to_byte_shape(shape, raw)
            writer.add_tensor_info(name, shape, data, n_bytes, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, raw, _ in _sizes(head, kind):
            writer.write_tensor_data(_values(name, head.tensors[name], raw))
    finally:
        writer.close()
    if head.rest:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _write(Path(folder, "rest.gguf"), head.rest, main, kind, {})
            with open(path, "ab") as file, open(Path(folder, "rest.gguf"), "rb") as rest:
                shutil.copyfileobj(rest, file)


def _values(name: str, tensor: HeadTensor, raw: "GGMLQuantizationType") -> NDArray[Any]:
    """The values of a tensor, as they are written."""
    import gguf

    values = tensor.load()
    if values.shape != tensor.shape:
        raise ModelFileError(f"{name} has the shape {values.shape} instead of {tensor.shape}: report it")
    if raw == gguf.GGMLQuantizationType.I64:
        return values.astype(np.int64)
    if not np.isfinite(values).all():
        raise ModelFileError(f"{name} has values that are not finite: download the head again")
    quantized: NDArray[Any] = gguf.quants.quantize(values.astype(np.float32, copy=False), raw)
    return quantized


def _sizes(head: ConvertedHead, kind: str) -> "Iterator[tuple[str, GGMLQuantizationType, int]]":
    """The name, the type and the bytes of each tensor."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    for name, tensor in head.tensors.items():
        raw = kinds[kind]
        if name == "d2t":
            raw = kinds.I64
        elif tensor.is_exact or len(tensor.shape) == 1:
            raw = kinds.F32
        elif tensor.shape[-1] % gguf.GGML_QUANT_SIZES[raw][0]:
            raw = kinds.F16
        block, n_bytes = gguf.GGML_QUANT_SIZES[raw]
        yield name, raw, int(np.prod(tensor.shape, dtype=np.int64)) // block * n_bytes


def _add(writer: "GGUFWriter", name: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value < 1 << 32 else writer.add_uint64)(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value.encode(errors="replace").decode())  # a folder can have any name
    else:
        writer.add_array(name, list(value))


def _copy_tokenizer(writer: "GGUFWriter", main: Path) -> None:
    """Add the main model's tokenizer, with its special tokens, but without its chat template."""
    import gguf

    kinds = gguf.GGUFValueType
    for name, field in read_tokenizer(main).items():
        item = None if field.item is None else kinds(field.item)
        writer.add_key_value(name, field.value, kinds(field.kind), item)
