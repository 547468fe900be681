"""Making a smaller copy of a model with llama.cpp's own quantizer."""

import os
from pathlib import Path

from spec_local.errors import BackendError, InvalidRequest
from spec_local.files import replacing
from spec_local.llama import runtime
from spec_local.llama.context import default_threads
from spec_local.llama.model import check_header

KINDS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")


def quantize(source: Path, target: Path, kind: str, *, threads: int | None = None) -> Path:
    """Write a copy of `source` in another precision; `target` appears whole or not at all.

    Args:
        kind: one of `KINDS`. A model that is quantized already may be quantized again.

    Raises:
        InvalidRequest: an unknown kind.
        ModelFileError: the source is no model.
        BackendError: llama.cpp could not do it; the message quotes its reason.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"quantization {kind!r} is unknown: give {', '.join(KINDS)}")
    check_header(source)
    lib = runtime.library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = threads or default_threads()
    params.allow_requantize = True
    with replacing(target) as temporary:
        runtime.forget_complaints()
        if lib.llama_model_quantize(os.fsencode(source), os.fsencode(temporary), params):
            raise BackendError(f"{source} cannot be quantized ({runtime.reason('llama.cpp gave no reason')})")
    return target
