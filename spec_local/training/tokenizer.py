"""The main model's tokenizer as stored in its GGUF file.

llama.cpp exposes neither merges nor the stored token texts, and the gguf package takes ten seconds to read
150,000 tokens.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.errors import ModelError
from spec_local.llama.model import Model

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, as GGUF numbers them."""
SENTENCEPIECE, BPE = "llama", "gpt2"
"""Tokenizers that can be trimmed, by their names in GGUF files."""

_SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A tokenizer's tables.

    Attributes:
        kind: `SENTENCEPIECE` or `BPE`.
        pre: the pre-tokenizer; None: not in the file.
        texts: text of each token, as stored in the file.
        types: int32, type of each token, as llama.cpp interprets it.
        scores: float32, score of each token; the highest is merged first. Zeros for BPE.
        merges: pairs separated by a space, in merge order; empty for SentencePiece.
        special_ids: tokens by metadata key (``tokenizer.ggml.eos_token_id``).
        end_ids: tokens that end an answer.
        add_bos, add_eos: whether these tokens surround every text.
        chat_template: as in the file.
    """

    kind: str
    pre: str | None
    texts: list[bytes]
    types: NDArray[np.int32]
    scores: NDArray[np.float32]
    merges: list[bytes]
    special_ids: dict[str, int]
    end_ids: list[int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None


def read(main: Model, metadata: Mapping[str, Any]) -> Tokenizer:
    """Read the tokenizer from a loaded model and its file's metadata.

    Raises:
        ModelError: this kind of tokenizer cannot be trimmed.
    """
    kind = str(metadata.get("tokenizer.ggml.model", "none"))
    if kind not in (SENTENCEPIECE, BPE):
        raise ModelError(
            f"{main.path.name} has a tokenizer of kind {kind!r}; training supports {BPE!r} (BPE) and "
            f"{SENTENCEPIECE!r} (SentencePiece): give another main model, or use an existing draft model"
        )
    vocabulary, n = main.vocabulary, main.vocabulary.n_tokens
    types = np.array(metadata.get("tokenizer.ggml.token_type", np.full(n, NORMAL)), np.int32)
    if kind == SENTENCEPIECE and np.count_nonzero(types == BYTE) < 256:  # llama.cpp aborts on a missing one
        raise ModelError(
            f"the tokenizer of {main.path.name} lacks single-byte tokens, so no draft model can be trained: "
            "give another main model"
        )
    special = {
        k: int(v) for k, v in metadata.items() if k.startswith("tokenizer.") and k.endswith("_token_id")
    }
    # llama.cpp finds missing ids by token text, and may pick any of several candidates: use its choice.
    found = {"bos": vocabulary.bos, "eos": vocabulary.eos, "eot": vocabulary.eot}
    found |= zip(("fim_pre", "fim_suf", "fim_mid"), vocabulary.fill_in or (), strict=False)
    special |= {f"tokenizer.ggml.{role}_token_id": token for role, token in found.items()}
    for token in found.values():
        if token >= 0 and not vocabulary.piece(token):  # a control token to llama.cpp, because of its text
            types[token] = CONTROL
    return Tokenizer(
        kind,
        metadata.get("tokenizer.ggml.pre"),
        metadata["tokenizer.ggml.tokens"],
        types,
        np.asarray(metadata.get("tokenizer.ggml.scores", np.zeros(n)), np.float32),
        metadata.get("tokenizer.ggml.merges", []) if kind == BPE else [],
        {key: token for key, token in special.items() if 0 <= token < n},
        [token for token in range(n) if vocabulary.is_end(token)],
        vocabulary.add_bos,
        vocabulary.add_eos,
        main.chat_template,
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a GGUF file's metadata; arrays of strings become lists of bytes, arrays of numbers NumPy arrays.

    path: a file that llama.cpp can load; nothing is validated.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        reader.offset = 16  # after magic, version and number of tensors
        return {reader.string().decode(): reader.value() for _ in range(reader.scalar("Q"))}


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.offset = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> bytes:
        start = self.offset + 8
        self.offset = start + self.scalar("Q")
        return self._data[start : self.offset]

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        return self._array() if kind == _ARRAY else self.scalar(_SCALARS[kind])

    def _array(self) -> Any:
        kind, n = self.scalar("I"), self.scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self.string() if kind == _STRING else self._array() for _ in range(n)]
        values = np.frombuffer(self._data, np.dtype(_SCALARS[kind]).newbyteorder("<"), n, self.offset).copy()
        self.offset += values.nbytes
        return values
