"""Read ``mask_embedding.pt``: the vector of the mask token, where the main model's was not trained."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.conversion.checkpoint import read_values
from spec_local.conversion.torch_file import StoredTensor, read_torch_values
from spec_local.errors import ModelFileError


def read_mask_embedding(folder: Path, n_embd: int) -> tuple[int | None, NDArray[np.float32]] | None:
    """The mask token, if the file states it, and its vector of `n_embd` values; None: there is no such file.

    Raises:
        ModelFileError: it is damaged, or has something else than such a vector.
    """
    path = folder / "mask_embedding.pt"
    if not path.exists():
        return None
    found = read_torch_values(path)
    token, vector = found.get("mask_token_id"), found.get("embedding", found.get(""))
    if not isinstance(token, int | None) or not isinstance(vector, StoredTensor) or vector.shape != (n_embd,):
        raise ModelFileError(f"{path} has no vector of {n_embd} values: download the head again")
    return token, read_values(path, vector).astype(np.float32, copy=False)
