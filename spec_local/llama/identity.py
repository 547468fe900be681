"""A key for a model's content, which stays the same when its file is moved or copied."""

import hashlib
from pathlib import Path

from spec_local.llama.gguf_tensors import parts
from spec_local.system.files import opened

_SAMPLES = 64  # of each file: two models with the same header differ in all of their weights
_SAMPLE_SIZE = 1 << 16  # bytes; 4 MB in all, which takes a few milliseconds


def content_key(path: Path) -> str:
    """Return 16 hexadecimal digits that depend on a model's content only, from samples of its files.

    path: the model's file, or the first one of a model that is split.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for part in parts(path) or [path]:
        size = part.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with opened(part) as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_SIZE) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_SIZE))
    return digest.hexdigest()[:16]
