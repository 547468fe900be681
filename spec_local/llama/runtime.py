"""llama.cpp as a library: loading it once, and keeping what it says.

llama.cpp writes its log straight to stderr, and its reasons for a failure appear only there. The callback
below keeps the last lines instead, so that an error can quote them, and prints them only when asked to.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import re
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spec_local import kernels, machine
from spec_local.errors import InvalidRequest

# ggml_log_level of the bundled llama.cpp (the binding's own table is older).
_DEBUG, _INFO, _WARN, _ERROR, _CONTINUE = 1, 2, 3, 4, 5

_complaints: deque[tuple[int, str]] = deque(maxlen=50)
_state: dict[str, Any] = {"level": _DEBUG, "verbose": False}


def _on_log(level: int, text: bytes, _: object) -> None:
    level = _state["level"] if level == _CONTINUE else level
    _state["level"] = level
    line = text.decode("utf-8", "replace")
    if level >= _WARN:
        _complaints.append((level, line.strip()))
    if _state["verbose"]:
        sys.stderr.write(line)


@functools.cache
def library() -> Any:
    """The binding's low-level module: backend started, log captured, CPU kernels installed."""
    import llama_cpp

    callback = llama_cpp.llama_log_callback(_on_log)
    _state["callback"] = callback  # llama.cpp keeps a bare pointer to it
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    # A message after the interpreter has gone would call into freed memory.
    silent = ctypes.cast(ctypes.c_void_p(0), llama_cpp.llama_log_callback)
    # A finalizer, not atexit: finalizers run newest first, so that models and contexts are freed before it.
    weakref.finalize(llama_cpp, llama_cpp.llama_log_set, silent, None)
    llama_cpp.llama_backend_init()
    kernels.load()  # before any model: llama.cpp lists its buffer types once, when it opens the first
    return llama_cpp


class Weights:
    """A loaded model's: in memory as long as anybody holds this, or until they are closed.

    Whoever keeps a pointer into them holds this, too, and checks: llama.cpp dies of a pointer to what was freed.

    Args:
        free: what frees them, given the handle.
    """

    def __init__(self, free: Callable[[int], None], handle: int) -> None:
        self.close = weakref.finalize(self, free, handle)

    def check_open(self) -> None:
        """Raise InvalidRequest if they are closed."""
        if not self.close.alive:
            raise InvalidRequest("the model is closed: open it again")


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Within the block Ctrl-C and other requests to end wait for its end; a second one of a kind kills.

    Python runs their handlers between its own instructions, and while llama.cpp loads something these are all in
    `_on_log`: there, an exception is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = []

    def hold(signum: int, frame: object) -> None:
        held.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    kinds = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    previous = {s: signal.signal(s, hold) for s in kinds if callable(signal.getsignal(s))}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    for signum in held:
        signal.raise_signal(signum)


def set_verbose(verbose: bool) -> None:
    """Let llama.cpp's own log through to stderr."""
    _state["verbose"] = verbose


def forget_complaints() -> None:
    """Start a call whose failure shall be explained by its own messages only."""
    _complaints.clear()


def reason(default: str) -> str:
    """Why the last call failed, in llama.cpp's own words: the first error (else warning) since `forget_complaints`."""
    errors = [line for level, line in _complaints if line and level >= _ERROR]
    lines = errors or [line for _, line in _complaints if line]
    if not lines:
        return default
    # The first error is the cause; the later ones say that callers failed too.
    line = lines[0].split(": ", 1)
    return (line[1] if len(line) == 2 and " " not in line[0] else lines[0]).rstrip(".")


def fingerprint(path: Path, *facts: str | int) -> str:
    """Identifies what was found out about a model file on this processor: 32 hexadecimal digits.

    It depends on the build of llama.cpp and the CPU kernels in use, and on `facts`.

    Raises:
        OSError: the file is gone.
    """
    stat = path.stat()
    known = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *facts]
    known += [machine.llama_cpp_build(), *sorted(machine.processor_features())]
    if used := kernels.identity():
        known.append(used)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def system_info() -> str:
    """Instruction sets and back ends that this build uses, as llama.cpp names them."""
    return str(library().llama_print_system_info().decode())


def features() -> list[str]:
    """What of `system_info` is on, by name."""
    return re.findall(r"(\w+) = 1", system_info())


def devices() -> list[str]:
    """Back ends of this build as llama.cpp lists them, CPU last; whether a model uses them is its own affair."""
    return re.findall(r"(\w+) : ", system_info()) or ["CPU"]
