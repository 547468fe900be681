"""A tiny Gemma 4 with random weights, and its assistant: a head that attends to the model's own cache.

The next token depends mostly on the last one, so that the assistant can predict it: its output matrix has the
main model's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from spec_local.llama import tiny
from tests.tiny_architectures import Tensor, _add, _ffn, _matrix, _vector

N_EMBD = 64
_N_ASSISTANT = 96  # width of the assistant
_NOISE = 0.1  # factor of the assistant's random weights beside those that predict the next token
_N_HEADS, _HEAD, _WIDE_HEAD = 2, 32, 64  # heads of layers with all tokens are wider than those with a window
_WINDOW = 8
_N_SHARED = 2  # layers of the assistant, and of the model without caches of their own


def write_tiny_gemma(path: Path | str, *, n_layers: int = 6) -> Path:
    """Write a main model; its last two layers use the caches of earlier ones."""

    def tensors() -> Iterator[Tensor]:
        yield "token_embd.weight", (len(_tokens()), N_EMBD), 1.0
        yield from _shared()
        for i in range(n_layers):
            yield from _layer(i, N_EMBD, keys=i < n_layers - _N_SHARED)
        yield _vector("output_norm", N_EMBD)
        yield _matrix("output", len(_tokens()), N_EMBD, 3.0)

    settings = {
        "embedding_length": N_EMBD,
        "feed_forward_length": 2 * N_EMBD,
        "block_count": n_layers,
        "attention.shared_kv_layers": _N_SHARED,
    }
    return _write(path, "gemma4", settings, tensors(), n_layers)


def write_tiny_assistant(
    path: Path | str,
    *,
    target_width: int = N_EMBD,
    n_vocab: int | None = None,
    **changes: Any,
) -> Path:
    """Write a head for `write_tiny_gemma`; changes: of its metadata, by names without the architecture."""
    n_vocab = n_vocab or len(_tokens())

    def tensors() -> Iterator[Tensor]:
        yield _matrix("token_embd", n_vocab, _N_ASSISTANT, 3 * _NOISE)
        yield from _shared()
        yield _matrix("nextn.pre_projection", _N_ASSISTANT, 2 * target_width, _NOISE)
        yield _matrix("nextn.post_projection", target_width, _N_ASSISTANT)
        for i in range(_N_SHARED):
            yield from _layer(i, _N_ASSISTANT, keys=False)
        yield _vector("output_norm", _N_ASSISTANT)

    settings = {
        "embedding_length": _N_ASSISTANT,
        "embedding_length_out": target_width,
        "feed_forward_length": 2 * _N_ASSISTANT,
        "block_count": _N_SHARED,
        "nextn_predict_layers": _N_SHARED,
    }
    return _write(path, "gemma4-assistant", settings | changes, tensors(), _N_SHARED, n_vocab)


def _tokens() -> list[str]:
    return tiny.vocabulary(())[0]


def _shared() -> Iterator[Tensor]:
    yield "rope_freqs.weight", (_WIDE_HEAD // 2,), 1.0


def _layer(i: int, n: int, *, keys: bool) -> Iterator[Tensor]:
    head = _WIDE_HEAD if i % 2 else _HEAD
    tensors = [
        _vector("attn_norm", n),
        _matrix("attn_q", _N_HEADS * head, n),
        _matrix("attn_output", n, _N_HEADS * head, 1.5),
        _vector("attn_q_norm", head, 0.5),
        _vector("post_attention_norm", n, 0.2),
        _vector("ffn_norm", n),
        *_ffn(n),
        _vector("post_ffw_norm", n, 0.2),
        ("layer_output_scale.weight", (1,), 1.0),
    ]
    if keys:
        tensors += [_matrix("attn_k", head, n), _matrix("attn_v", head, n), _vector("attn_k_norm", head)]
    for name, shape, scale in tensors:
        yield f"blk.{i}.{name}", shape, scale


def _write(
    path: Path | str,
    architecture: str,
    settings: dict[str, Any],
    tensors: Iterator[Tensor],
    n_layers: int,
    n_vocab: int | None = None,
) -> Path:
    path = Path(path)
    n_more = n_vocab - len(_tokens()) if n_vocab else 0
    tokens, scores, types = tiny.vocabulary([f"more{i}" for i in range(n_more)])
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "context_length": 2048,
        "vocab_size": len(tokens),
        "attention.head_count": _N_HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": _WIDE_HEAD,
        "attention.value_length": _WIDE_HEAD,
        "attention.key_length_swa": _HEAD,
        "attention.value_length_swa": _HEAD,
        "embedding_length_per_layer_input": 0,
        "attention.sliding_window": _WINDOW,
        "attention.sliding_window_pattern": [not i % 2 for i in range(n_layers)],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": _WIDE_HEAD,
        "rope.dimension_count_swa": _HEAD,
    }
    for key, value in (common | settings).items():
        _add(writer, f"{architecture}.{key}", value)
    tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False)
    for name, shape, scale in tensors:
        weights = tiny.random_weights(name, shape, scale, int(architecture != "gemma4"), 0)
        if name == "output.weight":
            weights[: len(tiny.CONTROL_TOKENS) + 1] = 0
        if name.startswith("rope_freqs") or name.endswith("scale.weight"):
            weights[:] = 1
        if architecture == "gemma4-assistant":
            _predict(name, weights)
        writer.add_tensor(name, weights)
    return tiny.finish(writer, path)


def _predict(name: str, weights: NDArray[np.float32]) -> None:
    """Let an assistant predict the token after the one that it reads, as the main model does."""
    if name == "token_embd.weight":
        shape = (len(_tokens()), N_EMBD)
        output = tiny.random_weights("output.weight", shape, 3 * N_EMBD**-0.5, 0, 0)
        output[: len(tiny.CONTROL_TOKENS) + 1] = 0
        weights[: len(output), :N_EMBD] += output
    elif name == "nextn.pre_projection.weight":
        # llama.cpp multiplies the token's embedding by the square root of its width.
        weights[:N_EMBD, :N_EMBD] += np.eye(N_EMBD, dtype=np.float32) / N_EMBD**0.5
