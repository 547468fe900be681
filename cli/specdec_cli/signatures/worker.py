"""The options of `specdec worker`."""

from dataclasses import dataclass

from specdec_cli.parameters import option

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
