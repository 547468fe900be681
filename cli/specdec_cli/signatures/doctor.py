"""The options of `specdec doctor`."""

from dataclasses import dataclass
from typing import Literal

from specdec_cli.parameters import argument, option


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check that llama.cpp runs on this machine, and show its GPUs, CPU kernels, and what it can read.

    Examples:

      specdec doctor
      specdec doctor --fix
      specdec doctor --fix kernels
      specdec doctor --report > my-laptop.toml
    """

    part: Literal["kernels", "pictures", "gpu", "rpc"] | None = argument(
        metavar="PART",
        help="kernels: with --fix, compare the CPU kernels with llama.cpp's again. pictures: with --fix, "
        "rebuild llama-cpp-python if it cannot read images and sound. gpu: with --fix, rebuild it for a "
        "GPU. rpc: also check llama.cpp's RPC backend, which --workers needs.",
    )
    fix: bool = option(
        default=False,
        help="Rebuild llama-cpp-python if it crashes (takes minutes), and compile missing CPU kernels.",
    )
    report: bool = option(
        default=False, help="Print only a TOML report: this processor and its measurements."
    )
