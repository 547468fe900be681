"""Bindings to the compiled library, as declared in plugin.h."""

import ctypes
from pathlib import Path


class Native:
    """The library, loaded into this process. Import llama_cpp first: the library links to its libraries.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the library lacks a function.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._install, self._enable = loaded.specdec_kernels_install, loaded.specdec_kernels_enable
        self._self_test = loaded.specdec_kernels_self_test
        self._install.argtypes, self._install.restype = [ctypes.c_char_p], ctypes.c_char_p
        self._enable.argtypes, self._enable.restype = [ctypes.c_int], None
        self._self_test.argtypes, self._self_test.restype = [], ctypes.c_char_p

    def install(self, instruction_set: str) -> str | None:
        """Install the kernels of an instruction set in llama.cpp. Call this once per process.

        Returns None on success, otherwise the reason for the failure.
        """
        return _text(self._install(instruction_set.encode()))

    def enable(self, on: bool) -> None:
        """Enable or disable packing for models opened later, and F16 weights and attention for all models.

        Do not call this during a computation.
        """
        self._enable(int(on))

    def self_test(self) -> str | None:
        """Compare the kernels with a float64 reference and with llama.cpp.

        Returns None if they pass, otherwise the error.
        """
        return _text(self._self_test())


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("utf-8", "replace")
