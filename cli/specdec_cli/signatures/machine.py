"""The options of the commands about this machine: doctor, worker and config."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from typer import Context

from specdec_cli.commands import config_option
from specdec_cli.parameters import REQUIRED, argument, option


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check that llama.cpp runs on this machine, and show its GPUs, CPU kernels, and what it can read.

    Examples:

      specdec doctor
      specdec doctor --fix
      specdec doctor --fix kernels
      specdec doctor --report > my-laptop.toml
    """

    part: Literal["kernels", "images", "gpu", "rpc"] | None = argument(
        metavar="PART",
        help="kernels: with --fix, compare the CPU kernels with llama.cpp's again. images: with --fix, "
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


_PORT = 50052  # that of llama.cpp's rpc-server


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Lend this machine to a main model that is too large for another machine.

    On the other machine, --workers HOST:PORT sends layers of the model to this
    one, which needs no model file. Both need the same version of specdec. There
    is no password and no encryption: anyone who can reach the address can use and
    crash the worker, and read what it computes.

    Examples:

      specdec worker
      specdec worker --host 192.168.1.7
    """

    host: str = option(
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address to listen on: loopback, or one of a private network.",
    )
    port: int = option(default=_PORT, min=1, max=65535, metavar="<int>", help="Port to listen on.")
    threads: int | None = option(
        "--threads", "-t", min=1, help="Number of threads (default: one per usable core)."
    )


_name = partial(
    argument,
    default=REQUIRED,
    metavar="NAME",
    help="Option, such as top-k; for one command, such as chat.top-k.",
)


@dataclass(frozen=True, kw_only=True)
class ConfigPathOptions:
    """Print the path of the config file, even if it does not exist.

    Example:

      $EDITOR "$(specdec config path)"
    """

    config: str | None = config_option()


@dataclass(frozen=True, kw_only=True)
class ConfigShowOptions:
    """Print the options that are set, with their source: a variable, or a line of the config file.

    Examples:

      specdec config show
      specdec config show chat --all
    """

    ctx: Context
    command: list[str] | None = argument(help="Command, such as chat or models pull (default: all).")
    all_: bool = option("--all", default=False, help="Also show options that have their default value.")
    config: str | None = config_option()


@dataclass(frozen=True, kw_only=True)
class ConfigSetOptions:
    """Set an option in the config file, for all commands or for one.

    Examples:

      specdec config set main qwen2.5-coder-7b
      specdec config set chat.temp 0.5
      specdec config set stop END "User:"
    """

    ctx: Context
    name: str = _name()
    values: list[str] = argument(
        default=REQUIRED, metavar="VALUE", help="Value; a repeatable option takes several."
    )
    config: str | None = config_option()


@dataclass(frozen=True, kw_only=True)
class ConfigUnsetOptions:
    """Remove an option from the config file.

    Example:

      specdec config unset chat.temp
    """

    ctx: Context
    name: str = _name()
    config: str | None = config_option()
