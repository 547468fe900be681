"""Read tensors and metadata of a GGUF file without loading the model."""

import ctypes
import functools
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.llama import runtime

_ARRAY = 9  # GGUF_TYPE_ARRAY
_ALIGNMENT = 32  # bytes, of the position of a second model in a file
# Types of the arrays that `array` reads, by GGUF's number.
_ARRAYS: dict[int, Any] = {5: np.int32, 6: np.float32}
_LAYER = re.compile(r"blk\.(\d+)\.")
# Types of metadata that are integers or booleans, by GGUF's number.
_INTEGERS: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
}


class _Parameters(ctypes.Structure):
    """``gguf_init_params``."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def parts(path: Path) -> list[Path]:
    """The files of a model, which may be split, given the first one."""
    pattern = re.sub(r"-00001-of-(\d{5})$", r"-*-of-\1", glob.escape(path.stem)) + glob.escape(path.suffix)
    return sorted(path.parent.glob(pattern))


def has_tensor(path: Path, name: str) -> bool:
    """Return whether a file, which must be valid, has a tensor of this name."""
    with _opened(path) as (gguf, file):
        return bool(gguf.gguf_find_tensor(file, name.encode()) >= 0)


def has_layer(path: Path, number: int) -> bool:
    """Return whether a file, which must be valid, has tensors of a layer."""
    return any(name.startswith(f"blk.{number}.") for name, _, _ in _tensors(path))


def tensor_types(path: Path) -> dict[str, str]:
    """The types, such as ``Q4_K``, of the tensors of a file, which must be valid, by their names."""
    return {name: kind for name, kind, _ in _tensors(path)}


def bytes_by_type(path: Path) -> dict[str, int]:
    """Bytes of the tensors of a file, which must be valid, by type."""
    found: dict[str, int] = {}
    for _, kind, size in _tensors(path):
        found[kind] = found.get(kind, 0) + size
    return found


def bytes_by_layer(path: Path, n_layers: int) -> tuple[list[int], int]:
    """Bytes of the tensors of each layer, and of the output matrix with its norm.

    If a file has no output matrix, that of the token embeddings is the output matrix, too.

    path: the first part of a valid model.
    """
    layers, sizes = [0] * n_layers, {"output": 0, "token_embd": 0}
    for part in parts(path):
        for name, _, size in _tensors(part):
            if (found := _LAYER.match(name)) and int(found[1]) < n_layers:
                layers[int(found[1])] += size
            else:
                sizes[name.partition(".")[0]] = size
    return layers, sizes["output"] or sizes["token_embd"]


def _tensors(path: Path) -> list[tuple[str, str, int]]:
    """Name, type and bytes of each tensor."""
    with _opened(path) as (gguf, file):
        return [
            (
                gguf.gguf_get_tensor_name(file, i).decode(),
                gguf.ggml_type_name(gguf.gguf_get_tensor_type(file, i)).decode().upper(),
                gguf.gguf_get_tensor_size(file, i),
            )
            for i in range(gguf.gguf_get_n_tensors(file))
        ]


def numbers(path: Path, key: str, n: int) -> list[int] | None:
    """The first n integers or booleans of an array in the metadata, or a single value n times.

    None: there is no such key, or the array is shorter.
    """
    with _opened(path) as (gguf, file):
        number = gguf.gguf_find_key(file, key.encode())
        kind = gguf.gguf_get_kv_type(file, number) if number >= 0 else -1
        n_values, data = 1, gguf.gguf_get_val_data
        if kind == _ARRAY:
            kind = gguf.gguf_get_arr_type(file, number)
            n_values, data = gguf.gguf_get_arr_n(file, number), gguf.gguf_get_arr_data
            if n_values < n:
                return None
        if kind not in _INTEGERS:
            return None
        values = [int(value) for value in (_INTEGERS[kind] * n_values).from_address(data(file, number))]
        return values[:n] if data is gguf.gguf_get_arr_data else n * values


def array(path: Path, key: str) -> NDArray[np.int32] | NDArray[np.float32] | None:
    """An array of numbers of 32 bits in the metadata; None: there is none of these types."""
    with _opened(path) as (gguf, file):
        number = gguf.gguf_find_key(file, key.encode())
        if number < 0 or gguf.gguf_get_kv_type(file, number) != _ARRAY:
            return None
        if not (kind := _ARRAYS.get(gguf.gguf_get_arr_type(file, number))):
            return None
        n = gguf.gguf_get_arr_n(file, number)
        return np.frombuffer(ctypes.string_at(gguf.gguf_get_arr_data(file, number), 4 * n), kind)


def end_of_tensors(path: Path) -> int:
    """Where a second model begins in a file, if there is one: in bytes, after the first one's tensors."""
    with _opened(path) as (gguf, file):
        ends = [
            gguf.gguf_get_tensor_offset(file, i) + gguf.gguf_get_tensor_size(file, i)
            for i in range(gguf.gguf_get_n_tensors(file))
        ]
        end = int(gguf.gguf_get_data_offset(file) + max(ends, default=0))
    return end + -end % _ALIGNMENT


