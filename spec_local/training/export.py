"""The draft's file: any llama.cpp runs it, and knows by it which of main's tokens it speaks of."""

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
from spec_local.training.model_shape import ModelShape, Weights, measures
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
    """Write a model of llama's architecture with the part `kept` of main's vocabulary; it appears whole or not at all.

    Args:
        path: the file; what is there is replaced.
        kept: uint32 (shape.n_vocab,), main's tokens in the draft's order, as `trimming.choose` gives them.
        weights: of all the tensors; the output is tied to ``token_embd.weight``.
        kind: how the matrices are stored: of `spec_local.llama.quantize.KINDS` or `BLOCK_KINDS`.
        embedding_kind: of `BLOCK_KINDS`, for the embeddings, which are also the output and most of a small draft; None: as
            `spec_local.llama.quantize.quantize_into` has it.
        provenance: how it was made; it is written as ``specdec.*``, with main's name and SHA-256.

    Raises:
        InvalidRequest: the file cannot be written or is main itself, a kind is unknown, or a token with a role is not kept.
        BackendError: weights and shape are no model that llama.cpp takes.
        ModelFileError, ModelError: main cannot be read, or has a tokenizer that cannot be trimmed.
    """
    if path.exists() and path.samefile(main_path):
        raise InvalidRequest(f"{path} is main itself: give another name for the draft")
    facts = tokenizer.metadata(main_path)
    about = {
        "main.name": _name(main_path, facts),
        "main.sha256": _hash(main_path, main_path.stat().st_mtime_ns),
        "version": spec_local.__version__,
        **provenance,
    }
    with saving(path) as target:
        # Of this name it goes with the next draft, if this process is killed.
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f"{target.name}.", suffix=".part"
        ) as plain:
            source = Path(plain.name)
            _write(source, main_path, facts, kept, shape, weights, about)
            try:
                quantize_into(source, target, kind, embedding_kind=embedding_kind)
                Model(target, weights=False).close()
            except (BackendError, ModelFileError):
                if shutil.disk_usage(target.parent).free < source.stat().st_size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
                raise BackendError(
                    f"llama.cpp does not take the draft ({runtime.failure_reason()}): "
                    "see that its weights are of its shape, and finite numbers"
                ) from None
        shutil.copymode(main_path, target)  # a temporary file is for its owner only
    return path


def spellings(main_path: Path, kept: NDArray[np.uint32]) -> list[tuple[int, ...]]:
    """How a draft with the part `kept` of main's vocabulary reads each of main's tokens: as its own, one or more.

    It is asked as it is when decoding. There, a text that does not begin with the draft's bos gets one where main's
    vocabulary says so: see `VocabularyMap.read`.

    Raises:
        ModelFileError, ModelError: main cannot be read, or has a tokenizer that cannot be trimmed.
        InvalidRequest: a token with a role is not kept.
        OSError: there is no room for a temporary file of about a megabyte.
    """
    shape = ModelShape(len(kept), n_embd=2, n_layers=1, n_head=1, n_head_kv=1, head_dim=2, n_ff=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        _write(path, main_path, tokenizer.metadata(main_path), kept, shape, _zeros(shape), {})
        main, draft = Model(main_path, weights=False), Model(path, weights=False)
        translation = VocabularyMap(main.vocabulary, draft.vocabulary)
        read = [translation.read(token) for token in range(main.vocabulary.n_tokens)]
        main.close()
        draft.close()
    return read


def _write(
    path: Path,
    main_path: Path,
    facts: Mapping[str, Any],
    kept: NDArray[np.uint32],
    shape: ModelShape,
    weights: Weights,
    about: Mapping[str, str | int | float],
) -> None:
    """In full precision.

    about: what there is to say of the draft as ``specdec.*``.
    """
    import gguf  # 0.1 s

    main = Model(main_path, weights=False)
    writer = gguf.GGUFWriter(path, "llama")
    try:
        _add_tokenizer(writer, tokenizer.read(main, facts), kept)
        _add_shape(writer, shape)
        _add_origin(writer, _name(main_path, facts), facts)
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
        if error.errno is None:  # NumPy wrote less than it was given, and does not know why
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise
    finally:
        writer.close()
        main.close()


def _name(main_path: Path, facts: Mapping[str, Any]) -> str:
    return str(facts.get("general.name", main_path.stem))


def _add_origin(writer: Any, main: str, facts: Mapping[str, Any]) -> None:
    writer.add_type("model")
    writer.add_name(f"{main} draft")
    writer.add_description(f"Guesses what {main} would write, for speculative decoding; made by specdec")
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, main)
    if "general.license" in facts:  # it learns main's words, and may have begun with main's weights
        writer.add_license(str(facts["general.license"]))


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
        merges = [pair for pair in main.merges if _makes(pair, known)]
        writer.add_token_merges(merges or [b" "])  # a list of none is not written; this one joins nothing
    else:
        writer.add_token_scores(main.scores[kept].tolist())
    for key, token in main.roles.items():
        if token not in ids:
            raise InvalidRequest(f"{key} of main, token {token}, is not among those of the draft: keep it")
        writer.add_uint32(key, ids[token])
    writer.add_add_bos_token(main.add_bos)
    writer.add_add_eos_token(main.add_eos)
    # The draft reads main's tokens one by one: what begins one of them does not begin a text.
    writer.add_add_space_prefix(False)
    if main.chat_template is not None:
        writer.add_chat_template(main.chat_template)


def _makes(pair: bytes, known: set[bytes]) -> bool:
    """Whether a merge joins known tokens into a known one; llama.cpp loses the text that it joins into an unknown one."""
    left, _, right = pair.partition(b" ")
    return left in known and right in known and left + right in known


def _zeros(shape: ModelShape) -> Weights:
    """A model of no use but for its vocabulary."""
    return {name: np.zeros(size, np.float32) for name, size in measures(shape).items()}


@functools.cache
def _hash(path: Path, mtime_ns: int) -> str:
    """A main may have gigabytes, and a draft is written in several kinds."""
    return sha256(path)
