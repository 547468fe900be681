"""Load libmtmd, the library of llama.cpp that turns images and sound into vectors, when it is needed."""

import contextlib
import ctypes
import functools
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from spec_local.errors import BackendError
from spec_local.llama import runtime
from spec_local.system import machine

_FIX = "specdec doctor --fix images"
_FOLDER = "MTMD_CPP_LIB"  # the environment variable by which the binding finds it elsewhere


def is_available() -> bool:
    """Return whether llama.cpp is installed with libmtmd, without loading either."""
    with contextlib.suppress(ModuleNotFoundError):
        return _path() is not None
    return False


@functools.cache
def library() -> Any:
    """Return the bindings of libmtmd. Its log goes where that of llama.cpp goes (`runtime.failure_reason`).

    Raises:
        BackendError: it is missing, or it cannot be loaded.
        InvalidRequest: this process was forked after llama.cpp was loaded.
    """
    callback = runtime.log_callback()
    try:
        mtmd = runtime.bindings("mtmd_cpp")
    except FileNotFoundError:
        raise BackendError(
            f"this llama.cpp was built without libmtmd, which reads images and sound: run {_FIX}, or leave "
            "them out"
        ) from None
    except (AttributeError, RuntimeError) as error:  # of another version, or damaged
        reason = " ".join(str(error).split())
        raise BackendError(
            f"libmtmd, which reads images and sound, cannot be loaded ({reason}): delete {_path()}, and "
            f"run {_FIX}"
        ) from error
    mtmd.mtmd_helper_log_set(callback, ctypes.c_void_p(0))
    # As for llama.cpp: after the interpreter has exited, the callback would be freed memory.
    none = ctypes.cast(ctypes.c_void_p(0), type(callback))
    weakref.finalize(mtmd, mtmd.mtmd_helper_log_set, none, None)
    return mtmd


def _path() -> Path | None:
    """Return the file that the binding loads, None if it is missing."""
    folder = Path(os.environ.get(_FOLDER) or machine.llama_cpp_folder() / "lib")
    suffixes = (".so", ".dylib") if sys.platform == "darwin" else (".so",)
    return next((p for s in suffixes if (p := folder / f"libmtmd{s}").exists()), None)
