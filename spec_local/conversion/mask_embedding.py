"""Read ``mask_embedding.pt``: the vector of the mask token, where the main model's was not trained."""

import pickletools
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local import bfloat16
from spec_local.errors import ModelFileError

_NAME = "mask_embedding.pt"
_MAX_SIZE = 1 << 24  # bytes of the largest part, which has some kB
_TYPES = {
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch BFloat16Storage": "<u2",
}
_VALUES = ("BININT", "BININT1", "BININT2", "BINUNICODE", "GLOBAL")
"""Operations of pickle that PyTorch writes for numbers, texts and names of classes."""


def read_mask_embedding(folder: Path, n_embd: int) -> tuple[int | None, NDArray[np.float32]] | None:
    """The mask token, if the file states it, and its vector of `n_embd` values; None: there is no such file.

    The file is a pickle, which is not executed: that could run any code.

    Raises:
        ModelFileError: it is damaged, or has another content than PyTorch writes for a vector.
    """
    path = folder / _NAME
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            record = next(name for name in file.namelist() if name.endswith("/data.pkl"))
            operations = pickletools.genops(_read(file, record))
            values = [value for operation, value, _ in operations if operation.name in _VALUES]
            name = "mask_token_id"
            token = values[values.index(name) + 1] if name in values else None
            # "storage", its type, its number, its device, and how many values it has
            kind, number, _, n = values[values.index("storage") + 1 :][:4]
            if n != n_embd or not isinstance(token, int | None):
                raise ValueError
            data = np.frombuffer(_read(file, f"{record[:-8]}data/{number}"), np.dtype(_TYPES[str(kind)]))
            vector = bfloat16.decode(data) if data.dtype.kind == "u" else data.astype(np.float32)
            if vector.shape != (n_embd,):
                raise ValueError
    except Exception:  # of zipfile and pickletools, which have many for damaged files
        raise ModelFileError(f"{path} has no vector of {n_embd} values: download the head again") from None
    return token, vector


def _read(file: zipfile.ZipFile, name: str) -> bytes:
    if file.getinfo(name).file_size > _MAX_SIZE:
        raise ValueError
    return file.read(name)
