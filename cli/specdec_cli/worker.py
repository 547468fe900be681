"""`specdec worker`: lend this machine to a main model on another one."""

import os
import signal
import sys
import threading

from spec_local.errors import SpecLocalError
from spec_local.llama import workers
from spec_local.system.machine import default_threads, is_loopback
from spec_local.text import counted
from specdec_cli import exits, render
from specdec_cli.signatures.machine import WorkerOptions


def worker(options: WorkerOptions) -> None:
    host, port, threads = workers.private(options.host), options.port, options.threads or default_threads()
    workers.check_free(host, port)
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
