"""A head as it is written into a GGUF file, whatever the layout it was converted from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Value = bool | int | float | str | Sequence[int] | Sequence[bool]
"""A field of a GGUF header; integers are written as uint32, except in lists, and numbers as float32."""


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """A tensor of a head.

    Attributes:
        shape: rows first, as in PyTorch.
        load: returns the values, float32 or int64, of this shape.
        is_exact: whether it is written in F32 whatever the type of the file; vectors and integers always are.
    """

    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.float32] | NDArray[np.int64]]
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class ConvertedHead:
    """A head in llama.cpp's terms.

    Attributes:
        architecture: llama.cpp's name, such as ``eagle3``.
        layout: what it was converted from, for messages, such as ``EAGLE-3 of SpecForge``.
        fields: the header, by names without the architecture, such as ``block_count``. The tokenizer is the
            main model's, and is not among them.
        tensors: by llama.cpp's names, such as ``blk.0.attn_q.weight``.
        mask: the mask token of heads that draft blocks.
    """

    architecture: str
    layout: str
    fields: Mapping[str, Value]
    tensors: Mapping[str, HeadTensor]
    mask: int | None = None
