"""Models with random weights in the shapes of known ones, for measurements of time and memory.

Matrices repeat a few thousand quantized rows, and layers repeat each other's: quantizing all of them would
take minutes. They still are different bytes of the file, so that a call reads as much as with the real model.
The router of experts is random, too, so that tokens spread evenly over them.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import note
from numpy.typing import NDArray

from spec_local.llama import runtime, tiny
from spec_local.system.files import replacing

_N_ROWS = 4096  # different rows of a length: 4 MB or more, which is far more than a core's cache
_Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's dimensions.

    n_ff: rows of the gate, with experts of each of them; n_experts: 0 for a dense model. head_norm: length of
    the norm of queries; 0: none. biased: queries, keys and values have biases; with experts, all matrices of
    a layer, and attention has sinks, as in gpt-oss. tied: the output matrix is that of the embeddings.
    n_vocab: 0 for the few tokens that the tokenizer needs.
    """

    architecture: str
    layers: int
    width: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head: int
    n_vocab: int = 0
    head_norm: int = 0
    biased: bool = False
    tied: bool = False
    n_experts: int = 0
    n_used: int = 0


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, biased=True, tied=True),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, biased=True, tied=True),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, biased=True),
    "qwen2.5-14b": Shape("qwen2", 48, 5120, 13824, 40, 8, 128, 152064, biased=True),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 128, tied=True),
    "llama3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 128, tied=True),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 128),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, 128, tied=True),
    "qwen3-14b": Shape("qwen3", 40, 5120, 17408, 40, 8, 128, 151936, 128),
    "qwen3-32b": Shape("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 128),
    "llama3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256),
    "olmoe": Shape("olmoe", 16, 2048, 1024, 16, 16, 128, 50304, 2048, n_experts=64, n_used=8),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, 128, n_experts=128, n_used=8),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, biased=True, n_experts=32, n_used=4),
}
"""Dimensions as in the headers of the published files."""
HEADS = {
    "qwen3-8b-eagle3": Shape("llama", 1, 4096, 12288, 32, 8, 128, 32000),
    "qwen3-32b-eagle3": Shape("llama", 1, 5120, 25600, 64, 8, 128, 32000),
    "llama3.1-8b-eagle3": Shape("llama", 1, 4096, 14336, 32, 8, 128, 32000),
}
"""The layer and the output matrix of published EAGLE-3 heads, as a model of one layer."""
BLOCK_LAYERS = 5
"""Layers of published DFlash and DSpark heads, each of the dimensions of the main model's."""
TYPES = ("Q4_0", "Q8_0", "F16", "Q4_K_M", "MXFP4")


def stored(
    folder: Path, name: str, kind: str, layers: int | None = None, *, vocabulary: bool = False
) -> Path:
    """The file of a shape in a folder, written if it is missing.

    layers: fewer than the shape has. vocabulary: the file with these still has all tokens, and not only those
    that the tokenizer needs.
    """
    shape, part = (SHAPES | HEADS)[name], ""
    if layers:
        n_vocab, part = shape.n_vocab if vocabulary else 0, f"-{layers}-layers" + "-vocabulary" * vocabulary
        shape = replace(shape, layers=layers, n_vocab=n_vocab)
    path = folder / f"random-{name}{part}-{kind.lower()}.gguf"
    if not path.exists():
        note(f"writing {path}")
        write(path, shape, kind)
    return path


def write(path: Path, shape: Shape, kind: str) -> Path:
    """Write a model to `path`.

    Args:
        kind: one of `TYPES`. Q4_K_M mixes types as llama.cpp does. With MXFP4, matrices other than those of
            the experts are Q8_0.
    """
    tokens, scores, types = tiny.vocabulary(())
    missing = max(0, shape.n_vocab - len(tokens))
    tokens += [f"<unused {i}>" for i in range(missing)]
    scores += [0.0] * missing
    types += [int(gguf.TokenType.UNUSED)] * missing
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, shape.architecture)
        writer.add_name(f"random-{shape.architecture}")
        for key, value in _settings(shape, len(tokens)).items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{shape.architecture}.{key}", value)
        tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False)
        rows = _Rows()
        for name, size, scale in _tensors(shape, len(tokens)):
            type_ = _type(name, size, kind, shape)
            if type_ == _Kind.F32:
                writer.add_tensor(name, tiny.random_weights(name, size, scale, 0, 0.0))
            else:
                writer.add_tensor(name, rows.matrix(size, scale, type_), raw_dtype=type_)
        tiny.finish(writer, temporary)
    return path


def _settings(shape: Shape, n_vocab: int) -> dict[str, Any]:
    experts = {
        "expert_feed_forward_length": shape.n_ff,
        "expert_count": shape.n_experts,
        "expert_used_count": shape.n_used,
        "attention.sliding_window": 128,
    }
    return {
        "vocab_size": n_vocab,
        "context_length": 4096,
        "block_count": shape.layers,
        "embedding_length": shape.width,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head,
        "rope.freq_base": 10000.0,
    } | (experts if shape.n_experts else {})


