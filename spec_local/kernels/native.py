"""The compiled library, as plugin.h declares it."""

import ctypes
from pathlib import Path


class Native:
    """The library, loaded into this process; import llama_cpp first, whose libraries it links to.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it lacks a function.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._install, self._enable = loaded.specdec_kernels_install, loaded.specdec_kernels_enable
        self._self_test = loaded.specdec_kernels_self_test
        self._install.argtypes, self._install.restype = [ctypes.c_char_p], ctypes.c_char_p
        self._enable.argtypes, self._enable.restype = [ctypes.c_int], None
        self._self_test.argtypes, self._self_test.restype = [], ctypes.c_char_p

    def install(self, instruction_set: str) -> str | None:
        """Let llama.cpp use the kernels of an instruction set; once per process. Returns None, or why not."""
        return _text(self._install(instruction_set.encode()))

    def enable(self, on: bool) -> None:
        """Switch them on or off for models that are opened from now on; not while a model computes."""
        self._enable(int(on))

    def self_test(self) -> str | None:
        """Compare the kernels with a float64 reference and with llama.cpp. Returns None, or what is wrong."""
        return _text(self._self_test())


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("utf-8", "replace")
