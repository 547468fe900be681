"""bfloat16 in NumPy, which has no such type: the upper half of a float32, as uint16.

The hidden states of a training are stored in it: some models have components beyond the largest float16, and
the arithmetic of the training has no more precision.
"""

import numpy as np
from numpy.typing import NDArray


def encode(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite values to the nearest bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return (rounded >> 16).astype(np.uint16)


def decode(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values as float32, exactly."""
    bits = values.astype(np.uint32)
    bits <<= 16  # in place: matrices of heads have gigabytes
    return bits.view(np.float32)
