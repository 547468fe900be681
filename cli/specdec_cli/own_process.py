"""Commands with --workers run in a child process: when a worker dies, llama.cpp aborts its process."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

from spec_local.errors import BackendCrash
from specdec_cli import exits, last_resort, render, terminal

_MARK = "_SPECDEC_CHILD"
"""Set in the environment of the child."""


def run(workers: str) -> int | None:
    """Run this command line in a child process, and return its exit code; None: this is the child.

    Raises:
        InvalidRequest: one of the workers has no valid address.
        BackendCrash: a signal ended the child; the error names the workers that do not answer.
    """
    from spec_local.llama.workers import no_answer, parse, silent, watch

    if os.environ.get(_MARK):
        watch.on_silence = lambda address: last_resort.end(exits.FAILURE, no_answer(address))
        return None
    addresses = parse(workers.split(","))
    command = [sys.executable, "-P", "-m", "specdec_cli", *sys.argv[1:]]
    # Without the second one, ggml starts a debugger after a crash.
    environment = os.environ | {_MARK: "1", "GGML_NO_BACKTRACE": "1"}
    restore_terminal = terminal.restoration()
    _prevent_core_dumps()
    with subprocess.Popen(command, env=environment) as child:

        def pass_on(signum: int) -> None:
            if signum != signal.SIGINT or not sys.stdin.isatty():  # a terminal sends Ctrl-C to both
                child.send_signal(signum)

        with last_resort.handling((*render.ENDING, signal.SIGINT), pass_on):
            code = child.wait()
    if code >= 0:
        return code
    restore_terminal()
    if -code in render.ENDING:
        return last_resort.BY_SIGNAL - code
    if missing := silent(addresses):
        raise BackendCrash(f"no worker answers at {', '.join(missing)} any more: start it, and repeat this")
    name = signal.Signals(-code).name
    raise BackendCrash(f"llama.cpp ended ({name}); all workers answer now: try again, or without --workers")


def _prevent_core_dumps() -> None:
    """Let a child that dies write no copy of the model's memory to disk."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
