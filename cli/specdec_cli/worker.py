"""`specdec worker`: lend this machine to a main model on another one."""

import os
import signal
import sys
import threading
from typing import Annotated

from typer import Option

from spec_local.errors import SpecLocalError
from spec_local.text import counted
from specdec_cli import exits, render

_PORT = 50052  # that of llama.cpp's rpc-server


def worker(
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen on: loopback, or one of a private network.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, metavar="<int>", help="Port to listen on.")] = _PORT,
    threads: Annotated[
        int | None, Option("--threads", "-t", min=1, help="Number of threads (default: one per usable core).")
    ] = None,
) -> None:
    """Lend this machine to a main model that is too large for another machine.

    On the other machine, --workers HOST:PORT sends layers of the model to this
    one, which needs no model file. Both need the same version of specdec. There
    is no password and no encryption: anyone who can reach the address can use and
    crash the worker, and read what it computes.

    Examples:

      specdec worker
      specdec worker --host 192.168.1.7
    """
    with exits.guarded():
        from spec_local.llama import workers
        from spec_local.system.machine import default_threads, is_loopback

        host = workers.private(host)
        workers.check_free(host, port)
        threads = threads or default_threads()
        if not is_loopback(host):
            render.note(
                "specdec: there is no password and no encryption: anyone who can reach this address can use "
                "and crash this process"
            )
        ended, failed = threading.Event(), list[SpecLocalError]()

        def serve() -> None:
            try:
                workers.serve(host, port, threads)
            except SpecLocalError as error:
                failed.append(error)
            ended.set()

        for signum in (signal.SIGINT, *render.ENDING):
            signal.signal(signum, lambda *_: ended.set())
        render.note(f"specdec: worker at {host}:{port}, {counted(threads, 'thread')}; Ctrl-C ends it")
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # llama.cpp reports each connection there
        threading.Thread(target=serve, daemon=True).start()  # it never returns, and takes no signals
        ended.wait()
        if failed:
            raise failed[0]
        os._exit(exits.OK)
