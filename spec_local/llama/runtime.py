"""Load llama.cpp once, and capture its log.

llama.cpp explains a failure only in its log, which it writes to stderr. The callback below keeps the latest
warnings and errors of each thread, so that exceptions can quote them, and prints the log only on request.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import re
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_local import kernels
from spec_local.llama.native_object import check_process, watch_forks
from spec_local.system import machine

# ggml_log_level of the bundled llama.cpp; the constants in llama-cpp-python are outdated.
_DEBUG, _INFO, _WARN, _ERROR, _CONTINUE = 1, 2, 3, 4, 5


class _Log(threading.local):
    """The latest warnings and errors of the calls in this thread, and the level of the last line."""

    n_dropping = 0
    """How many threads, of all, drop the log now: see `unlogged`."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, str]] = deque(maxlen=50)
        self.level = _DEBUG


log = _Log()
_state: dict[str, Any] = {"verbose": False}
_loading, _counting = threading.Lock(), threading.Lock()


def _on_log(level: int, text: bytes, _: object) -> None:
    log.level = level = log.level if level == _CONTINUE else level
    line = text.decode("utf-8", "replace")
    if level >= _WARN:
        log.lines.append((level, line.strip()))
    if _state["verbose"]:
        sys.stderr.write(line)


def library() -> Any:
    """Return the low-level API, initialized, with its log captured and the CPU kernels installed.

    Raises:
        InvalidRequest: this process was forked after llama.cpp was loaded.
    """
    check_process()
    with _loading:
        return _load()


@functools.cache
def _load() -> Any:
    llama_cpp = bindings("llama_cpp")
    callback = llama_cpp.llama_log_callback(_on_log)
    _state["callback"] = callback  # llama.cpp holds only a pointer to it
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    # Log output after the interpreter has exited would call freed memory. Finalizers run newest
    # first: models and contexts, which are created later, are freed before the callback is removed.
    silent = ctypes.cast(ctypes.c_void_p(0), llama_cpp.llama_log_callback)
    weakref.finalize(llama_cpp, llama_cpp.llama_log_set, silent, None)
    llama_cpp.llama_backend_init()
    kernels.load()  # llama.cpp lists its buffer types once, when it opens the first model
    watch_forks()
    return llama_cpp


def extensions() -> Any:
    """Return llama-cpp-python's bindings of functions that llama.cpp may change from version to version."""
    library()
    return bindings("llama_cpp_ext")


def bindings(module: str) -> Any:
    """Import a module of llama-cpp-python without its high-level API, which takes 50 ms and imports Jinja."""
    name = f"llama_cpp.{module}"
    if "llama_cpp" in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.find_spec("llama_cpp")
    if not spec:
        raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
    sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["llama_cpp"]  # whoever needs it imports all of it


@functools.cache
def target_layers(suffix: str) -> Any:
    """Return llama.cpp's function for the layers that a head reads, or with ``_n`` for their number."""
    function = _in_cpp(f"llama_model_target_layer_ids{suffix}", "PK11llama_model")
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_uint32 if suffix else ctypes.POINTER(ctypes.c_int32)
    return function


@functools.cache
def graph_reserve() -> Any:
    """Return llama.cpp's function that builds the graph of a call, given a context and three numbers.

    They are those of the tokens, of the sequences, and of the tokens with logits.
    """
    function, number = _in_cpp("llama_graph_reserve", "P13llama_contextjjj"), ctypes.c_uint32
    function.argtypes = [ctypes.c_void_p, number, number, number]
    function.restype = ctypes.c_void_p
    return function


def _in_cpp(name: str, types: str) -> Any:
    """A function without C linkage: its name is that of the C++ compiler."""
    return getattr(library()._lib, f"_Z{len(name)}{name}{types}")


@functools.cache
def suppressed_tokens() -> Any:
    """Return llama.cpp's function for the tokens that a file forbids; None: this build has none."""
    function = getattr(library()._lib, "llama_vocab_get_suppress_tokens", None)
    if function:
        function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)]
        function.restype = ctypes.POINTER(ctypes.c_int32)
    return function


