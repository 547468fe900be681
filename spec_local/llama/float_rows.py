"""Rows of floats in a buffer of llama.cpp, as a NumPy array."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.llama.native_object import NativeObject


class FloatRows:
    """A view of an output buffer, such as that of the logits. llama.cpp may move it from call to call.

    Args:
        owner: the context that the buffer belongs to; it is freed later than the view.
        n_rows, width: size of the buffer.
    """

    def __init__(self, owner: NativeObject, n_rows: int, width: int) -> None:
        self._owner, self._shape = owner, (n_rows, width)
        self._rows: NDArray[np.float32] = np.empty((0, width), np.float32)
        self._address = 0

    def at(self, pointer: Any) -> NDArray[np.float32]:
        """Return the rows at a pointer to float, float32 (n_rows, width)."""
        address = ctypes.addressof(pointer.contents)
        if address != self._address:
            n_rows, width = self._shape
            view = (ctypes.c_float * (n_rows * width)).from_address(address)
            view.owner = self._owner  # type: ignore[attr-defined]  # keeps the memory alive
            flat: NDArray[np.float32] = np.frombuffer(memoryview(view), np.float32)
            self._rows, self._address = flat.reshape(n_rows, width), address
        return self._rows
