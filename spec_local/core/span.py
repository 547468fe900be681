"""Spans: parts of a prompt that are embeddings in place of tokens, such as a picture.

A prompt is a list of token ids. A span stands in it as one `Cell` for each cell that it takes in the KV
cache: a negative int, made from the span's identity. Lists with the same cells have the same content, so that
comparing, storing and hashing prompts needs no other rule for pictures. Answers have no cells.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class Span:
    """A part of a prompt that is evaluated as embeddings, whole, and in a call of its own.

    Args:
        identity: bytes that no span with other embeddings or positions has.
        offsets: int32 (n_cells, n_axes): position of each cell relative to the first one's. For models that
            rotate by several positions (M-RoPE), there are three axes: time, row and column.
        n_positions: positions that the span takes: the token after it is at so many after its first cell.
        encode: computes the embeddings, float32 (n_cells, width); it may take seconds. Kept as `vectors`.
        is_causal: whether a cell attends only to those before it, and not to all of the span.
        placeholder: the token that stands for a cell where only tokens can be read, such as in a head.
    """

    def __init__(
        self,
        identity: bytes,
        offsets: NDArray[np.int32],
        n_positions: int,
        encode: Callable[[], Vectors],
        *,
        is_causal: bool = True,
        placeholder: int = 0,
    ) -> None:
        self.offsets, self.n_positions, self.is_causal = offsets, n_positions, is_causal
        self.placeholder = placeholder
        self.vectors = encode
        # 31 bits a cell: even the smallest spans have more than a hundred bits of the identity.
        digest = hashlib.shake_256(identity).digest(4 * len(offsets))
        ids = -1 - (np.frombuffer(digest, "<u4") >> 1).astype(np.int64)
        self.cells = [Cell(value, self, i) for i, value in enumerate(ids.tolist())]

    def __len__(self) -> int:
        return len(self.cells)


class Cell(int):
    """One cell of a span in a list of tokens: a negative number, −2³¹ or more.

    Attributes:
        span: the span; index: its number in the span.
    """

    span: Span
    index: int

    def __new__(cls, value: int, span: Span, index: int) -> "Cell":
        cell = super().__new__(cls, value)
        cell.span, cell.index = span, index
        return cell

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # in another process, it still compares equal


def whole(tokens: Sequence[int], n: int) -> int:
    """The largest number, up to n, of the first of these tokens that splits no span."""
    if 0 < n < len(tokens) and tokens[n] < 0 and isinstance(cell := tokens[n], Cell):
        return n - cell.index
    return n


def text_of(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens without cells; the same list if it has none."""
    if not tokens or min(tokens) >= 0:
        return tokens
    return [token for token in tokens if not isinstance(token, Cell)]


class GrowingText:
    """The tokens of a history without cells, while the history grows."""

    def __init__(self) -> None:
        self._n, self._text = 0, list[int]()

    def of(self, history: Sequence[int]) -> Sequence[int]:
        """The tokens of the history, which begins with that of the last call."""
        self._text += text_of(history[self._n :])
        self._n = len(history)
        return self._text