@functools.cache
def ggml() -> Any:
    """Return the functions of ggml for tensors, graphs and devices, from llama.cpp's own library."""
    functions = library()._lib  # looks in the libraries that llama.cpp is linked to, too
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    sizes = ctypes.POINTER(size)
    for name, result, *arguments in (
        ("ggml_get_name", ctypes.c_char_p, pointer),
        ("ggml_nbytes", size, pointer),
        ("ggml_backend_tensor_get", None, pointer, pointer, size, size),
        ("ggml_graph_n_nodes", ctypes.c_int, pointer),
        ("ggml_graph_node", pointer, pointer, ctypes.c_int),
        ("ggml_graph_get_tensor", pointer, pointer, ctypes.c_char_p),
        ("ggml_backend_dev_count", size),
        ("ggml_backend_dev_get", pointer, size),
        ("ggml_backend_dev_type", ctypes.c_int, pointer),
        ("ggml_backend_dev_by_type", pointer, ctypes.c_int),
        ("ggml_backend_dev_name", ctypes.c_char_p, pointer),
        ("ggml_backend_dev_description", ctypes.c_char_p, pointer),
        ("ggml_backend_dev_memory", None, pointer, sizes, sizes),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of the block; a second signal of a kind ends the process.

    While llama.cpp loads a model, the only Python code that runs is `_on_log`. A signal handler that raises
    there would have no effect: ctypes drops exceptions from callbacks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []

    def defer(signum: int, frame: object) -> None:
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    kinds = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    previous = {s: signal.signal(s, defer) for s in kinds if callable(signal.getsignal(s))}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    for signum in received:
        signal.raise_signal(signum)


def log_callback() -> Any:
    """Return the C function that captures the log, for libraries that have a log of their own."""
    library()
    return _state["callback"]


def set_verbose(verbose: bool) -> None:
    """Print llama.cpp's log on stderr, or stop doing so."""
    _state["verbose"] = verbose


def is_verbose() -> bool:
    """Return whether llama.cpp's log is shown."""
    return bool(_state["verbose"])


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Drop the log within the block, unless it is printed.

    llama.cpp logs a thousand lines while it loads a model. For each it would wait until no other thread runs
    Python code, for 5 ms or more.
    """
    _count_unlogged(1)
    try:
        yield
    finally:
        _count_unlogged(-1)


def _count_unlogged(change: int) -> None:
    lib = library()
    with _counting:
        _Log.n_dropping += change
        drop = _Log.n_dropping and not _state["verbose"]
        # A C function to which the arguments of a log callback do no harm: it uses the first one only.
        nothing = ctypes.cast(ctypes.CDLL(None).abs, lib.llama_log_callback)
        lib.llama_log_set(nothing if drop else _state["callback"], ctypes.c_void_p(0))


def clear_log() -> None:
    """Drop the captured messages. Call this before a call whose failure `failure_reason` will explain."""
    log.lines.clear()
    if log.n_dropping:  # another thread drops the log
        library().llama_log_set(_state["callback"], ctypes.c_void_p(0))


def failure_reason() -> str:
    """Return the first error in llama.cpp's log since `clear_log`, else the first warning."""
    errors = [line for level, line in log.lines if line and level >= _ERROR]
    lines = errors or [line for _, line in log.lines if line]
    if not lines:
        return "llama.cpp gave no reason"
    # The first error is the cause; later ones only report that the callers failed, too.
    line = lines[0].split(": ", 1)
    return (line[1] if len(line) == 2 and " " not in line[0] else lines[0]).rstrip(".")


def fingerprint(path: Path, *facts: str | int) -> str:
    """Return a key for measurements of a model file, as 32 hexadecimal digits.

    It changes with the file, the processor, the build of llama.cpp, the CPU kernels in use and `facts`.

    Raises:
        OSError: the file does not exist.
    """
    stat = path.stat()
    known = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *facts]
    known += [machine.llama_cpp_build(), *sorted(machine.processor_features())]
    if used := kernels.identity():
        known.append(used)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def system_info() -> str:
    """Return llama.cpp's description of the backends and instruction sets that this build uses."""
    return str(library().llama_print_system_info().decode())


def features() -> list[str]:
    """Return the names of the features that `system_info` lists as enabled."""
    return re.findall(r"(\w+) = 1", system_info())
