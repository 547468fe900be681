"""Make a quantized copy of a model with llama.cpp's quantizer.

llama.cpp can abort on files that it does not support. ``python -m spec_local.llama.quantize`` therefore does
the same in a separate process.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from spec_local.errors import BackendError, InvalidRequest
from spec_local.llama import runtime
from spec_local.llama.gguf_header import read_metadata
from spec_local.llama.model_file import check_header
from spec_local.system.child_process import child_main
from spec_local.system.files import replacing
from spec_local.system.machine import default_threads

KINDS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")
"""Quantization types for quantized copies."""
BLOCK_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")
"""Types for matrix widths that are multiples of 32. The others need multiples of 256; otherwise llama.cpp
chooses another type."""


def quantize(source: Path, target: Path, kind: str, *, threads: int | None = None) -> Path:
    """Write a quantized copy of `source` to `target`, atomically.

    Args:
        kind: one of `KINDS` or `BLOCK_KINDS`. The source may be quantized, too.

    Raises:
        InvalidRequest: an unknown kind.
        ModelFileError: the source is not a model file.
        BackendError: llama.cpp failed; the message quotes its reason.
    """
    with replacing(target) as temporary:
        quantize_into(source, temporary, kind, threads=threads)
    return target


def quantized_size(source: Path, kind: str) -> int:
    """Return the size in bytes of all tensors of such a copy, to within a few kB, without writing it.

    Raises: see `quantize`.
    """
    log = io.StringIO()  # llama.cpp reports the size only in its log
    with contextlib.redirect_stderr(log):
        runtime.set_verbose(True)
        try:
            quantize_into(source, Path(os.devnull), kind, dry_run=True)
        finally:
            runtime.set_verbose(False)
    found = re.search(r"quant size *= *([0-9.]+) MiB", log.getvalue())
    if not found:
        raise BackendError(
            f"llama.cpp did not report the size of a {kind} copy of {source}: please report it"
        )
    return round(float(found[1]) * 2**20)


def quantize_into(
    source: Path,
    target: Path,
    kind: str,
    *,
    threads: int | None = None,
    dry_run: bool = False,
) -> None:
    """Write a quantized copy as `quantize` does, but not atomically: a failure leaves an incomplete target.

    Args:
        dry_run: write nothing.
    """
    if kind not in (*KINDS, *BLOCK_KINDS):
        raise InvalidRequest(f"quantization {kind!r} is unknown: give {', '.join(KINDS)}")
    check_header(source)
    if read_metadata(source).get("eagle3.later_layers"):
        raise InvalidRequest(
            f"{source} is a head with several layers, which llama.cpp cannot quantize: convert the original "
            "with specdec draft convert and `kind`"
        )
    lib = runtime.library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if kind in BLOCK_KINDS:
        import gguf  # takes 0.1 s; the types in llama-cpp-python are outdated

        # By default, these are Q6_K or Q8_0. In a draft model, that takes a quarter of the time, and improves
        # the acceptance rate by only half a percent (docs/notes/measurements.md).
        params.token_embedding_type = params.output_tensor_type = gguf.GGMLQuantizationType[kind]
    params.nthread = threads or default_threads()
    params.allow_requantize = True
    params.dry_run = dry_run
    runtime.clear_log()
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params):
        raise BackendError(
            f"{source} cannot be quantized ({runtime.failure_reason()}): "
            "check that the file is complete and the disk has free space, or give another type"
        )


def _main(source: str, kind: str, target: str = "", threads: str = "0") -> None:
    """Write a copy directly to `target`; without a target, report the copy's size."""

    def work() -> dict[str, Any]:
        if not target:
            return {"size": quantized_size(Path(source), kind)}
        quantize_into(Path(source), Path(target), kind, threads=int(threads))
        return {}

    child_main(work, partial=Path(target) if target else None)


if __name__ == "__main__":
    _main(*sys.argv[1:])
