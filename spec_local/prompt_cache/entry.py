"""What is stored: the cells of one block of a history, or the recurrent state after a history.

A history is cut into blocks of a fixed number of tokens. Each block has a key, the hash of its tokens and of
the key of the block before it, so that a key stands for all tokens up to the block's end, and histories with
the same beginning share the keys of that beginning. An entry is a child of the key of the full blocks before
it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["cells", "state"]

TOKEN_BYTES = 4
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The address of stored bytes.

    parent: the key of the full blocks before the entry. start: how many tokens these blocks have. tokens:
    those of the entry itself, as little-endian int32; at most a block for cells, less than a block for a
    state. size: the number of bytes stored.
    """

    kind: Kind
    parent: bytes
    start: int
    tokens: bytes = field(repr=False)
    size: int
    key: bytes

    @classmethod
    def of(cls, kind: Kind, parent: bytes, start: int, tokens: bytes, size: int) -> "CacheEntry":
        return cls(kind, parent, start, tokens, size, key_of(kind, parent, tokens))

    @property
    def n(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        return self.start + self.n


class FoundCells(NamedTuple):
    """n: how many of the entry's tokens, from `start`, agree with the history."""

    entry: CacheEntry
    start: int
    n: int


class FoundState(NamedTuple):
    """length: the state is that after so many tokens of the history."""

    entry: CacheEntry
    length: int


@dataclass(frozen=True)
class Match:
    """What is stored for a history.

    cells: contiguous from 0; all but the last have `n` tokens of a full block. states: by length, ascending.
    """

    cells: Sequence[FoundCells]
    states: Sequence[FoundState]

    @property
    def n_cells(self) -> int:
        """Number of tokens whose cells are stored."""
        return sum(found.n for found in self.cells)

    def whole(self) -> list[CacheEntry]:
        """The entries of which all tokens agree with the history, by their ends, descending."""
        entries = [found.entry for found in self.cells if found.n == found.entry.n]
        entries += [found.entry for found in self.states]
        return sorted(entries, key=lambda entry: entry.end, reverse=True)


class History:
    """The tokens of a history, cut into blocks.

    keys: those of the full blocks; keys[i] stands for the i blocks before block i, keys[0] for the identity.
    """

    def __init__(self, identity: bytes, block: int, tokens: Sequence[int]) -> None:
        raw = np.asarray(tokens, "<i4").tobytes()
        step = block * TOKEN_BYTES
        self.n = len(raw) // TOKEN_BYTES
        self.block = block
        self.parts = [raw[at : at + step] for at in range(0, len(raw), step)]
        self.keys = [identity]
        for part in self.parts[: self.n // block]:
            self.keys.append(key_of("cells", self.keys[-1], part))

    def part(self, i: int) -> bytes:
        """The tokens of block i, which may be partial, or empty at the end of the history."""
        return self.parts[i] if i < len(self.parts) else b""


def identity_key(identity: str, block: int) -> bytes:
    """The key of the empty history. Entries of another block size have nothing in common."""
    return _digest(f"{block} {identity}".encode("utf-8", "surrogateescape"))


def key_of(kind: Kind, parent: bytes, tokens: bytes) -> bytes:
    """The key of an entry; of a full block of cells also that of the history up to the block's end."""
    return _digest(kind.encode() + parent + tokens)


def n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """With how many equal tokens two sequences of tokens begin."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
