"""Save the KV caches of contexts to a file, so that a long prompt need not be evaluated again.

llama.cpp does not validate a state, and a damaged one can crash the process. A state is therefore only
restored if its hash is correct and it was saved with the same model file, build and settings. This protects
against accidents but not against malicious files: do not load files from untrusted sources.

File format: `_MAGIC`, the length of the header (8 bytes, little-endian), the header (JSON), its hash; then,
for each part, the bytes of `LlamaRow.state` and their hash.
"""

import os
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from spec_local import kernels
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.llama.memory import check_free_memory
from spec_local.llama.row import LlamaRow
from spec_local.system import machine
from spec_local.system.files import reading, saving
from spec_local.system.hashed import CHUNK, HASH_BYTES, digest_of, hash_of, read_hashed

_FAMILY, _MAGIC = b"specdec state ", b"specdec state 1\n"
_MAX_HEADER = 1 << 26
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


class _Part(BaseModel):
    """The state of one context.

    conditions: everything that its bytes depend on, keyed by a name for error messages. size: in bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: str
    conditions: dict[str, str]
    tokens: list[NonNegativeInt]
    size: NonNegativeInt


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: list[_Part]


def size(rows: Mapping[str, LlamaRow]) -> int:
    """Return the size in bytes of the file that `save` would write now."""
    header = _header(rows)
    frame = len(_MAGIC) + 8 + len(header.model_dump_json().encode())
    return frame + sum(part.size for part in header.parts) + HASH_BYTES * (len(header.parts) + 1)


def save(path: Path, rows: Mapping[str, LlamaRow]) -> int:
    """Write the states of contexts to a file, atomically. Needs memory for the largest state.

    Args:
        path: an existing file is replaced when the new one is complete.
        rows: by role; empty ones are left out.

    Returns:
        The size of the file in bytes.

    Raises:
        InvalidRequest: the file cannot be written.
        ContextOverflow: there is not enough memory.
    """
    header = _header(rows)
    with saving(path) as temporary, temporary.open("wb") as file:
        text = header.model_dump_json().encode()
        file.write(_MAGIC + len(text).to_bytes(8, "little") + text + hash_of(text))
        for part in header.parts:
            state, digest = rows[part.role].state().data, digest_of()
            for start in range(0, len(state), CHUNK):
                chunk = state[start : start + CHUNK]
                digest.update(chunk)
                file.write(chunk)
            file.write(digest.digest())
        return file.tell()


def load(path: Path, rows: Mapping[str, LlamaRow]) -> list[str]:
    """Restore the states of contexts from a file. Needs memory for the whole file.

    Args:
        rows: by role. The state of the first one must be in the file and match the context; others that
            are missing or do not match are left unchanged.

    Returns:
        The roles that were restored.

    Raises:
        InvalidRequest: the file is damaged, or was saved with another model, build or setting; nothing has
            changed.
        ContextOverflow: the first context is too short, or there is not enough memory; nothing has changed.
        BackendError: llama.cpp rejected a state; contexts may be empty.
    """
    with reading(path) as file:
        header = _read_header(file, path)
        parts = {part.role: part for part in header.parts}
        first = next(iter(rows))
        if first not in parts:
            raise InvalidRequest(
                f"{path} has no state of the {first} model: the prompt must be evaluated again"
            )
        _check(path, parts[first], rows[first])
        wanted = {first} | {role for role in rows if role in parts and _fits(parts[role], rows[role])}
        check_free_memory(sum(parts[role].size for role in wanted), f"to load {path}")
        states = {}
        for part in header.parts:
            if part.role in wanted:
                states[part.role] = _read_state(file, part.size, path)
            else:
                file.seek(part.size + HASH_BYTES, os.SEEK_CUR)
    for role, state in states.items():
        rows[role].restore(parts[role].tokens, state)
    return list(states)


def _header(rows: Mapping[str, LlamaRow]) -> _Header:
    return _Header(
        parts=[
            _Part(
                role=role,
                conditions=conditions(row),
                tokens=list(row.cached),
                size=row.state_size(),
            )
            for role, row in rows.items()
            if row.cached
        ]
    )


def _read_header(file: BufferedReader, path: Path) -> _Header:
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        if magic.startswith(_FAMILY):
            raise InvalidRequest(
                f"{path} was saved by another version of specdec: the prompt must be evaluated again"
            )
        raise InvalidRequest(f"{path} is not a saved state: give a file saved by specdec")
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _MAX_HEADER else b""
    if hash_of(text) != file.read(HASH_BYTES):
        raise _damaged(path)
    try:
        header = _Header.model_validate_json(text)
    except ValueError:
        raise _damaged(path) from None
    rest = sum(part.size + HASH_BYTES for part in header.parts)
    if file.tell() + rest != os.fstat(file.fileno()).st_size:
        raise _damaged(path)
    return header


def _read_state(file: BufferedReader, n: int, path: Path) -> NDArray[np.uint8]:
    state = read_hashed(file, n)
    if state is None:
        raise _damaged(path)
    return state


def _check(path: Path, part: _Part, row: LlamaRow) -> None:
    """Raise an error if a part cannot be restored into a context."""
    found = conditions(row)
    for name in found | part.conditions:
        if part.conditions.get(name) != found.get(name):
            raise InvalidRequest(f"{path} was saved with another {name}: the prompt must be evaluated again")
    if len(part.tokens) > row.n_ctx:
        raise ContextOverflow(
            f"{path} has {len(part.tokens)} tokens, the context only {row.n_ctx}: give a larger `n_ctx`"
        )
    if max(part.tokens, default=0) >= row.n_vocab:
        raise _damaged(path)


def _fits(part: _Part, row: LlamaRow) -> bool:
    try:
        _check(Path(), part, row)
    except (InvalidRequest, ContextOverflow):
        return False
    return True


def _damaged(path: Path) -> InvalidRequest:
    return InvalidRequest(f"{path} is damaged: the prompt must be evaluated again")


def conditions(row: LlamaRow) -> dict[str, str]:
    """Return everything that a state depends on. It does not depend on `n_ctx` and `max_branches`."""
    model = row.model
    facts: dict[str, Any] = {
        "model file": _identity(model.path),
        "build of llama.cpp": machine.llama_cpp_build(),
        "cache type": row.cache_type,
        "setting of flash attention": row.flash_attention,
        "number of layers on the GPU": model.gpu_layers,
        "extension of the context": row.n_ctx > (model.n_ctx_original or row.n_ctx),
    }
    if row.pad_to:
        facts["setting of `reproducible`"] = True
    if used := kernels.identity():
        facts["set of CPU kernels"] = used
    return {name: str(fact) for name, fact in facts.items()}


def _identity(path: Path) -> str:
    """Return a hash of a model file's size and of samples of its bytes, independent of its path."""
    with reading(path) as file:
        n = os.fstat(file.fileno()).st_size
        digest = digest_of(str(n).encode())
        for i in range(_SAMPLES):
            file.seek(max(0, n - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
