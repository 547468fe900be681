"""Read a head that `export` wrote, to train it further."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import ModelError, SpecLocalError
from spec_local.llama.gguf_tensors import floats, has_tensor
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.training.head_shape import Weights, head_shape, layers_read, tensor_shapes


@dataclass(frozen=True, slots=True, eq=False)
class TrainedWeights:
    """The weights of a head, and the tokens that it can draft, ascending."""

    weights: Weights
    drafted: NDArray[np.int64]


def read_head(path: Path, main: Model) -> TrainedWeights:
    """Read a head of a main model.

    Raises:
        ModelError: it is damaged, was made for another main model, or not by `specdec draft train`.
    """
    try:
        header = open_header(path)
    except SpecLocalError as error:
        raise ModelError(f"{path} cannot be continued ({error})") from None
    origin, tokens = header.text("specdec.main.name"), header.draft_tokens
    architecture, layers = header.architecture, header.target_layers
    header.close()
    advice = "give a head that specdec draft train made for this main model, or none"
    if architecture != "eagle3" or origin is None or tokens is None:
        raise ModelError(f"{path} is not a head that specdec has trained: {advice}")
    name = main.text("general.name") or main.path.stem
    shape = head_shape(main.n_embd)
    if origin != name or tuple(layers or ()) != tuple(i + 1 for i in layers_read(main.n_layers)):
        raise ModelError(f"{path} was made for {origin}, not for {name}: {advice}")
    weights: Weights = {}
    for tensor, size in tensor_shapes(shape).items():
        try:
            if not has_tensor(path, tensor):
                raise ValueError(f"it has no {tensor}")
            values = floats(path, tensor, size[-1])
            if values.size != np.prod(size) or not np.isfinite(values).all():
                raise ValueError(f"its {tensor} has another size, or values that are not finite")
        except (KeyError, ValueError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}): {advice}") from None
        weights[tensor] = values.reshape(size)
    return TrainedWeights(weights, tokens.astype(np.int64))
