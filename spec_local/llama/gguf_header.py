"""Read the first metadata of a GGUF file without llama.cpp: fast, and safe for a damaged file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from spec_local.errors import ModelFileError
from spec_local.system.files import opened

Metadata = dict[str, str | int | float]

HEADS = ("eagle3", "dflash", "gemma4-assistant")
"""Architectures of heads, which read another model's hidden states."""
_READ = 1 << 16  # bytes; what describes a model comes before its vocabulary, which is larger than this
_READ_SHAPES = 1 << 20  # bytes; the 500 to 1,000 tensors of a projector take 60 each
_MAX_DIMENSIONS = 4  # of a tensor of ggml
_READ_TOKENS = 1 << 24  # bytes; the tokens of a vocabulary of 262,144 end after 4.4 million
_READ_TOKENIZER = 1 << 26  # bytes; the merges of the largest vocabularies end after 20 million
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # for struct
_STRING, _ARRAY = 8, 9
_UNREADABLE = (OSError, EOFError, KeyError, ValueError, struct.error)  # a file, or its damaged content
_PROJECTOR = (
    "a projector for images or sound (mmproj): give the model that it belongs to, and this file as `mmproj`"
)
OTHER_TYPES = {  # `general.type`, or an architecture: what it is, and what to give instead
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "adapter": "a LoRA adapter: merge it into its model with llama.cpp's llama-export-lora, and give that",
    "controlvector": "a control vector: give a model",
    "imatrix": "an importance matrix for quantization: give the model that was made with it",
}
NO_TEXT = re.compile(r"bert|clip|encoder|embedding|vae|whisper")  # architectures


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a vocabulary, as they are in the file.

    tokenizer: its type, such as ``gpt2``. starts: where in `data` each token starts, and where the last one
    ends.
    """

    tokenizer: str
    data: bytes
    starts: Sequence[int]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def between(self, first: int, end: int) -> bytes:
        """The lengths and texts of the tokens from `first` to before `end`."""
        return self.data[self.starts[first] : self.starts[end]]


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a header. kind, item: numbers of its type, and of that of an array's elements."""

    kind: int
    item: int | None
    value: str | int | float | Sequence[bytes] | Sequence[int | float]


def read_metadata(path: Path) -> Metadata:
    """Numbers and texts up to the vocabulary, by their full names; none if it is no readable GGUF file."""
    found: Metadata = {}
    try:
        data = _beginning(path, _READ)
        for key, kind in _entries(data):
            if key.startswith("tokenizer."):
                break
            value = _value(data, kind)
            if value is not None:
                found[key] = value
    except _UNREADABLE:  # also the end of what was read
        pass
    return found


def read_tokens(path: Path) -> Tokens | None:
    """The vocabulary's tokens, in about 50 ms; None if it is no readable GGUF file, or has none."""
    try:
        data, tokenizer = _beginning(path, _READ_TOKENS), ""
        for key, kind in _entries(data):
            if key == "tokenizer.ggml.tokens" and kind == _ARRAY and _number(data, "I") == _STRING:
                n = int(_number(data, "Q"))
                return Tokens(tokenizer, data.getvalue(), _starts(data.getvalue(), data.tell(), n))
            value = _value(data, kind)
            if key == "tokenizer.ggml.model":
                tokenizer = str(value)
    except _UNREADABLE:
        pass
    return None


