"""Bindings to the compiled library, as declared in plugin.h and capture.h."""

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import SpecLocalError


class Native:
    """The library, loaded into this process. Import llama_cpp first: the library links to its libraries.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the library lacks a function.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._install, self._enable = loaded.specdec_kernels_install, loaded.specdec_kernels_enable
        self._pack_ends = loaded.specdec_kernels_pack_ends
        self._pack_ends.argtypes, self._pack_ends.restype = [ctypes.c_int], None
        self._self_test = loaded.specdec_kernels_self_test
        self._install.argtypes, self._install.restype = [ctypes.c_char_p], ctypes.c_char_p
        self._enable.argtypes, self._enable.restype = [ctypes.c_int], None
        self._self_test.argtypes, self._self_test.restype = [], ctypes.c_char_p
        self._read_as = loaded.specdec_kernels_read_as
        self._read_as.argtypes, self._read_as.restype = [ctypes.c_int, ctypes.c_int], None
        self._limit, self._time = loaded.specdec_kernels_limit, loaded.specdec_kernels_time
        self._limit.argtypes, self._limit.restype = [ctypes.c_char_p, ctypes.c_int64], None
        self._time.argtypes = [
            *(ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int), ctypes.c_int),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
        ]
        self._time.restype = ctypes.c_char_p
        self._experts_read = loaded.specdec_kernels_experts_read
        self._experts_read.argtypes, self._experts_read.restype = [], ctypes.c_int64
        self._choose_rows = loaded.specdec_kernels_choose_rows
        self._choose_rows.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int32), ctypes.c_int64]
        self._choose_rows.restype = None
        self._tiles = threading.local()
        self._capture = loaded.specdec_capture_tensor

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

    def pack_ends(self) -> None:
        """Pack only the ends of each matrix of models opened later, whose results are then worthless."""
        self._pack_ends(1)

    def self_test(self) -> str | None:
        """Compare the kernels with a float64 reference and with llama.cpp.

        Returns None if they pass, otherwise the error.
        """
        return _text(self._self_test())

    def limit(self, kind: str, most: int) -> None:
        """Leave products of more than `most` tokens with weights of a type, such as Q4_K, to llama.cpp.

        A type that is packed is left to it as a whole if `most` is 0, when models are opened from now on.
        """
        self._limit(kind.encode(), most)

    def read_as(self, packed: int, floats: int) -> None:
        """Read weights in these ways from now on: `AHEADS` and `ROWS_TOGETHER` of layout.h, 0 or 1 each.

        Results are the same. Do not call this during a computation.
        """
        self._read_as(packed, floats)

    def choose_rows(self, n_rows: int, tiles: NDArray[np.int32] | None) -> None:
        """Compute only some rows of products with matrices of `n_rows`, in this thread's calls from now on.

        Args:
            tiles: of 16 rows, ascending; kept alive until the next call of this. The other rows of the result
                are undefined. None: compute all.
        """
        self._tiles.value = tiles
        pointer = None if tiles is None else tiles.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._choose_rows(n_rows, pointer, 0 if tiles is None else len(tiles))

    def time(
        self,
        kind: str,
        rows: int,
        length: int,
        sizes: Sequence[int],
        threads: int,
        rounds: int,
        readings: bool = False,
    ) -> NDArray[np.float64]:
        """Time products of a matrix with various numbers of tokens.

        Returns seconds, float64 (rounds, sizes, 2): with the kernels, and with what llama.cpp would use
        without them. If `readings`: with the kernels in the first and in the second way of `read_as`; the
        first is in use afterwards.

        Raises:
            SpecLocalError: there is not enough memory, or the shape is not possible.
        """
        seconds = np.zeros((rounds, len(sizes), 2))
        numbers = (ctypes.c_int * len(sizes))(*sizes)
        how = (threads, rounds, int(readings))
        if reason := _text(
            self._time(kind.encode(), rows, length, numbers, len(sizes), *how, seconds.ctypes.data)
        ):
            raise SpecLocalError(f"products could not be timed: {reason}")
        return seconds

    @property
    def experts_read(self) -> int:
        """Matrices of experts that all calls up to now have read, in packed models.

        Of each call these are the gate, up and down matrix of each expert that any of its tokens is routed
        to, in each layer.
        """
        return int(self._experts_read())

    @property
    def capture(self) -> int:
        """The address of the callback that copies outputs of layers; its argument is a `Capture`."""
        address = ctypes.cast(self._capture, ctypes.c_void_p).value
        assert address
        return address


class NativeCapture(ctypes.Structure):
    """``specdec_capture`` of capture.h."""

    _fields_ = (
        ("prefix", ctypes.c_char_p),
        ("layers", ctypes.POINTER(ctypes.c_int32)),
        ("states", ctypes.POINTER(ctypes.c_float)),
        ("counts", ctypes.POINTER(ctypes.c_int64)),
        ("n_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("n_layers", ctypes.c_int32),
        ("unexpected", ctypes.c_int32),
    )


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("utf-8", "replace")
