"""A head as it is written into a GGUF file, whatever the layout it was converted from."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.conversion.checkpoint import Checkpoint
from spec_local.errors import ModelFileError
from spec_local.llama.gguf_tensors import floats, has_tensor, parts
from spec_local.llama.model import Model

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
        layout: what it was converted from, for messages, such as ``DSpark``.
        fields: the header, by names without the architecture, such as ``block_count``. The tokenizer is the
            main model's, and is not among them.
        tensors: by llama.cpp's names, such as ``blk.0.attn_q.weight``.
        mask: the mask token of heads that draft blocks.
        has_tokenizer: whether the file gets the main model's tokenizer, which heads do not need.
        arrays: long arrays of the header, int32 or float32, by names without the architecture.
        rest: a second model, which follows in the same file: see `spec_local.llama.later_model`.
    """

    architecture: str
    layout: str
    fields: Mapping[str, Value]
    tensors: Mapping[str, HeadTensor]
    mask: int | None = None
    has_tokenizer: bool = True
    arrays: Mapping[str, NDArray[np.int32] | NDArray[np.float32]] = field(default_factory=dict)
    rest: "ConvertedHead | None" = None

    @property
    def n_parameters(self) -> int:
        """Number of parameters, those of the rest included."""
        rest = self.rest.n_parameters if self.rest else 0
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values()) + rest


def draft_tokens(checkpoint: Checkpoint, name: str, n_vocab: int) -> HeadTensor:
    """The tokens that a head can draft; a checkpoint has each as an offset from its number among them.

    Raises:
        ModelFileError: they are damaged.
    """
    offsets = checkpoint.tensor(name).ravel()
    tokens = offsets + np.arange(offsets.size)
    is_within = offsets.dtype == np.int64 and tokens.min() >= 0 and tokens.max() < n_vocab
    if not is_within or len(np.unique(tokens)) < len(tokens):
        raise ModelFileError(
            f"{checkpoint.folder}: {name} does not list different tokens of the vocabulary: download the "
            "head again"
        )
    return HeadTensor(tokens.shape, lambda: tokens)


def of_main(main: Model, shape: tuple[int, ...], *names: str) -> list[HeadTensor]:
    """Those of these tensors that the main model has, dequantized; it always has ``token_embd.weight``."""
    return [
        HeadTensor(shape, partial(_dequantized, part, name, shape))
        for name in names
        for part in parts(main.path)
        if has_tensor(part, name)
    ]


def _dequantized(path: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    try:
        return floats(path, name, shape[-1]).reshape(shape)
    except ValueError as error:
        raise ModelFileError(f"{path} cannot be read ({error}): use a file of another type") from None
