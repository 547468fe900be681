"""Models without their weights: what a GGUF file says of itself, in a moment and whatever its size."""

import sys
from pathlib import Path
from typing import Any

from spec_local.child_process import child_main, run_child
from spec_local.errors import ModelFileError
from spec_local.llama.model import Model, check_header


def open_header(path: Path) -> Model:
    """The model of a file, without weights; a damaged header takes a child down, and not this process.

    Raises:
        ModelFileError, ModelError: see `Model`.
    """
    check_header(path)
    verdict = run_child("spec_local.llama.headers", str(path))
    if verdict.crash:
        raise ModelFileError(
            f"{path} takes llama.cpp down ({verdict.crash}): download it again, or run specdec doctor if others do so too"
        )
    return Model(path, weights=False)  # what the child was refused is raised here, with its type


def _read(path: Path) -> dict[str, Any]:
    model = Model(path, weights=False)
    for token in range(model.vocabulary.n_tokens):
        model.vocabulary.piece(token)
    return {"size": model.size, "kv": model.kv_bytes(1)}


if __name__ == "__main__":
    child_main(lambda: _read(Path(sys.argv[1])))
