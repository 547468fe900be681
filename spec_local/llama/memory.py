"""Check that enough memory is free, and release memory that was needed only for loading."""

import contextlib
import ctypes
import sys
import threading
from pathlib import Path

import psutil

from spec_local.errors import ContextOverflow

_MADV_DONTNEED = 4
mapped_files = threading.RLock()
"""Held while a model is freed: its addresses may belong to something else right afterwards."""


def free_memory() -> int:
    """Bytes of memory that are available without swapping."""
    return int(psutil.virtual_memory().available)


def check_free_memory(need: int, purpose: str, advice: str = "give a smaller --ctx") -> None:
    """Check that `need` bytes are free: a system that is out of memory kills processes.

    Raises:
        ContextOverflow: fewer bytes are free.
    """
    free = free_memory()
    if need > free:
        raise ContextOverflow(
            f"{need >> 20} MiB of memory are needed {purpose}, but only {free >> 20} MiB are free: " + advice
        )


def release_mapped_file(path: Path) -> None:
    """Drop the pages of a memory-mapped file from this process; they are mapped again on access.

    llama.cpp maps a model file and reads all of it while loading. Weights that it repacks for the processor,
    and most token embeddings, are not read again and would take memory twice. On systems other than Linux,
    and on failure, this does nothing.
    """
    if sys.platform != "linux":
        return
    with mapped_files, contextlib.suppress(OSError, ValueError, AttributeError):
        name = str(path.resolve())
        libc = ctypes.CDLL(None)
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            # Read-only mappings only: dropping a private page would discard what was written to it.
            if len(fields) == 6 and fields[5] == name and "w" not in fields[1]:
                start, end = (int(address, 16) for address in fields[0].split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
        libc.malloc_trim(0)
