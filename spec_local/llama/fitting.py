"""The memory of the devices that models run on: what is free, and how many layers fit into that of GPUs."""

from collections.abc import Callable, Sequence
from pathlib import Path

from spec_local.llama.devices import Gpu, Offload, usable_gpus
from spec_local.llama.gguf_tensors import bytes_by_layer, parts
from spec_local.llama.memory import free_memory
from spec_local.llama.model import Model

MARGIN = 1 << 30
"""Bytes of each GPU that are left free, for compute buffers and other programs; as in llama.cpp's fitting."""


def free_bytes(offload: Offload) -> int:
    """Bytes that models can take: of separate GPUs that are to hold all layers, or else of this machine."""
    used = usable_gpus(offload) if offload.layers < 0 else []
    return _free(used) if used and not any(gpu.is_integrated for gpu in used) else free_memory()


def load_fitting(path: Path, offload: Offload, n_tokens: int, *, load_mtp: bool = False) -> Model:
    """Load a model with as many layers on GPUs as fit beside a KV cache in f16 for so many tokens.

    Raises:
        SpecLocalError: see `Model`.
    """
    n = n_that_fit(path, offload, lambda header: header.kv_bytes(n_tokens))
    return Model(path, offload=offload, n_offloaded=n, load_mtp=load_mtp)


def n_that_fit(
    path: Path, offload: Offload, context_bytes: Callable[[Model], int], reserved: int = 0
) -> int | None:
    """The number of layers to offload; None: all that `offload` asks for.

    Args:
        path: the model's file.
        context_bytes: of the KV caches and states of all its contexts, given its header.
        reserved: bytes on the same GPUs for other models.
    """
    used = usable_gpus(offload)
    if not used or offload.layers >= 0:
        return None
    header = Model(path, weights=False)
    try:
        layers, output = bytes_by_layer(path, header.n_layers)
        of_context = context_bytes(header) / max(1, header.n_layers)
    finally:
        header.close()
    n = _fitting([*(size + of_context for size in layers), output], _free(used) - reserved)
    return None if n > header.n_layers else n


def fit_easily(paths: Sequence[Path], offload: Offload) -> bool:
    """Whether all layers of some models fit, whatever their contexts are; also without a GPU."""
    used = usable_gpus(offload)
    return not used or offload.layers >= 0 or 2 * size_of_files(paths) < _free(used)


def size_of_files(paths: Sequence[Path]) -> int:
    """Bytes of models, whose files may be split; a missing file has none."""
    return sum(part.stat().st_size for path in paths if path.is_file() for part in parts(path))


def _free(used: Sequence[Gpu]) -> int:
    return sum(max(0, gpu.free - MARGIN) for gpu in used)


def _fitting(sizes: Sequence[float], free: float) -> int:
    """The number of last layers, the output matrix being the last of all, whose bytes fit together."""
    n, taken = 0, 0.0
    for size in reversed(sizes):
        taken += size
        if taken > free:
            break
        n += 1
    return n
