"""Open a model without its weights: reading a GGUF header is fast, regardless of the file's size."""

import sys
from pathlib import Path
from typing import Any

from spec_local.errors import ModelFileError
from spec_local.llama.later_model import LaterModel
from spec_local.llama.model import Model
from spec_local.llama.model_file import check_header
from spec_local.system.child_process import child_main, run_child


def open_header(path: Path) -> Model:
    """Open a model without weights, first in a child process: a damaged header can crash llama.cpp.

    Raises:
        ModelFileError, ModelError: see `Model`.
    """
    check_header(path)
    result = run_child("spec_local.llama.headers", str(path))
    if result.crash:
        raise ModelFileError(
            f"{path} crashes llama.cpp ({result.crash}): download it again; if other models crash too, "
            "run specdec doctor"
        )
    return Model(path, weights=False)  # if the child reported an error, this raises it with its type


def _read(path: Path) -> dict[str, Any]:
    model = Model(path, weights=False)
    if not model.is_head:  # a head may have no tokenizer, which it does not need
        model.vocabulary.exercise()
    if model.n_later:
        LaterModel(model, weights=False)
    return {"size": model.size, "kv": model.kv_bytes(1)}


if __name__ == "__main__":
    child_main(lambda: _read(Path(sys.argv[1])))
