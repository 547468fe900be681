"""Weights that a head takes from the main model's file: embeddings, output rows, norm, feed-forward part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec_local import bfloat16
from spec_local.errors import ModelError
from spec_local.llama.gguf_tensors import floats, has_tensor, parts
from spec_local.llama.model import Model

_EMBEDDINGS, _OUTPUT, _NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """A gated feed-forward part: down(silu(gate x) · up x), with x after an RMS norm with these weights.

    Attributes:
        norm: float32 (n_embd,).
        gate, up: float32 (n_ff, n_embd).
        down: float32 (n_embd, n_ff).
    """

    norm: NDArray[np.float32]
    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class MainWeights:
    """Weights of the main model that a head uses or starts from.

    Attributes:
        embeddings: bfloat16 (see `bfloat16`) (n_vocab, n_embd), as llama.cpp reads them for a head.
        output: float32 (number of drafted tokens, n_embd), rows of the output matrix.
        norm: float32 (n_embd,), weights of the output norm.
    """

    embeddings: NDArray[np.uint16]
    output: NDArray[np.float32]
    norm: NDArray[np.float32]


def check_main_weights(model: Model) -> None:
    """Check that they can be read, from one row of each; see `read_main_weights` for the errors."""
    with _readable(model):
        files = _files(model.path)
        for name in (_EMBEDDINGS, _output_of(files), _NORM):
            _read(files, name, model.n_embd, np.arange(1))


def read_main_weights(model: Model, tokens: NDArray[np.integer], at_a_time: int = 8192) -> MainWeights:
    """Read them; tokens: those that the head drafts, ascending. at_a_time: rows that are dequantized.

    Raises:
        ModelError: the file has no such tensors, or in a type that cannot be read.
        OSError: it cannot be read.
    """
    n, width = model.vocabulary.n_tokens, model.n_embd
    embeddings = np.empty((n, width), np.uint16)
    with _readable(model):
        files = _files(model.path)
        for start in range(0, n, at_a_time):
            rows = np.arange(start, min(n, start + at_a_time))
            embeddings[rows] = bfloat16.encode(_read(files, _EMBEDDINGS, width, rows))
        output, norm = _read(files, _output_of(files), width, tokens), _read(files, _NORM, width)[0]
    return MainWeights(embeddings, output, norm)


def read_feed_forward(model: Model) -> FeedForward | None:
    """Read the feed-forward part of the last layer; None: it has another form, such as experts.

    Raises:
        OSError: it cannot be read.
    """
    prefix = f"blk.{model.n_layers - 1}"
    if _file(model.path, f"{prefix}.post_ffw_norm.weight"):
        return None  # its result is scaled
    names = [f"{prefix}.ffn_{part}.weight" for part in ("norm", "gate", "up", "down")]
    files = _files(model.path, names)
    try:
        norm, gate, up = (_read(files, name, model.n_embd) for name in names[:3])
        return FeedForward(norm[0], gate, up, _read(files, names[3], len(gate)))
    except (KeyError, ValueError):
        return None


@contextmanager
def _readable(model: Model) -> Iterator[None]:
    """Report tensors that cannot be read."""
    try:
        yield
    except (KeyError, ValueError, IndexError) as error:
        raise ModelError(
            f"no head can be trained for {model.path.name} ({error}): give another main model"
        ) from None


def _files(path: Path, names: Sequence[str] = (_EMBEDDINGS, _OUTPUT, _NORM)) -> dict[str, Path | None]:
    return {name: _file(path, name) for name in names}


def _output_of(files: dict[str, Path | None]) -> str:
    """The tensor of the output matrix, which may be that of the embeddings."""
    return _OUTPUT if files[_OUTPUT] else _EMBEDDINGS


def _file(path: Path, name: str) -> Path | None:
    """The part of a model that has a tensor."""
    return next((part for part in parts(path) if has_tensor(part, name)), None)


def _read(
    files: dict[str, Path | None], name: str, width: int, rows: NDArray[np.integer] | None = None
) -> NDArray[np.float32]:
    path = files[name]
    if not path:
        raise KeyError(f"it has no {name}")
    return floats(path, name, width, rows)
