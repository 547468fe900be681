"""The options of `specdec doctor`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check that llama.cpp runs on this machine, and show its GPUs, CPU kernels, and what it can read.

    Examples:

      specdec doctor
      specdec doctor --fix
      specdec doctor --fix kernels
      specdec doctor --report > my-laptop.toml
    """

    part: Annotated[
        Literal["kernels", "pictures", "gpu", "rpc"] | None,
        Argument(
            metavar="PART",
            help="kernels: with --fix, compare the CPU kernels with llama.cpp's again. pictures: with --fix, "
            "rebuild llama-cpp-python if it cannot read images and sound. gpu: with --fix, rebuild it for a "
            "GPU. rpc: also check llama.cpp's RPC backend, which --workers needs.",
        ),
    ] = None
    fix: Annotated[
        bool,
        Option(
            "--fix",
            help="Rebuild llama-cpp-python if it crashes (takes minutes), and compile missing CPU kernels.",
        ),
    ] = False
    report: Annotated[
        bool, Option("--report", help="Print only a TOML report: this processor and its measurements.")
    ] = False
