"""Making a smaller copy of a model with llama.cpp's own quantizer.

llama.cpp may answer a file that it does not like with an abort. As a program (``python -m spec_local.llama.quantize``) this
module does the work in a process that may die: see `spec_local.models.quantized_copy`.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from spec_local.child_process import child_main
from spec_local.errors import BackendError, InvalidRequest
from spec_local.files import replacing
from spec_local.llama import runtime
from spec_local.llama.model import check_header
from spec_local.machine import default_threads

KINDS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")
"""Of a copy as a draft."""
BLOCK_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")
"""Those that fit a matrix of any width in 32s; the others want 256s, and llama.cpp takes another type for a matrix that has not."""


def quantize(source: Path, target: Path, kind: str, *, threads: int | None = None) -> Path:
    """Write a copy of `source` in another precision; `target` appears whole or not at all.

    Args:
        kind: one of `KINDS` or `BLOCK_KINDS`. A model that is quantized already may be quantized again.

    Raises:
        InvalidRequest: an unknown kind.
        ModelFileError: the source is no model.
        BackendError: llama.cpp could not do it; the message quotes its reason.
    """
    with replacing(target) as temporary:
        quantize_into(source, temporary, kind, threads=threads)
    return target


def quantized_size(source: Path, kind: str) -> int:
    """Bytes that all tensors of such a copy would take, to some kB; nothing is written. Raises as `quantize` does."""
    log = io.StringIO()  # llama.cpp says it nowhere else
    with contextlib.redirect_stderr(log):
        runtime.set_verbose(True)
        try:
            quantize_into(source, Path(os.devnull), kind, dry_run=True)
        finally:
            runtime.set_verbose(False)
    found = re.search(r"quant size *= *([0-9.]+) MiB", log.getvalue())
    if not found:
        raise BackendError(
            f"llama.cpp did not say how large a {kind} copy of {source} gets: please report it"
        )
    return round(float(found[1]) * 2**20)


def quantize_into(
    source: Path,
    target: Path,
    kind: str,
    *,
    embedding_kind: str | None = None,
    threads: int | None = None,
    dry_run: bool = False,
) -> None:
    """As `quantize`, in place: a target that cannot be finished is left as it is.

    embedding_kind: one of `BLOCK_KINDS` for the token embeddings and the output; None: `kind`, where it is among them, or else
        as llama.cpp likes it. It spends Q6_K or Q8_0 on the output of a model that is to be read; of a draft whose errors main
        refuses, that is a quarter of the time for half a guess in a hundred (docs/pairs.md).
    dry_run: write nothing.
    """
    if kind not in (*KINDS, *BLOCK_KINDS):
        raise InvalidRequest(f"quantization {kind!r} is unknown: give {', '.join(KINDS)}")
    if embedding_kind not in (None, *BLOCK_KINDS):
        raise InvalidRequest(
            f"quantization {embedding_kind!r} is not for embeddings: give {', '.join(BLOCK_KINDS)}"
        )
    check_header(source)
    lib = runtime.library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if embedding_kind or kind in BLOCK_KINDS:
        import gguf  # 0.1 s; the binding's own list is older

        chosen = gguf.GGMLQuantizationType[embedding_kind or kind]
        params.token_embedding_type = params.output_tensor_type = chosen
    params.nthread = threads or default_threads()
    params.allow_requantize = True
    params.dry_run = dry_run
    runtime.clear_log()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params):
        raise BackendError(
            f"{source} cannot be quantized ({runtime.failure_reason()}): "
            "see that the file is whole and the disk has room, or give another type"
        )


def _main(source: str, kind: str, target: str = "", threads: str = "0") -> None:
    """Without a target only the size is asked for. A target is written in place: give one that nobody else reads."""

    def work() -> dict[str, Any]:
        if not target:
            return {"size": quantized_size(Path(source), kind)}
        quantize_into(Path(source), Path(target), kind, threads=int(threads))
        return {}

    child_main(work, partial=Path(target) if target else None)


if __name__ == "__main__":
    _main(*sys.argv[1:])
