"""How many layers of a model fit into the memory of GPUs; the others stay on the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path

from spec_local.llama.devices import Gpu, Offload, usable_gpus
from spec_local.llama.gguf_tensors import bytes_by_layer, parts
from spec_local.llama.model import Model

MARGIN = 1 << 30
"""Bytes of each GPU that are left free, for compute buffers and other programs; as in llama.cpp's fitting."""


def n_that_fit(
    path: Path,
    offload: Offload,
    context_bytes: Callable[[Model], int],
    beside: Path | None = None,
) -> int | None:
    """The number of layers to offload; None: all that `offload` asks for.

    Args:
        path: the model's file.
        context_bytes: of the KV caches and states of all its contexts, given its header.
        beside: another model that will be on the same GPUs.
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
    reserved = size_of_files([beside]) if beside else 0
    n = _fitting([*(size + of_context for size in layers), output], _free(used) - reserved)
    return None if n > header.n_layers else n


def fit_easily(paths: Sequence[Path], offload: Offload) -> bool:
    """Whether all layers of some models fit, whatever their contexts are; also without a GPU."""
    used = usable_gpus(offload)
    return not used or offload.layers >= 0 or 2 * size_of_files(paths) < _free(used)


def size_of_files(paths: Sequence[Path]) -> int:
    """Bytes of models, whose files may be split; a missing file has none."""
    return sum(part.stat().st_size for path in paths for part in parts(path))


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
