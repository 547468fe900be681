"""Run a module in a child process, so that a crash inside llama.cpp does not end this one.

The parent calls `run_child`, which returns the outcome; the module's main block calls `child_main`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_local.errors import SpecLocalError

DEADLINE_S = 300.0
"""For a child that reads headers or tiny files, which takes seconds: several minutes if the machine swaps."""


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The outcome of a child process.

    crash: the signal that killed the child, such as ``SIGILL``, the last line of its stderr, or that it was
    killed at its deadline; None if it did not crash. error: the message of the SpecLocalError that it raised,
    or None. facts: the result of its work, or the ``kind`` of its error.
    """

    crash: str | None
    error: str | None
    facts: dict[str, Any]

    @property
    def works(self) -> bool:
        return self.crash is None and self.error is None


def run_child(module: str, *arguments: str, deadline: float | None = DEADLINE_S) -> ChildResult:
    """Run a module whose main block calls `child_main`, and wait for it, at most `deadline` seconds.

    The child is killed if this call is interrupted, and exits if this process dies.
    """
    return run_children(module, [arguments], deadline=deadline)[0]


def run_children(
    module: str,
    calls: Sequence[Sequence[str]],
    *,
    deadline: float | None = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
) -> list[ChildResult]:
    """As `run_child`, with several children at the same time, one for the arguments of each call.

    Args:
        environment: variables of the children, besides those of this process.
    """
    # Otherwise ggml starts a debugger after a crash.
    variables = {**os.environ, "GGML_NO_BACKTRACE": "1", **(environment or {})}
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_child(module, arguments, variables)) for arguments in calls]
        until = None if deadline is None else time.monotonic() + deadline
        return [_result(child, deadline, until) for child in children]


@contextlib.contextmanager
def _child(
    module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    # -P: a file in the working directory must not shadow one of this package's modules.
    command = [sys.executable, "-P", "-m", module, *arguments]
    reading, writing = os.pipe()  # nothing is written: the pipe closes when this process ends
    try:
        with subprocess.Popen(
            command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as child:
            try:
                yield child
            finally:
                child.kill()  # has no effect on one that has ended
    finally:
        os.close(reading)
        os.close(writing)


def _result(child: "subprocess.Popen[bytes]", deadline: float | None, until: float | None) -> ChildResult:
    """Wait for a child."""
    try:
        output, errors = child.communicate(timeout=until and max(0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return ChildResult(f"killed after {deadline:.0f} s without a result", None, {})
    with contextlib.suppress(ValueError, IndexError, AttributeError):
        facts = json.loads(output.splitlines()[-1])
        if child.returncode == 0:
            return ChildResult(None, facts.get("error"), facts)
    if child.returncode < 0:
        with contextlib.suppress(ValueError):
            return ChildResult(signal.Signals(-child.returncode).name, None, {})
        return ChildResult(f"signal {-child.returncode}", None, {})
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
    return ChildResult(last[0] if last else f"exit code {child.returncode}", None, {})


def child_main(work: Callable[[], dict[str, Any]], *, partial: Path | None = None) -> None:
    """Run `work`, print its result as JSON for `run_child`, and end the process.

    Args:
        work: returns the facts; a SpecLocalError is reported as the error.
        partial: file to delete if the parent dies before the work is done.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def exit_with_parent() -> None:
        os.read(0, 1)
        if partial:
            partial.unlink(missing_ok=True)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        facts = work()
    except SpecLocalError as error:
        facts = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(facts), flush=True)
    os._exit(0)  # a crash while freeing memory must not change the result
