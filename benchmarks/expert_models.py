"""Models with random weights in the shapes of known mixtures of experts, for measurements of time.

Matrices repeat a few thousand quantized rows: quantizing all of them would take minutes. The router is
random, too, so that tokens spread evenly over the experts.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from spec_local.llama import runtime, tiny
from spec_local.system.files import replacing

_N_ROWS = 4096  # different rows of a length: 4 MB or more, which is far more than a core's cache
_Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class Shape:
    """n_ff: rows of an expert's gate. layers: as many as have about a gigabyte in 4 bits. biased: gpt-oss's
    attention sinks, and biases. head_norm: length of the norm of queries; 0: none."""

    architecture: str
    layers: int
    n_experts: int
    n_used: int
    width: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head: int
    head_norm: int = 0
    biased: bool = False


SHAPES = {
    "olmoe": Shape("olmoe", 4, 64, 8, 2048, 1024, 16, 16, 128, head_norm=2048),
    "qwen3-30b-a3b": Shape("qwen3moe", 3, 128, 8, 2048, 768, 32, 4, 128, head_norm=128),
    "gpt-oss-20b": Shape("gpt-oss", 2, 32, 4, 2880, 2880, 64, 8, 64, biased=True),
}
TYPES = ("Q4_0", "Q8_0", "Q4_K_M", "MXFP4")


def write(path: Path, shape: Shape, kind: str) -> Path:
    """Write a model to `path`.

    Args:
        kind: one of `TYPES`, for the experts. Q4_K_M has Q6_K in every other layer's `down` matrices; with
            MXFP4, the other matrices are Q8_0.
    """
    tokens, scores, types = tiny._vocabulary(())
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, shape.architecture)
        writer.add_name(f"random-{shape.architecture}")
        for key, value in _settings(shape, len(tokens)).items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{shape.architecture}.{key}", value)
        tiny._add_tokenizer(writer, tokens, scores, types, space_prefix=False)
        rows = _Rows()
        for name, size, scale in _tensors(shape, len(tokens)):
            type_ = _type(name, size, kind)
            if type_ == _Kind.F32:
                writer.add_tensor(name, tiny._weights(name, size, scale, 0, 0.0))
            else:
                writer.add_tensor(name, rows.matrix(size, scale, type_), raw_dtype=type_)
        tiny.finish(writer, temporary)
    return path


def _settings(shape: Shape, n_vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": n_vocab,
        "context_length": 4096,
        "block_count": shape.layers,
        "embedding_length": shape.width,
        "feed_forward_length": shape.n_ff,
        "expert_feed_forward_length": shape.n_ff,
        "expert_count": shape.n_experts,
        "expert_used_count": shape.n_used,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "rope.dimension_count": shape.head,
        "rope.freq_base": 10000.0,
    }


def _tensors(shape: Shape, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield each tensor's name, shape (in numpy's order) and standard deviation; of a norm, the value."""
    n, n_q, n_kv = shape.width, shape.n_heads * shape.head, shape.n_kv_heads * shape.head
    yield "token_embd.weight", (n_vocab, n), 1.0
    for i in range(shape.layers):
        matrices = [
            ("attn_q", (n_q, n), 2.0),
            ("attn_k", (n_kv, n), 1.0),
            ("attn_v", (n_kv, n), 1.0),
            ("attn_output", (n, n_q), 1.5),
            ("ffn_gate_inp", (shape.n_experts, n), 1.0),
            ("ffn_gate_exps", (shape.n_experts, shape.n_ff, n), 1.0),
            ("ffn_up_exps", (shape.n_experts, shape.n_ff, n), 1.0),
            ("ffn_down_exps", (shape.n_experts, n, shape.n_ff), 1.0),
        ]
        for name, size, gain in matrices:
            yield f"blk.{i}.{name}.weight", size, gain * size[-1] ** -0.5
            if shape.biased:
                yield f"blk.{i}.{name}.bias", size[:-1], 0.1
        yield f"blk.{i}.attn_norm.weight", (n,), 1.0
        yield f"blk.{i}.{'post_attention_norm' if shape.biased else 'ffn_norm'}.weight", (n,), 1.0
        if shape.biased:
            yield f"blk.{i}.attn_sinks.weight", (shape.n_heads,), 1.0
        if shape.head_norm:
            yield f"blk.{i}.attn_q_norm.weight", (shape.head_norm,), 1.0
            of_keys = shape.head_norm if shape.head_norm == shape.head else n_kv
            yield f"blk.{i}.attn_k_norm.weight", (of_keys,), 1.0
    yield "output_norm.weight", (n,), 1.0
    yield "output.weight", (n_vocab, n), 3 * n**-0.5


def _type(name: str, size: tuple[int, ...], kind: str) -> _Kind:
    if len(size) == 1 or name.endswith(".bias") or "gate_inp" in name:
        return _Kind.F32
    if kind == "Q4_K_M":
        return _Kind.Q6_K if "ffn_down" in name and int(name.split(".")[1]) % 2 == 0 else _Kind.Q4_K
    return _Kind.Q8_0 if kind == "MXFP4" and "exps" not in name else _Kind[kind]


class _Rows:
    """Quantized random rows, by length and type."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float, _Kind], NDArray[np.uint8]] = {}
        self._rng = np.random.default_rng(0)

    def matrix(self, size: tuple[int, ...], scale: float, kind: _Kind) -> NDArray[np.uint8]:
        """A matrix, or several, of random rows in ggml's layout: uint8 (…, bytes)."""
        key = (size[-1], scale, kind)
        if key not in self._known:
            values = self._rng.normal(size=(_N_ROWS, size[-1])) * scale
            self._known[key] = _quantized(values.astype(np.float32), kind)
        rows = self._known[key]
        return rows[self._rng.integers(0, len(rows), size[:-1])]


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
