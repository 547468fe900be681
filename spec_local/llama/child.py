"""A program of ours in a child process, which may be killed by what llama.cpp does there; this one learns what became of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_local import kernels
from spec_local.errors import SpecLocalError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the child.

    crash: the signal that ended it, such as ``SIGILL``, or how else it died; None if it lived.
    error: the error it reported. facts: what it found out, if all went well.
    """

    crash: str | None
    error: str | None
    facts: dict[str, Any]

    @property
    def works(self) -> bool:
        return self.crash is None and self.error is None


def in_child(module: str, *arguments: str) -> Verdict:
    """Run a module that ends in `answer`; it is killed where this process is interrupted, and ends where this one dies."""
    # -P: a module in the working folder that is called like one of ours must not take its place.
    command = [sys.executable, "-P", "-m", module, *arguments]
    # Without the first, a debugger is started to print a backtrace.
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", kernels.VARIABLE: kernels.mode()}
    reading, writing = os.pipe()  # never written to: its end is the end of this process
    try:
        child = subprocess.run(command, stdin=reading, capture_output=True, env=environment, check=False)
    finally:
        os.close(reading)
        os.close(writing)
    with contextlib.suppress(ValueError, IndexError, AttributeError):
        said = json.loads(child.stdout.splitlines()[-1])
        if child.returncode == 0:
            return Verdict(None, said.get("error"), said)
    if child.returncode < 0:
        with contextlib.suppress(ValueError):
            return Verdict(signal.Signals(-child.returncode).name, None, {})
        return Verdict(f"signal {-child.returncode}", None, {})
    last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return Verdict(last[0] if last else f"exit code {child.returncode}", None, {})


def answer(work: Callable[[], dict[str, Any]], *, partial: Path | None = None) -> None:
    """Do a child's work, print what came of it, and end the process.

    Args:
        work: gives the facts.
        partial: a file that goes if the parent dies before the work is done.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def leave_with_parent() -> None:
        os.read(0, 1)
        if partial:
            partial.unlink(missing_ok=True)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        said = work()
    except SpecLocalError as error:
        said = {"error": str(error)}
    print(json.dumps(said), flush=True)
    os._exit(0)  # the answer is given; nothing that happens while freeing may change it
