"""Look at the tensors of a GGUF file without loading the model."""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.llama import runtime


class _Parameters(ctypes.Structure):
    """``gguf_init_params``."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def has_tensor(path: Path, name: str) -> bool:
    """Whether a file, which must be valid, has a tensor of this name."""
    with _opened(path) as (gguf, file):
        return bool(gguf.gguf_find_tensor(file, name.encode()) >= 0)


def integers(path: Path, name: str) -> NDArray[np.int64] | None:
    """The values of a tensor of 64-bit integers, in one dimension; None: there is no such tensor."""
    with _opened(path) as (gguf, file):
        number = gguf.gguf_find_tensor(file, name.encode())
        if number < 0 or gguf.gguf_get_tensor_type(file, number) != runtime.library().GGML_TYPE_I64:
            return None
        start = gguf.gguf_get_data_offset(file) + gguf.gguf_get_tensor_offset(file, number)
        n = gguf.gguf_get_tensor_size(file, number) // 8
    return np.fromfile(path, np.int64, n, offset=start)


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
    gguf = runtime.library().llama_cpp._lib  # looks in the libraries that llama.cpp is linked to, too
    file, index = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in [
        ("init_from_file", file, [ctypes.c_char_p, _Parameters]),
        ("free", None, [file]),
        ("find_tensor", index, [file, ctypes.c_char_p]),
        ("get_tensor_type", ctypes.c_int, [file, index]),
        ("get_tensor_offset", ctypes.c_size_t, [file, index]),
        ("get_tensor_size", ctypes.c_size_t, [file, index]),
        ("get_data_offset", ctypes.c_size_t, [file]),
    ]:
        function = getattr(gguf, f"gguf_{name}")
        function.restype, function.argtypes = result, arguments
    return gguf
