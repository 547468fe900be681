"""The files of a store of texts, as bytes: an index of many texts, and a journal of texts.

Both begin with what they are and of which vocabulary; everything else is under a checksum. Numbers are little-endian.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.datastore.text_index import SEPARATOR, ContextIndex

_MAGIC = b"specdec texts 1\n"
_INDEX = struct.Struct("<16s16sIIII")  # magic, key, words, places, texts, checksum of what follows
_JOURNAL = struct.Struct("<16s16s")  # magic, key
_RECORD = struct.Struct("<IIQ")  # tokens, checksum of label and tokens, label
_LABEL, _TOKEN = np.dtype("<u8"), np.dtype("<i4")

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, int32 (n,); a newer text takes the place of an older one with its label."""

    label: int
    tokens: Tokens

    @classmethod
    def of(cls, tokens: Sequence[int], name: str | None = None) -> "Text":
        """name: what it is the text of, such as a file; without one only the same tokens are the same text."""
        array = np.array(tokens, _TOKEN)
        source = array.tobytes() if name is None else name.encode("utf-8", "surrogateescape")
        return cls(int.from_bytes(hashlib.sha256(source).digest()[: _LABEL.itemsize], "little"), array)


def in_one(texts: Iterable[Text]) -> Tokens:
    """The texts one after the other, each with a separator."""
    end = np.array([SEPARATOR], np.int32)
    return np.concatenate([end[:0], *(part for text in texts for part in (text.tokens, end))])


def index_file(key: bytes, texts: Sequence[Text]) -> bytes:
    """The index of some texts, the oldest first. key: 16 bytes that stand for the vocabulary."""
    index = ContextIndex.of(in_one(texts))
    body = index.mirrored + index.order + np.array([text.label for text in texts], _LABEL).tobytes()
    n_words, n_places = len(index.mirrored) // _TOKEN.itemsize, len(index.order) // _TOKEN.itemsize
    return _INDEX.pack(_MAGIC, key, n_words, n_places, len(texts), zlib.crc32(body)) + body


def read_index(key: bytes, content: bytes) -> tuple[ContextIndex, list[int]]:
    """Texts with their sorted places, and their labels.

    Raises:
        ValueError: it is damaged, or something else.
    """
    if len(content) < _INDEX.size:
        raise ValueError("is cut")
    magic, whose, n_words, n_places, n_texts, checksum = _INDEX.unpack_from(content)
    if (magic, whose) != (_MAGIC, key):
        raise ValueError("is of another version or vocabulary")
    body = content[_INDEX.size :]
    split, end = n_words * _TOKEN.itemsize, (n_words + n_places) * _TOKEN.itemsize
    if len(body) != end + n_texts * _LABEL.itemsize or zlib.crc32(body) != checksum:
        raise ValueError("is damaged")
    words, places = np.frombuffer(body[:split], _TOKEN), np.frombuffer(body[split:end], _TOKEN)
    whole = n_texts == n_words == 0 or ((words[:1] == 0).all() and np.count_nonzero(words == 0) == n_texts)
    if not whole or (n_places and not 0 < places.min() <= places.max() < n_words):
        raise ValueError("is damaged")
    return ContextIndex(body[:split], body[split:end]), np.frombuffer(body[end:], _LABEL).tolist()


def journal_head(key: bytes) -> bytes:
    """How a journal begins."""
    return _JOURNAL.pack(_MAGIC, key)


def record(text: Text) -> bytes:
    """A text in a journal."""
    body = text.label.to_bytes(_LABEL.itemsize, "little") + text.tokens.astype(_TOKEN).tobytes()
    return _RECORD.pack(len(text.tokens), zlib.crc32(body), text.label) + body[_LABEL.itemsize :]


def read_journal(key: bytes, content: bytes) -> Iterator[tuple[Text, int]]:
    """The texts of a journal, each with the offset of its end; the beginning of one at the end is no fault.

    Raises:
        ValueError: it is damaged, or something else; the texts before that are good.
    """
    header = journal_head(key)
    if content[: len(header)] != header:
        if header.startswith(content):
            return  # killed with its first bytes
        raise ValueError("is of another version or vocabulary")
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
