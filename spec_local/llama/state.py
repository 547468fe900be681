"""What models have read of a text, on disk: a long context goes on without being read again.

llama.cpp's reader trusts its bytes, and a wrong one can kill the process. So nothing reaches it that is not known
to be whole (every part of the file has its hash) and to come from the same model file, build and settings. It is
a guard against accidents: a file that somebody made on purpose is as safe as a model that somebody made.

The file: `_MAGIC`, the length of the header (8 bytes, the lowest first), the header (JSON), its hash; then of each part
the bytes of `Context.state`, and their hash.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from spec_local import kernels, machine
from spec_local.errors import ContextOverflow, InvalidRequest
from spec_local.files import reading, saving
from spec_local.llama.context import Context
from spec_local.llama.memory import check_free_memory

_FAMILY, _MAGIC = b"specdec state ", b"specdec state 1\n"
_HASH_BYTES = 32
_CHUNK = 1 << 22  # what is hashed and written at once; some systems take no more than 2 GiB a call
_MAX_HEADER = 1 << 26
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


class _Part(BaseModel):
    """conditions: all that the bytes depend on, by what people call it. size: bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: str
    conditions: dict[str, str]
    tokens: list[NonNegativeInt]
    size: NonNegativeInt


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: list[_Part]


def size(contexts: Mapping[str, Context]) -> int:
    """Bytes of the file that `save` would write now."""
    header = _header(contexts)
    frame = len(_MAGIC) + 8 + len(header.model_dump_json().encode())
    return frame + sum(part.size for part in header.parts) + _HASH_BYTES * (len(header.parts) + 1)


def save(path: Path, contexts: Mapping[str, Context]) -> int:
    """Write what contexts have read, atomically; takes memory for the largest part, beside the contexts.

    Args:
        path: a file there is replaced at the very end.
        contexts: by role; those that hold no text are left out.

    Returns:
        bytes of the file.

    Raises:
        InvalidRequest: the file cannot be written.
        ContextOverflow: there is no memory for a part.
    """
    header = _header(contexts)
    with saving(path) as temporary, temporary.open("wb") as file:
        text = header.model_dump_json().encode()
        file.write(_MAGIC + len(text).to_bytes(8, "little") + text + _hash(text))
        for part in header.parts:
            state = contexts[part.role].state().data
            digest = hashlib.blake2b(digest_size=_HASH_BYTES)
            for start in range(0, len(state), _CHUNK):
                chunk = state[start : start + _CHUNK]
                digest.update(chunk)
                file.write(chunk)
            file.write(digest.digest())
        return file.tell()


def load(path: Path, contexts: Mapping[str, Context]) -> list[str]:
    """Let contexts hold what they held when the file was written; takes memory for the whole file.

    Args:
        contexts: by role; the first must be in the file and fit. Others that do not are left as they are.

    Returns:
        the roles that were loaded.

    Raises:
        InvalidRequest: the file is damaged, or of another model, build or setting; nothing has changed.
        ContextOverflow: the first context is too short, or there is no memory; nothing has changed.
        BackendError: llama.cpp refused the bytes all the same; contexts may be empty.
    """
    with reading(path) as file:
        header = _read_header(file, path)
        parts = {part.role: part for part in header.parts}
        first = next(iter(contexts))
        if first not in parts:
            raise InvalidRequest(
                f"{path} holds nothing that the {first} model has read: the text must be read again"
            )
        _check(path, parts[first], contexts[first])
        wanted = {first} | {role for role in contexts if role in parts and _fits(parts[role], contexts[role])}
        check_free_memory(sum(parts[role].size for role in wanted), f"to load {path}")
        states = {}
        for part in header.parts:
            if part.role in wanted:
                states[part.role] = _read_state(file, part.size, path)
            else:
                file.seek(part.size + _HASH_BYTES, os.SEEK_CUR)
    for role, state in states.items():
        contexts[role].restore(parts[role].tokens, state)
    return list(states)


def _header(contexts: Mapping[str, Context]) -> _Header:
    return _Header(
        parts=[
            _Part(
                role=role,
                conditions=_conditions(context),
                tokens=list(context.cached),
                size=context.state_size(),
            )
            for role, context in contexts.items()
            if context.cached
        ]
    )


def _read_header(file: BufferedReader, path: Path) -> _Header:
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        if magic.startswith(_FAMILY):
            raise InvalidRequest(
                f"{path} was written by another version of specdec: the text must be read again"
            )
        raise InvalidRequest(f"{path} is no saved state: give a file that specdec has saved")
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _MAX_HEADER else b""
    if _hash(text) != file.read(_HASH_BYTES):
        raise _damaged(path)
    try:
        header = _Header.model_validate(json.loads(text))
    except (ValueError, ValidationError, RecursionError):
        raise _damaged(path) from None
    rest = sum(part.size + _HASH_BYTES for part in header.parts)
    if file.tell() + rest != os.fstat(file.fileno()).st_size:
        raise _damaged(path)
    return header


def _read_state(file: BufferedReader, n: int, path: Path) -> NDArray[np.uint8]:
    state = np.empty(n, np.uint8)
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for start in range(0, n, _CHUNK):
        chunk = state.data[start : start + _CHUNK]
        if file.readinto(chunk) != len(chunk):
            raise _damaged(path)
        digest.update(chunk)
    if digest.digest() != file.read(_HASH_BYTES):
        raise _damaged(path)
    return state


def _check(path: Path, part: _Part, context: Context) -> None:
    """Raise what makes a part unfit for a context."""
    ours = _conditions(context)
    for name in ours | part.conditions:
        if part.conditions.get(name) != ours.get(name):
            raise InvalidRequest(f"{path} was saved with another {name}: the text must be read again")
    if len(part.tokens) > context.n_ctx:
        raise ContextOverflow(
            f"{path} holds {len(part.tokens)} tokens and the context {context.n_ctx}: give a larger --ctx"
        )
    if max(part.tokens, default=0) >= context.n_vocab:
        raise _damaged(path)


def _fits(part: _Part, context: Context) -> bool:
    try:
        _check(Path(), part, context)
    except (InvalidRequest, ContextOverflow):
        return False
    return True


def _damaged(path: Path) -> InvalidRequest:
    return InvalidRequest(f"{path} is damaged: the text must be read again")


def _conditions(context: Context) -> dict[str, str]:
    """All that evaluated bytes depend on. The length of the context and its branches do not matter."""
    model = context.model
    facts: dict[str, Any] = {
        "model file": _identity(model.path),
        "build of llama.cpp": machine.llama_cpp_build(),
        "cache type": context.cache_type,
        "setting of flash attention": context.flash_attention,
        "number of layers on the GPU": model.gpu_layers,
        "extension of the context": context.n_ctx > (model.n_ctx_original or context.n_ctx),
    }
    if used := kernels.identity():
        facts["set of CPU kernels"] = used
    return {name: str(fact) for name, fact in facts.items()}


def _identity(path: Path) -> str:
    """Names a model file by its size and samples of its bytes, wherever it lies and whatever it is called."""
    with reading(path) as file:
        n = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(str(n).encode(), digest_size=_HASH_BYTES)
        for i in range(_SAMPLES):
            file.seek(max(0, n - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
