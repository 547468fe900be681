"""Content of files that is followed by its hash.

The hash finds every accident: torn writes, bad disks. It does not protect against malicious files.
"""

import hashlib
from io import BufferedReader

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 32
CHUNK = 1 << 22  # bytes to hash, and to read or write, at once; some systems write at most 2 GiB per call


def digest_of(data: bytes = b"") -> "hashlib.blake2b":
    """The digest of what has been read or written so far, to be updated with the rest."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES)


def hash_of(data: bytes) -> bytes:
    """The hash of bytes: `HASH_BYTES` of them."""
    return digest_of(data).digest()


def read_hashed(file: BufferedReader, n: int, before: bytes = b"") -> NDArray[np.uint8] | None:
    """Read n bytes and the hash after them, which is also that of bytes before them.

    Returns:
        uint8 (n,); None: the file ends before, or the hash is another one.
    """
    data, digest = np.empty(n, np.uint8), digest_of(before)
    for start in range(0, n, CHUNK):
        chunk = data.data[start : start + CHUNK]
        if file.readinto(chunk) != len(chunk):
            return None
        digest.update(chunk)
    return data if file.read(HASH_BYTES) == digest.digest() else None
