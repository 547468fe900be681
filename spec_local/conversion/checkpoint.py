"""Read a folder in the layout of the Hugging Face Hub: config.json, and tensors in safetensors files.

Without safetensors, the tensors are read from PyTorch's files (`spec_local.conversion.torch_file`).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter

from spec_local import bfloat16
from spec_local.conversion.torch_file import StoredTensor, read_torch_file
from spec_local.errors import ModelFileError
from spec_local.system.files import NotRegular, opened, read_bytes

_MAX_CONFIG = 1 << 20  # bytes; config.json has a few kB
_MAX_HEADER = 100 << 20  # bytes, as in the safetensors library
_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "BOOL": np.bool_,
}


class _Entry(BaseModel):
    """A tensor in the header of a safetensors file. data_offsets: start and end, in bytes after it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Checkpoint:
    """The configuration and the tensors of a model that has not been converted to GGUF.

    Args:
        folder: contains config.json, and ``*.safetensors`` or ``pytorch_model*.bin``.

    Attributes:
        config: the content of config.json.

    Raises:
        ModelFileError: a file is missing or damaged, or a tensor is in two files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder / "config.json")
        self._tensors: dict[str, tuple[Path, StoredTensor]] = {}
        files, read = sorted(folder.glob("*.safetensors")), _read_header
        if not files:
            files, read = sorted(folder.glob("pytorch_model*.bin")), read_torch_file
        if not files:
            raise ModelFileError(f"{folder} contains no *.safetensors: give the folder of a head")
        for file in files:
            for name, tensor in read(file).items():
                if name in self._tensors:
                    raise ModelFileError(f"{folder} contains the tensor {name} twice: download it again")
                self._tensors[name] = file, tensor

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor: rows first, as in PyTorch."""
        return self._find(name)[1].shape

    def tensor(self, name: str) -> NDArray[np.float32] | NDArray[np.int64]:
        """The values of a tensor: float32, or int64 for integers and booleans.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        return read_values(*self._find(name))

    def _find(self, name: str) -> tuple[Path, StoredTensor]:
        if name not in self._tensors:
            raise ModelFileError(f"{self.folder} has no tensor {name}: download it again")
        return self._tensors[name]


def read_values(path: Path, tensor: StoredTensor) -> NDArray[np.float32] | NDArray[np.int64]:
    """The values of a tensor in a file: float32, or int64 for integers and booleans.

    Raises:
        ModelFileError: the file cannot be read.
    """
    kind = np.dtype(_TYPES[tensor.kind]).newbyteorder("<")
    try:
        with opened(path) as file:
            data: NDArray[Any] = np.fromfile(file, kind, math.prod(tensor.shape), offset=tensor.start)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): check it") from None
    if tensor.kind == "BF16":
        data = bfloat16.decode(data)
    data = data.reshape(tensor.shape)
    if data.dtype.kind == "f":
        return data.astype(np.float32, copy=False)
    return data.astype(np.int64, copy=False)


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        ModelFileError: it is missing or damaged.
    """
    try:
        return TypeAdapter(dict[str, Any]).validate_json(read_bytes(path, _MAX_CONFIG))
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist: give the folder of a head") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): check it") from None
    except ValueError:
        raise ModelFileError(f"{path} is damaged: download it again") from None


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, which are checked to be within it."""
    damaged = ModelFileError(f"{path} is damaged: download it again")
    try:
        with opened(path) as file:
            n = int.from_bytes(file.read(8), "little")
            if n > _MAX_HEADER:
                raise damaged
            header = TypeAdapter(dict[str, Any]).validate_python(json.loads(file.read(n)))
            size = file.seek(0, 2) - 8 - n
        header.pop("__metadata__", None)
        entries = TypeAdapter(dict[str, _Entry]).validate_python(header)
    except (NotRegular, ValueError, RecursionError):  # a ValidationError is a ValueError
        raise damaged from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): check its permissions") from None
    found = {}
    for name, entry in entries.items():
        if entry.dtype not in _TYPES:
            raise ModelFileError(
                f"{path}: {name} has the type {entry.dtype}, which cannot be converted: "
                "give a head in BF16, F16 or F32"
            )
        start, end = entry.data_offsets
        n_bytes = math.prod(entry.shape) * np.dtype(_TYPES[entry.dtype]).itemsize
        if min((0, *entry.shape)) < 0 or not 0 <= start <= end <= size or end - start != n_bytes:
            raise damaged
        found[name] = StoredTensor(8 + n + start, entry.dtype, tuple(entry.shape))
    return found
