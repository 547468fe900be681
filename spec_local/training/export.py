"""Write a draft model as a GGUF file with a part of the main model's vocabulary."""

import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import spec_local
from spec_local.errors import BackendError, InvalidRequest, ModelFileError
from spec_local.files import saving, sha256
from spec_local.llama import runtime
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantize_into
from spec_local.proposers.vocabulary_map import VocabularyMap
from spec_local.training import tokenizer
from spec_local.training.model_shape import ModelShape, Weights, tensor_shapes
from spec_local.training.tokenizer import BPE, Tokenizer


def write_draft(
    path: Path,
    main_path: Path,
    kept: NDArray[np.uint32],
    shape: ModelShape,
    weights: Weights,
    *,
    kind: str = "Q8_0",
    embedding_kind: str | None = None,
    provenance: Mapping[str, str | int | float],
) -> Path:
    """Write a ``llama`` model, atomically; an existing file is replaced.

    Args:
        kept: uint32 (shape.n_vocab,), the main model's tokens in the draft model's order, from
            `select_tokens`.
        weights: all tensors; the output matrix is tied to ``token_embd.weight``.
        kind: quantization of the matrices, one of `spec_local.llama.quantize.KINDS` or `BLOCK_KINDS`.
        embedding_kind: quantization of the embeddings, one of `BLOCK_KINDS`; None: as in `quantize_into`.
        provenance: metadata, stored as ``specdec.*`` with the main model's name and SHA-256.

    Raises:
        InvalidRequest: the file cannot be written or is the main model itself, a kind is unknown, or `kept`
            lacks a special token.
        BackendError: llama.cpp rejects these weights with this shape.
        ModelFileError, ModelError: the main model cannot be read, or its tokenizer cannot be trimmed.
    """
    if path.exists() and path.samefile(main_path):
        raise InvalidRequest(f"{path} is the main model itself: give another name for the draft model")
    metadata = tokenizer.read_metadata(main_path)
    about = {
        "main.name": _name(main_path, metadata),
        "main.sha256": _hash(main_path, main_path.stat().st_mtime_ns),
        "version": spec_local.__version__,
        **provenance,
    }
    with saving(path) as target:
        # With this prefix, the next `saving` removes what a killed process left behind.
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f"{target.name}.", suffix=".part"
        ) as plain:
            source = Path(plain.name)
            _write(source, main_path, metadata, kept, shape, weights, about)
            try:
                quantize_into(source, target, kind, embedding_kind=embedding_kind)
                Model(target, weights=False).close()
            except (BackendError, ModelFileError):
                if shutil.disk_usage(target.parent).free < source.stat().st_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
                raise BackendError(
                    f"llama.cpp rejects the draft model ({runtime.failure_reason()}): "
                    "check that its weights match its shape and are finite"
                ) from None
        shutil.copymode(main_path, target)  # temporary files are private to their owner
    return path


def tokenize_vocabulary(main_path: Path, kept: NDArray[np.uint32]) -> list[tuple[int, ...]]:
    """Return the draft model's tokens, one or more, for each token of the main model.

    They are exactly those used in decoding, where the draft model's BOS is added to a text without it if the
    main model's vocabulary requires that: see `VocabularyMap.to_draft`.

    Raises:
        ModelFileError, ModelError: the main model cannot be read, or its tokenizer cannot be trimmed.
        InvalidRequest: `kept` lacks a special token.
        OSError: there is no disk space for a temporary file of about a megabyte.
    """
    shape = ModelShape(len(kept), n_embd=2, n_layers=1, n_head=1, n_head_kv=1, head_dim=2, n_ff=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        _write(path, main_path, tokenizer.read_metadata(main_path), kept, shape, _zeros(shape), {})
        main, draft = Model(main_path, weights=False), Model(path, weights=False)
        vocabulary_map = VocabularyMap(main.vocabulary, draft.vocabulary)
        spellings = [vocabulary_map.to_draft(token) for token in range(main.vocabulary.n_tokens)]
        main.close()
        draft.close()
    return spellings


def _write(
    path: Path,
    main_path: Path,
    metadata: Mapping[str, Any],
    kept: NDArray[np.uint32],
    shape: ModelShape,
    weights: Weights,
    about: Mapping[str, str | int | float],
) -> None:
    """Write an F32 file; about: metadata that is stored as ``specdec.*``."""
    import gguf  # takes 0.1 s

    main = Model(main_path, weights=False)
    writer = gguf.GGUFWriter(path, "llama")
    try:
        _add_tokenizer(writer, tokenizer.read(main, metadata), kept)
        _add_shape(writer, shape)
        _add_origin(writer, _name(main_path, metadata), metadata)
        for key, value in about.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float64
            add = writer.add_int64 if isinstance(value, int) else add
            add(f"specdec.{key}", value)
        for name, values in weights.items():
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is None:  # a short write by NumPy has no error number
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise
    finally:
        writer.close()
        main.close()


def _name(main_path: Path, metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("general.name", main_path.stem))


def _add_origin(writer: Any, main: str, metadata: Mapping[str, Any]) -> None:
    writer.add_type("model")
    writer.add_name(f"{main} draft")
    writer.add_description(f"Draft model of {main} for speculative decoding, trained by specdec")
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, main)
    if "general.license" in metadata:  # trained on the main model's output, and possibly from its weights
        writer.add_license(str(metadata["general.license"]))


def _add_shape(writer: Any, shape: ModelShape) -> None:
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)


def _add_tokenizer(writer: Any, main: Tokenizer, kept: NDArray[np.uint32]) -> None:
    ids = {token: i for i, token in enumerate(kept.tolist())}
    texts = [main.texts[token] for token in ids]
    writer.add_tokenizer_model(main.kind)
    if main.pre is not None:
        writer.add_tokenizer_pre(main.pre)
    writer.add_token_list(texts)
    writer.add_token_types(main.types[kept].tolist())
    if main.kind == BPE:
        known = set(texts)
        merges = [pair for pair in main.merges if _is_known(pair, known)]
        writer.add_token_merges(merges or [b" "])  # an empty list is not written; this pair never matches
    else:
        writer.add_token_scores(main.scores[kept].tolist())
    for key, token in main.special_ids.items():
        if token not in ids:
            raise InvalidRequest(
                f"the draft model's vocabulary lacks {key} of the main model, token {token}: keep it"
            )
        writer.add_uint32(key, ids[token])
    writer.add_add_bos_token(main.add_bos)
    writer.add_add_eos_token(main.add_eos)
    # The draft model tokenizes single tokens of the main model, which are not at the start of a text.
    writer.add_add_space_prefix(False)
    if main.chat_template is not None:
        writer.add_chat_template(main.chat_template)


def _is_known(pair: bytes, known: set[bytes]) -> bool:
    """Whether parts and merged token are known: llama.cpp loses text that is merged to an unknown token."""
    left, _, right = pair.partition(b" ")
    return left in known and right in known and left + right in known


def _zeros(shape: ModelShape) -> Weights:
    """Return zero weights, for a model that is used only for its vocabulary."""
    return {name: np.zeros(size, np.float32) for name, size in tensor_shapes(shape).items()}


@functools.cache
def _hash(path: Path, mtime_ns: int) -> str:
    """Return the hash of a file; cached, as the main model is large and a run writes several models."""
    return sha256(path)
