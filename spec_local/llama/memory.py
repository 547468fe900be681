"""Check that enough memory is free, and release memory that was needed only for loading."""

import contextlib
import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from spec_local.errors import ContextOverflow
from spec_local.system.files import format_size
from spec_local.system.processors import control_groups

_MADV_DONTNEED = 4
_SHORTAGE = re.compile(r"allocat|bad_alloc|insufficient memory|out of memory|SIGKILL", re.IGNORECASE)
_REST = 150_000_000
"""Bytes that a process takes beside a model."""
mapped_files = threading.RLock()
"""Held while a model is freed: its addresses may belong to something else right afterwards."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can take without swapping, within the limits that were set for it.

    root: the folder that holds ``proc`` and ``sys``.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_of_limits(root)]))


def _left_of_limits(root: Path) -> Iterator[int]:
    """Bytes that are left of the shell's limit (``ulimit -v``), and of those of the container (cgroup v2)."""
    with contextlib.suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - psutil.Process().memory_info().vms
    for folder in control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # there is no file, or no limit in it
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit - used + int(stat["inactive_file"])  # files in the cache that can be dropped


def shortage(path: Path, size: int, reason: str, *, on_gpu: bool = False) -> ContextOverflow | None:
    """The error for a model that could not be loaded for want of memory; None: there is enough.

    Args:
        size: bytes of the file. Those that llama.cpp repacks for the processor are in memory twice.
        reason: why it failed, in llama.cpp's words.
        on_gpu: whether it may have been the memory of a GPU.
    """
    free = free_memory()
    if not _SHORTAGE.search(reason) or not (on_gpu or 2 * size + _REST > free):
        return None
    there, more = ("", ", fewer `gpu_layers`") if on_gpu else (f", and {format_size(free)} are free", "")
    return ContextOverflow(
        f"{path} does not fit into memory ({reason}): it needs {format_size(size)} and its context{there}; "
        f"use a smaller quantization, a smaller `n_ctx`{more}, or `draft=none`"
    )


def check_free_memory(need: int, purpose: str, advice: str = "give a smaller `n_ctx`") -> None:
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
