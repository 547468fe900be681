"""Find the tensors in a file of ``torch.save``, such as pytorch_model.bin, without PyTorch.

Such a file is a ZIP archive: a pickle describes the tensors, and their values are in members that are not
compressed. Pickles can run any program when they are loaded: this one may only name tensors.
"""

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from spec_local.errors import ModelFileError
from spec_local.system.files import opened

_MAX_PICKLE = 16 << 20  # bytes; that of a head has some kB
_KINDS = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "BoolStorage": ("BOOL", 1),
}
"""Names of safetensors, and bytes of a value, by PyTorch's classes."""
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member: lengths of its name and of what follows it
_INVALID = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError),
    *(RecursionError, TypeError, ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. start: in bytes from the beginning. kind: as in safetensors."""

    start: int
    kind: str
    shape: tuple[int, ...]


class _Storage(NamedTuple):
    """A member of the archive. n: number of values."""

    kind: str
    size: int
    member: str
    n: int


class _View(NamedTuple):
    """A tensor in a storage, all in values. No pickle can change it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Raises:
        ModelFileError: it is damaged, or has something else than tensors.
    """
    found = read_torch_values(path)
    if any(not isinstance(each, StoredTensor) for each in found.values()):
        raise ModelFileError(f"{path} is damaged: download it again")
    return found


def read_torch_values(path: Path) -> dict[str, Any]:
    """The tensors of a file by name, and integers among them; one without a name is called "".

    Raises:
        ModelFileError: it is damaged, or has something else.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            (pickled,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
            if pickled.file_size > _MAX_PICKLE:
                raise ValueError
            folder = pickled.filename.removesuffix("data.pkl")
            content = _Tensors(BytesIO(archive.read(pickled))).load()
            if isinstance(content, _View):
                content = {"": content}
            return {
                name: each if isinstance(each, int) else _stored(archive, folder, each)
                for name, each in _named(content)
            }
    except _Refused as error:
        raise ModelFileError(
            f"{path} contains {error}, which is no tensor: give a head in safetensors"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): check it") from None
    except _INVALID:
        raise ModelFileError(f"{path} is damaged: download it again") from None


class _Refused(Exception):
    """The pickle names something else."""


class _Rebuild:
    """In place of PyTorch's functions, without attributes that a pickle could change."""

    __slots__ = ()

    def __call__(self, given: Any, *rest: Any) -> _View:
        if isinstance(given, _View):  # that of a parameter
            return given
        offset, shape, strides = rest[0], tuple(rest[1]), tuple(rest[2])
        if not isinstance(given, _Storage) or len(shape) != len(strides):
            raise TypeError
        if not all(isinstance(each, int) and each >= 0 for each in (offset, *shape, *strides)):
            raise TypeError
        return _View(given, offset, shape, strides)


class _Tensors(pickle.Unpickler):
    """Loads tensors as `_View`, and dictionaries of them, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_parameter":
                return _Rebuild()
            case "torch", _ if name in _KINDS:
                return _KINDS[name]
        raise _Refused(f"{module}.{name}"[:100])

    def persistent_load(self, pid: Any) -> _Storage:
        what, (kind, size), key, _, n = pid
        if what != "storage" or not isinstance(key, str) or not isinstance(n, int):
            raise ValueError
        return _Storage(kind, size, key, n)


def _named(content: Any) -> Sequence[tuple[str, _View | int]]:
    if not isinstance(content, dict):
        raise TypeError
    for name, each in content.items():
        if not isinstance(name, str) or not isinstance(each, _View | int):
            raise TypeError
    return list(content.items())


def _stored(archive: zipfile.ZipFile, folder: str, view: _View) -> StoredTensor:
    """Where a tensor is in the file."""
    storage, n = view.storage, math.prod(view.shape)
    member = archive.getinfo(f"{folder}data/{storage.member}")
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected:
            raise ValueError  # not contiguous
        expected *= size
    is_whole = member.compress_type == zipfile.ZIP_STORED and member.file_size == storage.n * storage.size
    if not is_whole or view.offset + n > storage.n or archive.fp is None:
        raise ValueError
    archive.fp.seek(member.header_offset)
    start = member.header_offset + _LOCAL_HEADER.size
    start += sum(_LOCAL_HEADER.unpack(archive.fp.read(_LOCAL_HEADER.size)))
    if start + member.file_size > archive.fp.seek(0, 2):
        raise ValueError
    return StoredTensor(start + view.offset * storage.size, storage.kind, view.shape)