def read_tokenizer(path: Path) -> dict[str, Field]:
    """The fields of the vocabulary by their full names, without chat templates and empty arrays.

    In about 0.1 s, where the package gguf takes seconds.

    Raises:
        ModelFileError: the header is damaged.
    """
    found: dict[str, Field] = {}
    try:
        data = _beginning(path, _READ_TOKENIZER)
        for key, kind in _entries(data):
            is_needed = key.startswith("tokenizer.") and "chat_template" not in key
            if kind == _STRING and not is_needed:
                data.seek(int(_number(data, "Q")), 1)
            elif kind != _ARRAY or not is_needed:
                value = _value(data, kind)
                if is_needed and value is not None:
                    found[key] = Field(kind, None, value)
            elif (field := _array(data)).value:
                found[key] = field
    except _UNREADABLE:
        raise ModelFileError(f"{path} has a damaged header: download it again") from None
    return found


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the first tensors, by name, for a file without a vocabulary; none if it cannot be read.

    The first dimension is the one along which values are adjacent, as in ggml.
    """
    found: dict[str, tuple[int, ...]] = {}
    try:
        data = _beginning(path, _READ_SHAPES)
        data.seek(8)
        n_tensors = int(_number(data, "Q"))
        data.seek(0)
        for _, kind in _entries(data):
            _value(data, kind)
        for _ in range(n_tensors):
            name, n = _text(data), int(_number(data, "I"))
            if n > _MAX_DIMENSIONS:
                break
            found[name] = struct.unpack(f"<{n}Q", data.read(8 * n))
            _number(data, "I"), _number(data, "Q")  # type and offset
    except _UNREADABLE:  # also the end of what was read
        pass
    return found


def _array(data: BytesIO) -> Field:
    item, n = int(_number(data, "I")), int(_number(data, "Q"))
    if item == _STRING:
        starts = _starts(data.getvalue(), data.tell(), n)
        data.seek(starts[-1])
        whole = data.getvalue()
        texts = [whole[start + 8 : end] for start, end in itertools.pairwise(starts)]
        return Field(_ARRAY, item, texts)
    form = struct.Struct(f"<{min(n, _READ_TOKENIZER)}{_SCALARS[item]}")
    return Field(_ARRAY, item, form.unpack(data.read(form.size)))


def generates_text(metadata: Metadata) -> bool:
    """Return whether it is a model or a head, not an adapter, image projector or embedding model."""
    architecture = str(metadata.get("general.architecture", ""))
    return bool(
        architecture
        and metadata.get("general.type") not in OTHER_TYPES
        and not NO_TEXT.search(architecture)
        and not metadata.get(f"{architecture}.pooling_type")
    )


def describe(metadata: Metadata) -> str:
    """The model's name and quantization, such as ``Llama 3.2 3B Instruct, Q4_K_M``, in one line."""
    words = [str(metadata.get(f"general.{key}", "")) for key in ("architecture", "size_label")]
    name = str(metadata.get("general.name", "")) or " ".join(filter(None, words))
    return ", ".join(filter(None, [" ".join(name.split()), quantization(metadata)]))


def quantization(metadata: Metadata) -> str:
    """The model's quantization, such as ``Q4_K_M``; empty: it is unknown."""
    import gguf  # takes 0.1 s

    try:
        kind = gguf.LlamaFileType(metadata.get("general.file_type")).name
    except ValueError:
        return ""
    return re.sub("^(MOSTLY|ALL)_", "", kind)


def _beginning(path: Path, n_bytes: int) -> BytesIO:
    with opened(path) as file:
        return BytesIO(file.read(n_bytes))


def _entries(data: BytesIO) -> Iterator[tuple[str, int]]:
    """The keys of a file's metadata, each with the type of its value, which is to be read before the next."""
    if data.read(4) != b"GGUF" or _number(data, "I") < 2:
        return
    _number(data, "Q")  # number of tensors
    for _ in range(int(_number(data, "Q"))):
        yield _text(data), int(_number(data, "I"))


def _starts(data: bytes, position: int, n: int) -> list[int]:
    """Where each of `n` strings from `position` on starts, and where the last one ends."""
    length_at, found = struct.Struct("<Q").unpack_from, [position]
    for _ in range(n):
        position += 8 + length_at(data, position)[0]
        found.append(position)
    if position > len(data):
        raise EOFError
    return found


def _value(data: BytesIO, kind: int) -> str | int | float | None:
    """Read a value; None for an array, which is skipped."""
    if kind == _STRING:
        return _text(data)
    if kind != _ARRAY:
        return _number(data, _SCALARS[kind])
    kind, n = int(_number(data, "I")), int(_number(data, "Q"))
    if kind == _STRING:
        for _ in range(n):
            _text(data)
    else:
        data.seek(min(n, _READ_TOKENS) * struct.calcsize(_SCALARS[kind]), 1)
    return None


def _number(data: BytesIO, form: str) -> int | float:
    value: int | float = struct.unpack(f"<{form}", data.read(struct.calcsize(form)))[0]
    return value


def _text(data: BytesIO) -> str:
    n = int(_number(data, "Q"))
    if n > _READ or len(text := data.read(n)) < n:
        raise EOFError
    return text.decode("utf-8", "replace")
