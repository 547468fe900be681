"""Binary format of the datastore's files: an index of many texts, and a journal of the latest ones.

The index starts with a magic string and a key for the vocabulary, and a CRC-32 checksum protects the rest.
The journal has no header: it is a file of `records`. Numbers are little-endian.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.datastore import records
from spec_local.datastore.context_index import SEPARATOR, ContextIndex

_MAGIC = b"specdec texts 1\n"
_INDEX = struct.Struct("<16s16sIIII")  # magic, key, words, positions, texts, checksum of the rest
_LABEL, _TOKEN = np.dtype("<u8"), np.dtype("<i4")

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StoredText:
    """Tokens, int32 (n,), and a label; a newer text replaces an older one with the same label."""

    label: int
    tokens: Tokens

    @classmethod
    def of(cls, tokens: Sequence[int] | Tokens, name: str | None = None) -> "StoredText":
        """A text labelled by its name, such as the path of a file, or else by its tokens."""
        array = np.array(tokens, _TOKEN)
        source = array.tobytes() if name is None else name.encode("utf-8", "surrogateescape")
        return cls(int.from_bytes(hashlib.sha256(source).digest()[: _LABEL.itemsize], "little"), array)


def joined(texts: Iterable[StoredText]) -> Tokens:
    """The tokens of all texts, each text followed by a separator."""
    end = np.array([SEPARATOR], np.int32)
    return np.concatenate([end[:0], *(part for text in texts for part in (text.tokens, end))])


def encode_index(key: bytes, texts: Sequence[StoredText]) -> bytes:
    """The index file for some texts, the oldest first. key: 16 bytes that identify the vocabulary."""
    index = ContextIndex.build(joined(texts))
    labels = np.array([text.label for text in texts], _LABEL).tobytes()
    body = index.reversed_words + index.positions + labels
    n_words = len(index.reversed_words) // _TOKEN.itemsize
    n_positions = len(index.positions) // _TOKEN.itemsize
    return _INDEX.pack(_MAGIC, key, n_words, n_positions, len(texts), zlib.crc32(body)) + body


def recovered_texts(key: bytes, content: bytes) -> list[StoredText]:
    """The texts of a damaged index that are proven to be whole, the oldest first.

    These are the texts that are labelled by their tokens: answers, but not files. Where the index is of
    another vocabulary, or shorter or longer than its header says, there are none. key: as in `encode_index`.
    """
    if len(content) < _INDEX.size:
        return []
    magic, file_key, n_words, n_positions, n_texts, _ = _INDEX.unpack_from(content)
    labels = _INDEX.size + (n_words + n_positions) * _TOKEN.itemsize
    if (magic, file_key) != (_MAGIC, key) or len(content) != labels + n_texts * _LABEL.itemsize:
        return []
    known = set(np.frombuffer(content, _LABEL, offset=labels).tolist())
    tokens = ContextIndex(content[_INDEX.size : _INDEX.size + n_words * _TOKEN.itemsize]).tokens
    parts = np.split(tokens, np.flatnonzero(tokens == SEPARATOR) + 1)
    return [text for text in (StoredText.of(part[:-1]) for part in parts) if text.label in known]


def decode_index(key: bytes, content: bytes) -> tuple[ContextIndex, list[int]]:
    """The texts of an index file with their sorted positions, and their labels.

    Raises:
        ValueError: the file is damaged or not an index.
    """
    if len(content) < _INDEX.size:
        raise ValueError("is truncated")
    magic, file_key, n_words, n_positions, n_texts, checksum = _INDEX.unpack_from(content)
    if (magic, file_key) != (_MAGIC, key):
        raise ValueError("belongs to another version or vocabulary")
    body = content[_INDEX.size :]
    split, end = n_words * _TOKEN.itemsize, (n_words + n_positions) * _TOKEN.itemsize
    if len(body) != end + n_texts * _LABEL.itemsize or zlib.crc32(body) != checksum:
        raise ValueError("is damaged")
    words, positions = np.frombuffer(body[:split], _TOKEN), np.frombuffer(body[split:end], _TOKEN)
    whole = n_texts == n_words == 0 or ((words[:1] == 0).all() and np.count_nonzero(words == 0) == n_texts)
    if not whole or (n_positions and not 0 < positions.min() <= positions.max() < n_words):
        raise ValueError("is damaged")
    return ContextIndex(body[:split], body[split:end]), np.frombuffer(body[end:], _LABEL).tolist()


def encode_record(key: bytes, text: StoredText) -> bytes:
    """The record of a text in a journal. key: as in `encode_index`."""
    return records.encode(key, text.label, text.tokens.astype(_TOKEN).tobytes())


def decode_journal(key: bytes, content: bytes) -> Iterator[tuple[StoredText, int]]:
    """The texts of a journal, each with the offset of its end; raises ValueError as `records.decode`."""
    for label, tokens, end in records.decode(key, content):
        yield StoredText(label, np.frombuffer(tokens, _TOKEN)), end
