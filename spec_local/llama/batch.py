"""The input of a llama_decode call."""

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spec_local.core.calls import Call


class BatchRow(Protocol):
    """A row of a llama.cpp context, as the context sees it in a call."""

    def fill_batch(self, batch: "Batch", start: int, call: Call[Any], n_logits: int) -> None:
        """Add the nodes of a call to the row's tree and to a batch, which has `start` entries already.

        Args:
            n_logits: number of the last nodes whose logits are computed.
        """

    def on_evaluated(self, n: int) -> None:
        """Note that llama.cpp has evaluated a call with n tokens of this row."""

    def resync(self, *, unchanged: bool = False) -> None:
        """Discard the tree after a failed or interrupted call, and take the length from llama.cpp's cache.

        Args:
            unchanged: whether llama.cpp has not begun to evaluate the call.
        """


class Batch:
    """A llama_batch that is reused for all calls: NumPy arrays, which llama.cpp reads in place.

    Args:
        lib: the low-level API.
        capacity: maximum number of tokens.
        max_sequences: maximum number of sequences that a token can belong to.
        width: size of the vector that each entry has beside its token; 0: none.
        has_tokens: whether the entries have tokens; False: only vectors.
        n_positions: positions of each entry: 4 for vectors of models that rotate by several (M-RoPE), else 1.

    Attributes:
        native: the structure to pass to llama_decode, after `set_size`.
        vectors: float32 (capacity, width), which the caller sets.
    """

    def __init__(
        self,
        lib: Any,
        capacity: int,
        max_sequences: int = 1,
        *,
        width: int = 0,
        has_tokens: bool = True,
        n_positions: int = 1,
    ) -> None:
        sequences = np.zeros((capacity, max_sequences), np.int32)
        self.vectors: NDArray[np.float32] = np.zeros((capacity, width), np.float32)
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "token": np.zeros(capacity, np.int32),
            "pos": np.zeros(capacity * n_positions, np.int32),
            "logits": np.zeros(capacity, np.int8),
            "n_seq_id": np.ones(capacity, np.int32),
            "seq_id": sequences.ctypes.data + np.arange(capacity, dtype=np.uint64) * sequences.strides[0],
        }
        self.native = lib.llama_batch()
        given = {name: array for name, array in arrays.items() if has_tokens or name != "token"}
        if width:
            given["embd"] = self.vectors
        for name, array in given.items():
            setattr(self.native, name, ctypes.cast(array.ctypes.data, dict(self.native._fields_)[name]))
        self._arrays, self._n_positions = arrays, n_positions  # the structure holds only their addresses
        # For the few entries of a call, a memoryview is several times as fast as NumPy.
        self._tokens, self._positions, self._wants_logits, self._n_sequences = (
            arrays[name].data for name in ("token", "pos", "logits", "n_seq_id")
        )
        self._sequences, self._sequence_ids = sequences.data, sequences

    def put(self, i: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        """Set entry `i`: a token of one sequence, and whether to compute its logits."""
        self._tokens[i] = token
        self._positions[i] = position
        self._wants_logits[i] = wants_logits
        self._n_sequences[i] = 1
        self._sequences[i, 0] = sequence

    def add_sequence(self, i: int, sequence: int) -> None:
        """Add the token of entry `i` to another sequence."""
        self._sequences[i, self._n_sequences[i]] = sequence
        self._n_sequences[i] += 1

    def sequences(self) -> list[int]:
        """The first sequence of each token."""
        found: list[int] = self._sequence_ids[: self.native.n_tokens, 0].tolist()
        return found

    def set_size(self, n: int) -> None:
        """Set the number of entries; of 4 positions, those of a text are the same, and the last one is 0."""
        self.native.n_tokens = n
        if self._n_positions > 1:
            positions = self._arrays["pos"]
            positions[n : 3 * n] = np.tile(positions[:n], 2)
            positions[3 * n : 4 * n] = 0
