"""What a main's file says of its tokenizer, all of it and at once.

llama.cpp tells neither the merges nor what was written of a token, and the gguf package takes ten seconds to read
150 thousand of them.
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
"""Types of tokens, as GGUF numbers them."""
SENTENCEPIECE, BPE = "llama", "gpt2"
"""Kinds of tokenizers that can be trimmed, by the names they have in files."""

_SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A main's.

    Attributes:
        kind: `SENTENCEPIECE` or `BPE`.
        pre: how texts are split into words; None: the file does not say.
        texts: of each token, as the file spells it.
        types: int32, of each token: `NORMAL` and the others, as llama.cpp takes them.
        scores: float32, of each token; the best are joined first. Zeros in a BPE.
        merges: pairs of texts, with a space between, in the order in which they are joined; empty in a SentencePiece.
        roles: tokens by the metadata key that names them (``tokenizer.ggml.eos_token_id``).
        ends: tokens that end an answer.
        add_bos, add_eos: what stands around every text.
        chat_template: as the file has it.
    """

    kind: str
    pre: str | None
    texts: list[bytes]
    types: NDArray[np.int32]
    scores: NDArray[np.float32]
    merges: list[bytes]
    roles: dict[str, int]
    ends: list[int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None


def read(main: Model, facts: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model and its file's metadata.

    Raises:
        ModelError: it is of a kind that cannot be trimmed.
    """
    kind = str(facts.get("tokenizer.ggml.model", "none"))
    if kind not in (SENTENCEPIECE, BPE):
        raise ModelError(
            f"{main.path.name} has a tokenizer of the kind {kind!r}, and a draft can be trained for "
            f"{BPE!r} (BPE) and {SENTENCEPIECE!r} (SentencePiece): give another main, or a draft made for this one"
        )
    vocabulary, n = main.vocabulary, main.vocabulary.n_tokens
    types = np.array(facts.get("tokenizer.ggml.token_type", np.full(n, NORMAL)), np.int32)
    if kind == SENTENCEPIECE and np.count_nonzero(types == BYTE) < 256:  # llama.cpp dies where it misses one
        raise ModelError(
            f"the tokenizer of {main.path.name} does not know all single bytes, so that no draft can be trained for it: give another main"
        )
    roles = {k: int(v) for k, v in facts.items() if k.startswith("tokenizer.") and k.endswith("_token_id")}
    # What the file leaves open llama.cpp finds by name, and of several names it takes any: so it is asked.
    found = {"bos": vocabulary.bos, "eos": vocabulary.eos, "eot": vocabulary.eot}
    found |= zip(("fim_pre", "fim_suf", "fim_mid"), vocabulary.fill_in or (), strict=False)
    roles |= {f"tokenizer.ggml.{role}_token_id": token for role, token in found.items()}
    for token in found.values():
        if token >= 0 and not vocabulary.piece(token):  # by its name it became one, whatever the file says
            types[token] = CONTROL
    return Tokenizer(
        kind,
        facts.get("tokenizer.ggml.pre"),
        facts["tokenizer.ggml.tokens"],
        types,
        np.asarray(facts.get("tokenizer.ggml.scores", np.zeros(n)), np.float32),
        facts.get("tokenizer.ggml.merges", []) if kind == BPE else [],
        {key: token for key, token in roles.items() if 0 <= token < n},
        [token for token in range(n) if vocabulary.is_end(token)],
        vocabulary.add_bos,
        vocabulary.add_eos,
        main.chat_template,
    )


def metadata(path: Path) -> dict[str, Any]:
    """All that a GGUF file says before its tensors; an array of texts is a list of bytes, one of numbers is NumPy's.

    path: a file that llama.cpp has loaded; of another nothing is checked.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        reader.at = 16  # after magic, version and number of tensors
        return {reader.text().decode(): reader.value() for _ in range(reader.scalar("Q"))}


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> bytes:
        start = self.at + 8
        self.at = start + self.scalar("Q")
        return self._data[start : self.at]

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _TEXT:
            return self.text().decode("utf-8", "replace")
        return self._array() if kind == _ARRAY else self.scalar(_SCALARS[kind])

    def _array(self) -> Any:
        kind, n = self.scalar("I"), self.scalar("Q")
        if kind in (_TEXT, _ARRAY):
            return [self.text() if kind == _TEXT else self._array() for _ in range(n)]
        values = np.frombuffer(self._data, np.dtype(_SCALARS[kind]).newbyteorder("<"), n, self.at).copy()
        self.at += values.nbytes
        return values
