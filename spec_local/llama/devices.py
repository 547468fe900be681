"""The devices that models run on: the CPU, and the GPUs that the installed llama.cpp finds."""

import ctypes
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spec_local.errors import InvalidRequest
from spec_local.llama import runtime

AUTO, GPU, CPU = "auto", "gpu", "cpu"
"""Devices to ask for: where the models are fastest, llama.cpp's choice of GPUs, and none of them."""
_SEPARATE, _INTEGRATED = 1, 2  # ggml_backend_dev_type
_NAMES = {"mtl": "metal"}  # llama.cpp's own, where people use another
_WORKER = "rpc"  # llama.cpp's name of the devices of other machines
_PATTERN = re.compile(r"[a-z]+\d*")


@dataclass(frozen=True, slots=True)
class Offload:
    """Where the layers of a model run.

    Attributes:
        layers: number of layers on GPUs, the last ones of the model; negative: as many as fit.
        gpu: the name of the GPU; empty: those that llama.cpp chooses, which are all separate ones, or else an
            integrated one.
    """

    layers: int = -1
    gpu: str = ""

    def __str__(self) -> str:
        return f"{self.layers}@{self.gpu}" if self.gpu else str(self.layers)

    @classmethod
    def parse(cls, text: str) -> "Offload":
        """The inverse of `str`."""
        layers, _, gpu = text.partition("@")
        return cls(int(layers), gpu)


ON_CPU, OFFLOADED = Offload(0), Offload()
"""All layers on the CPU, and as many as fit on the GPUs that llama.cpp chooses."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as llama.cpp sees it.

    Attributes:
        name: as `device` takes it, such as ``metal``, ``vulkan0`` or ``cuda1``.
        description: of the hardware, by its driver.
        is_integrated: whether its memory is that of the CPU.
        total, free: bytes of memory that it can use.
        pointer: the ``ggml_backend_dev_t``.
    """

    name: str
    description: str
    is_integrated: bool
    total: int
    free: int
    pointer: int


def gpus() -> list[Gpu]:
    """The GPUs that llama.cpp can use, in its order; none if it was built for the CPU only."""
    if not runtime.library().llama_supports_gpu_offload():
        return []
    functions, found, seen = runtime.ggml(), list[Gpu](), Counter[str]()
    for i in range(functions.ggml_backend_dev_count()):
        pointer = functions.ggml_backend_dev_get(i)
        kind = functions.ggml_backend_dev_type(pointer)
        own = functions.ggml_backend_dev_name(pointer).decode().lower()
        if kind not in (_SEPARATE, _INTEGRATED) or own.startswith(_WORKER):
            continue
        name = _NAMES.get(own.rstrip("0123456789"), own)
        seen[name] += 1
        if seen[name] > 1:  # more than one with a name without a number
            name = f"{name}{seen[name] - 1}"
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        functions.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
        description = functions.ggml_backend_dev_description(pointer).decode("utf-8", "replace")
        found.append(Gpu(name, description.strip(), kind == _INTEGRATED, total.value, free.value, pointer))
    return found


def usable_gpus(offload: Offload) -> list[Gpu]:
    """The GPUs that hold layers of a model; those of llama.cpp's choice, if none is named.

    Raises:
        InvalidRequest: there is no GPU of this name.
    """
    if not offload.layers:
        return []
    found = gpus()
    if offload.gpu:
        return [_named(offload.gpu, found)]
    return [gpu for gpu in found if not gpu.is_integrated] or found[:1]


def check_device(
    device: str, gpu_layers: int | None = None, workers: Sequence[str] = (), *, setting: str = "device"
) -> None:
    """Check, without loading llama.cpp, that a device can be one, and fits the other options.

    Args:
        setting: the name of the option.
        gpu_layers: as given by the user; None: not given.
        workers: addresses of other machines that hold the main model's layers.

    Raises:
        InvalidRequest: it does not.
    """
    device = _plain(device)
    if device == AUTO:
        return
    if not _PATTERN.fullmatch(device):
        raise InvalidRequest(
            f"`{setting}={device!r}` is unknown: give auto, gpu, cpu, or a name that specdec doctor shows"
        )
    if workers:
        raise InvalidRequest(
            f"`{setting}={device}` is for models on this machine alone: remove it, or remove `workers`"
        )
    if gpu_layers is not None and (gpu_layers == 0) != (device == CPU):
        raise InvalidRequest(
            f"`{setting}={device}` contradicts `gpu_layers={gpu_layers}`: remove one of them"
        )


def fixed_offload(
    device: str, gpu_layers: int | None = None, workers: Sequence[str] = (), *, setting: str = "device"
) -> Offload | None:
    """Where a model's layers run; None: the fastest device is to be found out.

    Args:
        device, gpu_layers, workers, setting: see `check_device`.

    Raises:
        InvalidRequest: the device cannot be used.
    """
    device = _plain(device)
    check_device(device, gpu_layers, workers, setting=setting)
    if device == CPU:
        return ON_CPU
    layers = OFFLOADED.layers if gpu_layers is None else gpu_layers
    if device == AUTO:
        found = gpu_layers is None and not workers and gpus()
        return None if found else Offload(layers)
    if device != GPU:
        return Offload(layers, _named(device, gpus(), setting).name)
    if not gpus():
        raise _missing(device, [], setting)
    return Offload(layers)


def offload_of(device: str, gpu_layers: int | None) -> Offload:
    """`fixed_offload` where the fastest device is not to be found out.

    Raises:
        InvalidRequest: the device cannot be used.
    """
    return fixed_offload(device, gpu_layers) or OFFLOADED


def candidates() -> dict[str, Offload]:
    """The devices to compare for ``auto``, by name: the GPUs that llama.cpp chooses, and the CPU."""
    used = usable_gpus(OFFLOADED)
    return {**({used[0].name if len(used) == 1 else GPU: OFFLOADED} if used else {}), CPU: ON_CPU}


def _plain(device: str) -> str:
    """A device as it is compared: llama.cpp writes CUDA0, and PyTorch cuda:0."""
    return device.lower().replace(":", "")


def _named(name: str, found: Sequence[Gpu], setting: str = "device") -> Gpu:
    for gpu in found:
        if gpu.name == name:
            return gpu
    raise _missing(name, found, setting)


def _missing(name: str, found: Sequence[Gpu], setting: str) -> InvalidRequest:
    if found:
        names = ", ".join([*(gpu.name for gpu in found), CPU])
        return InvalidRequest(f"`{setting}={name}` is unknown: this machine has {names}")
    return InvalidRequest(
        f"`{setting}={name}` cannot be used, as the installed llama.cpp finds no GPU: run specdec doctor "
        f"--fix gpu, or give `{setting}={CPU}`"
    )
