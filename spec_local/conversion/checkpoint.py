"""Read a folder in the layout of the Hugging Face Hub: config.json, and tensors in safetensors files."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter, ValidationError

from spec_local import bfloat16
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


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor is. start: in bytes from the beginning of the file."""

    path: Path
    start: int
    kind: str
    shape: tuple[int, ...]


class Checkpoint:
    """The configuration and the tensors of a model that has not been converted to GGUF.

    Args:
        folder: contains config.json and ``*.safetensors``.

    Attributes:
        config: the content of config.json.

    Raises:
        ModelFileError: a file is missing or damaged, or a tensor is in two files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder / "config.json")
        self._tensors: dict[str, _Tensor] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{folder} contains no *.safetensors: give the folder of a head")
        for file in files:
            for name, tensor in _read_header(file).items():
                if name in self._tensors:
                    raise ModelFileError(f"{folder} contains the tensor {name} twice: download it again")
                self._tensors[name] = tensor

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor: rows first, as in PyTorch."""
        return self._find(name).shape

    def tensor(self, name: str) -> NDArray[np.float32] | NDArray[np.int64]:
        """The values of a tensor: float32, or int64 for integers and booleans.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        found = self._find(name)
        kind = np.dtype(_TYPES[found.kind]).newbyteorder("<")
        try:
            with opened(found.path) as file:
                data: NDArray[Any] = np.fromfile(file, kind, math.prod(found.shape), offset=found.start)
        except OSError as error:
            raise ModelFileError(f"{found.path} cannot be read ({error.strerror}): check it") from None
        if found.kind == "BF16":
            data = bfloat16.decode(data)
        data = data.reshape(found.shape)
        if data.dtype.kind == "f":
            return data.astype(np.float32, copy=False)
        return data.astype(np.int64, copy=False)

    def _find(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise ModelFileError(f"{self.folder} has no tensor {name}: download it again")
        return self._tensors[name]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return TypeAdapter(dict[str, Any]).validate_json(read_bytes(path, _MAX_CONFIG))
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist: give the folder of a head") from None
    except (OSError, ValueError):
        raise ModelFileError(f"{path} cannot be read: download it again") from None


def _read_header(path: Path) -> dict[str, _Tensor]:
    """The tensors of a safetensors file, which are checked to be within it."""
    damaged = ModelFileError(f"{path} is damaged: download it again")
    try:
        with opened(path) as file:
            n = int.from_bytes(file.read(8), "little")
            if n > _MAX_HEADER:
                raise damaged
            header = json.loads(file.read(n))
            size = file.seek(0, 2) - 8 - n
        header.pop("__metadata__", None)
        entries = TypeAdapter(dict[str, _Entry]).validate_python(header)
    except (NotRegular, ValueError, AttributeError, RecursionError, ValidationError):
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
        found[name] = _Tensor(path, 8 + n + start, entry.dtype, tuple(entry.shape))
    return found