def _tensors(shape: Shape, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield each tensor's name, shape (in numpy's order) and standard deviation; of a norm, the value."""
    n, n_q, n_kv = shape.width, shape.n_heads * shape.head, shape.n_kv_heads * shape.head
    attention = [
        ("attn_q", (n_q, n), 2.0),
        ("attn_k", (n_kv, n), 1.0),
        ("attn_v", (n_kv, n), 1.0),
        ("attn_output", (n, n_q), 1.5),
    ]
    of_experts = "_exps" if shape.n_experts else ""
    each = (shape.n_experts,) if shape.n_experts else ()
    network = [
        (f"ffn_gate{of_experts}", (*each, shape.n_ff, n), 1.0),
        (f"ffn_up{of_experts}", (*each, shape.n_ff, n), 1.0),
        (f"ffn_down{of_experts}", (*each, n, shape.n_ff), 1.0),
    ]
    if shape.n_experts:
        network.append(("ffn_gate_inp", (shape.n_experts, n), 1.0))
    is_gpt_oss = shape.biased and shape.n_experts
    yield "token_embd.weight", (n_vocab, n), 1.0
    for i in range(shape.layers):
        for name, size, gain in (*attention, *network):
            yield f"blk.{i}.{name}.weight", size, gain * size[-1] ** -0.5
            if is_gpt_oss or (shape.biased and name in ("attn_q", "attn_k", "attn_v")):
                yield f"blk.{i}.{name}.bias", size[:-1], 0.1
        yield f"blk.{i}.attn_norm.weight", (n,), 1.0
        yield f"blk.{i}.{'post_attention_norm' if is_gpt_oss else 'ffn_norm'}.weight", (n,), 1.0
        if is_gpt_oss:
            yield f"blk.{i}.attn_sinks.weight", (shape.n_heads,), 1.0
        if shape.head_norm:
            yield f"blk.{i}.attn_q_norm.weight", (shape.head_norm,), 1.0
            of_keys = shape.head_norm if shape.head_norm == shape.head else n_kv
            yield f"blk.{i}.attn_k_norm.weight", (of_keys,), 1.0
    yield "output_norm.weight", (n,), 1.0
    if not shape.tied:
        yield "output.weight", (n_vocab, n), 3 * n**-0.5


def _type(name: str, size: tuple[int, ...], kind: str, shape: Shape) -> _Kind:
    if len(size) == 1 or name.endswith(".bias") or "gate_inp" in name:
        return _Kind.F32
    if kind == "Q4_K_M":
        return _q4_k_m(name, size, shape)
    return _Kind.Q8_0 if kind == "MXFP4" and "exps" not in name else _Kind[kind]


def _q4_k_m(name: str, size: tuple[int, ...], shape: Shape) -> _Kind:
    """The type in llama.cpp's mixture: `llama_tensor_get_type_impl` in llama-quant.cpp."""
    is_output = name == ("token_embd.weight" if shape.tied else "output.weight")
    is_better = is_output
    if ".attn_v." in name or ".ffn_down" in name:
        i, eighth = int(name.split(".")[1]), shape.layers // 8
        is_better = i < eighth or i >= 7 * shape.layers // 8 or (i - eighth) % 3 == 2
    if size[-1] % 256:  # too narrow for K-quants
        return _Kind.Q8_0 if is_better else _Kind.Q5_0
    return _Kind.Q6_K if is_better else _Kind.Q4_K


class _Rows:
    """Matrices of quantized random rows, by size, scale and type."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], float, _Kind], NDArray[np.uint8]] = {}
        self._rng = np.random.default_rng(0)

    def matrix(self, size: tuple[int, ...], scale: float, kind: _Kind) -> NDArray[np.uint8]:
        """A matrix, or several, of random rows in ggml's layout: uint8 (…, bytes). Do not change it."""
        key = (size, scale, kind)
        if key not in self._known:
            values = self._rng.normal(size=(_N_ROWS, size[-1])) * scale
            rows = _quantized(values.astype(np.float32), kind)
            self._known[key] = rows[self._rng.integers(0, len(rows), size[:-1])]
        return self._known[key]


def _quantized(values: NDArray[np.float32], kind: _Kind) -> NDArray[np.uint8]:
    """Quantize rows with ggml, which has more types than the package gguf."""
    runtime.library()
    import llama_cpp.llama_cpp as bindings

    quantize = bindings._lib.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    result = np.empty((len(values), values.shape[1] // block * n_bytes), np.uint8)
    quantize(int(kind), values.ctypes.data, result.ctypes.data, 0, *values.shape, None)
    return result
