"""The devices of a Mac with Apple silicon: its GPU, which Metal programs, and its CPU."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from spec_local.errors import InvalidRequest
from spec_local.llama import runtime
from spec_local.system import machine

Device = Literal["metal", "cpu"]
DEVICES: tuple[Device, ...] = get_args(Device)
DeviceOption = Literal["auto", "metal", "cpu"]
"""``auto``: the fastest device for each model on a Mac; elsewhere, the GPU if there is one."""
GPU_LAYERS: Mapping[Device, int] = {"metal": -1, "cpu": 0}
"""Number of layers on the GPU; −1: all."""


def check_device(device: DeviceOption, gpu_layers: int | None, workers: Sequence[str] = ()) -> None:
    """Check, without loading llama.cpp, that a device fits this machine and the other options.

    Args:
        gpu_layers: as given by the user; None: not given.
        workers: addresses of other machines that hold the main model's layers.

    Raises:
        InvalidRequest: it does not.
    """
    if device == "auto":
        return
    if device == "metal" and not machine.is_apple_silicon():
        raise InvalidRequest(
            "`device=metal` is for Macs with Apple silicon, which this machine is not: remove it, or give "
            "`device=cpu`"
        )
    if workers:
        raise InvalidRequest(
            f"`device={device}` is for models on this machine alone: remove it, or remove `workers`"
        )
    if gpu_layers is not None and (gpu_layers == 0) != (device == "cpu"):
        raise InvalidRequest(f"`device={device}` contradicts `gpu_layers={gpu_layers}`: remove one of them")


def has_metal() -> bool:
    """Return whether models can run on Metal here."""
    return machine.is_apple_silicon() and bool(runtime.gpus())


def fixed_gpu_layers(
    device: DeviceOption, gpu_layers: int | None = None, workers: Sequence[str] = ()
) -> int | None:
    """Return the number of layers on the GPU, of each model; None: the fastest device is to be found out.

    Args:
        device, gpu_layers, workers: see `check_device`.

    Raises:
        InvalidRequest: the device cannot be used.
    """
    check_device(device, gpu_layers, workers)
    if device == "metal" and not has_metal():
        raise InvalidRequest(
            "`device=metal` cannot be used, as the installed llama.cpp was built without Metal: reinstall "
            'llama-cpp-python from source with CMAKE_ARGS="-DGGML_METAL=ON", or give `device=cpu`'
        )
    if gpu_layers is not None:
        return gpu_layers
    if device != "auto":
        return GPU_LAYERS[device]
    return None if has_metal() and not workers else GPU_LAYERS["metal"]


def gpu_layers_of(device: DeviceOption, gpu_layers: int | None) -> int:
    """Return the number of layers on the GPU, where the fastest device is not to be found out.

    Raises:
        InvalidRequest: the device cannot be used.
    """
    fixed = fixed_gpu_layers(device, gpu_layers)
    return GPU_LAYERS["metal"] if fixed is None else fixed
