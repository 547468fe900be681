"""Giving back memory that loading a model has touched and running it does not need."""

import contextlib
import ctypes
import sys
from pathlib import Path

_MADV_DONTNEED = 4


def release_mapped_file(path: Path) -> None:
    """Drop a loaded file's pages from this process; those that are used come back from the page cache.

    llama.cpp maps a model file and touches all of it while loading. Weights that it then repacks for
    the processor, and most of the token embeddings, are never read again, and would count twice. Linux only;
    elsewhere, and wherever it does not work, nothing happens.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = str(path.resolve())
        libc = ctypes.CDLL(None)
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            # Only what cannot have been written to: dropping a private page would lose what was written.
            if len(fields) == 6 and fields[5] == name and "w" not in fields[1]:
                start, end = (int(address, 16) for address in fields[0].split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
        libc.malloc_trim(0)