def integers(path: Path, name: str) -> NDArray[np.int64] | None:
    """The values of a tensor of 64-bit integers, as one dimension; None: there is no such tensor."""
    with _opened(path) as (gguf, file):
        number = gguf.gguf_find_tensor(file, name.encode())
        if number < 0 or gguf.gguf_get_tensor_type(file, number) != runtime.library().GGML_TYPE_I64:
            return None
        start = gguf.gguf_get_data_offset(file) + gguf.gguf_get_tensor_offset(file, number)
        n = gguf.gguf_get_tensor_size(file, number) // 8
    return np.fromfile(path, np.int64, n, offset=start)


def floats(path: Path, name: str, width: int, rows: NDArray[np.integer] | None = None) -> NDArray[np.float32]:
    """The values of a tensor, dequantized.

    Args:
        path: a file of the model.
        width: number of columns.
        rows: which rows; None: all.

    Returns:
        float32 (number of rows, width).

    Raises:
        KeyError: the file has no such tensor.
        ValueError: it has another width, or a type that cannot be dequantized here.
    """
    import gguf as package  # takes 0.1 s

    with _opened(path) as (gguf, file):
        number = gguf.gguf_find_tensor(file, name.encode())
        if number < 0:
            raise KeyError(name)
        kind = package.GGMLQuantizationType(gguf.gguf_get_tensor_type(file, number))
        start = gguf.gguf_get_data_offset(file) + gguf.gguf_get_tensor_offset(file, number)
        n_bytes = gguf.gguf_get_tensor_size(file, number)
    block, block_bytes = package.GGML_QUANT_SIZES[kind]
    sequence_bytes = width // block * block_bytes
    if width % block or n_bytes % sequence_bytes:
        raise ValueError(f"{name} does not have {width} columns")
    data = np.memmap(path, np.uint8, "r", start, (n_bytes // sequence_bytes, sequence_bytes))
    try:
        values = package.quants.dequantize(np.array(data if rows is None else data[rows]), kind)
    except NotImplementedError as error:
        raise ValueError(f"{name} has the type {kind.name}: {error}") from None
    return np.ascontiguousarray(values, np.float32)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, int]]:
    gguf = _functions()
    if not (file := gguf.gguf_init_from_file(os.fsencode(path), _Parameters(no_alloc=True))):
        raise OSError(f"{path} cannot be read")
    try:
        yield gguf, file
    finally:
        gguf.gguf_free(file)


@functools.cache
def _functions() -> Any:
    gguf = runtime.library()._lib  # also finds the functions of libraries that it links
    file, index = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in [
        ("init_from_file", file, [ctypes.c_char_p, _Parameters]),
        ("free", None, [file]),
        ("find_key", index, [file, ctypes.c_char_p]),
        ("get_kv_type", ctypes.c_int, [file, index]),
        ("get_val_data", ctypes.c_void_p, [file, index]),
        ("get_arr_type", ctypes.c_int, [file, index]),
        ("get_arr_n", ctypes.c_size_t, [file, index]),
        ("get_arr_data", ctypes.c_void_p, [file, index]),
        ("get_n_tensors", index, [file]),
        ("find_tensor", index, [file, ctypes.c_char_p]),
        ("get_tensor_name", ctypes.c_char_p, [file, index]),
        ("get_tensor_type", ctypes.c_int, [file, index]),
        ("get_tensor_offset", ctypes.c_size_t, [file, index]),
        ("get_tensor_size", ctypes.c_size_t, [file, index]),
        ("get_data_offset", ctypes.c_size_t, [file]),
    ]:
        function = getattr(gguf, f"gguf_{name}")
        function.restype, function.argtypes = result, arguments
    gguf.ggml_type_name.restype, gguf.ggml_type_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return gguf
