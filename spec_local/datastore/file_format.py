"""Binary format of the datastore's files: an index of many texts, and a journal of the latest ones.

Both start with a magic string and a key for the vocabulary; CRC-32 checksums protect the rest. Numbers are
little-endian.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.datastore.context_index import SEPARATOR, ContextIndex

_MAGIC = b"specdec texts 1\n"
_INDEX = struct.Struct("<16s16sIIII")  # magic, key, words, positions, texts, checksum of the rest
_JOURNAL = struct.Struct("<16s16s")  # magic, key
_RECORD = struct.Struct("<IIQ")  # tokens, checksum of label and tokens, label
_LABEL, _TOKEN = np.dtype("<u8"), np.dtype("<i4")

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, int32 (n,), and a label; a newer text replaces an older one with the same label."""

    label: int
    tokens: Tokens

    @classmethod
    def of(cls, tokens: Sequence[int], name: str | None = None) -> "Text":
        """A text labelled by its name, such as the path of a file, or else by its tokens."""
        array = np.array(tokens, _TOKEN)
        source = array.tobytes() if name is None else name.encode("utf-8", "surrogateescape")
        return cls(int.from_bytes(hashlib.sha256(source).digest()[: _LABEL.itemsize], "little"), array)


def joined(texts: Iterable[Text]) -> Tokens:
    """The tokens of all texts, each text followed by a separator."""
    end = np.array([SEPARATOR], np.int32)
    return np.concatenate([end[:0], *(part for text in texts for part in (text.tokens, end))])


def encode_index(key: bytes, texts: Sequence[Text]) -> bytes:
    """The index file for some texts, the oldest first. key: 16 bytes that identify the vocabulary."""
    index = ContextIndex.build(joined(texts))
    labels = np.array([text.label for text in texts], _LABEL).tobytes()
    body = index.reversed_words + index.positions + labels
    n_words = len(index.reversed_words) // _TOKEN.itemsize
    n_positions = len(index.positions) // _TOKEN.itemsize
    return _INDEX.pack(_MAGIC, key, n_words, n_positions, len(texts), zlib.crc32(body)) + body


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


def journal_header(key: bytes) -> bytes:
    """The first bytes of a journal."""
    return _JOURNAL.pack(_MAGIC, key)


def encode_record(text: Text) -> bytes:
    """The record of a text in a journal."""
    body = text.label.to_bytes(_LABEL.itemsize, "little") + text.tokens.astype(_TOKEN).tobytes()
    return _RECORD.pack(len(text.tokens), zlib.crc32(body), text.label) + body[_LABEL.itemsize :]


def decode_journal(key: bytes, content: bytes) -> Iterator[tuple[Text, int]]:
    """The texts of a journal, each with the offset of its end; an incomplete record at the end is ignored.

    Raises:
        ValueError: the file is damaged or not a journal; the texts returned before that are intact.
    """
    header = journal_header(key)
    if content[: len(header)] != header:
        if header.startswith(content):
            return  # the writer was killed while it wrote the header
        raise ValueError("belongs to another version or vocabulary")
    at = len(header)
    while at + _RECORD.size <= len(content):
        n_tokens, checksum, label = _RECORD.unpack_from(content, at)
        start, end = at + _RECORD.size, at + _RECORD.size + n_tokens * _TOKEN.itemsize
        if end > len(content):
            return
        if zlib.crc32(content[at + _RECORD.size - _LABEL.itemsize : end]) != checksum:
            raise ValueError("is damaged")
        yield Text(label, np.frombuffer(content, _TOKEN, n_tokens, start)), end
        at = end
