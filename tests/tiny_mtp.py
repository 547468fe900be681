"""Tiny models with random weights, of architectures that have layers for multi-token prediction.

They share the vocabulary of `spec_local.llama.tiny`. Two of `tests.tiny_architectures` can have such layers,
too: qwen35 and qwen3next.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny_architectures import _ARCHITECTURES as recurrent
from tests.tiny_architectures import (
    _HEAD,
    _N_CONV,
    _N_EXPERTS,
    Architecture,
    Tensor,
    _attention,
    _delta_net,
    _experts,
    _ffn,
    _mamba2,
    _matrix,
    _mtp,
    _qwen,
    _qwen3next_settings,
    _vector,
    write_architecture,
)

_WINDOW = 8  # tokens of a sliding window: fewer than the tests' prompts have
_BIAS = "exp_probs_b.bias"
_ADDED = 0.2  # factor of what is added to the token's embedding in a predictable model
_RANK = 16  # of DeepSeek's low-rank attention
# Heads that select tokens for attention, and their width, which llama.cpp requires. With few heads, many
# tokens would have the same score, and which of them are selected would depend on the cells they are in.
_N_INDEXER_HEADS, _INDEXER_HEAD = 16, 64
_N_SELECTED = 16  # tokens
_N_STREAMS = 4  # residual streams of DeepSeek-V4; llama.cpp evaluates no other number
_INDEXED = 4  # tokens that share a key, in layers with an indexer
_N_POOLED = 4  # tokens whose keys an indexer of GLM5-Next pools
_RATIOS = (0, _INDEXED, 128)  # tokens that share a key, by layer; 0: none do


def write_tiny_mtp(
    path: Path | str,
    architecture: str,
    *,
    n_mtp: int = 1,
    predictable: bool = False,
    alone: bool = False,
    **options: Any,
) -> Path:
    """Write a model with layers for multi-token prediction: see `write_architecture`.

    predictable: the next token depends mostly on the last one, so that these layers often predict it.
    alone: write these layers only; with n_mtp=0, all others are written.
    """

    def change(name: str, weights: NDArray[np.float32]) -> NDArray[np.float32] | None:
        if alone and name.startswith("blk.") and int(name.split(".")[1]) < options.get("n_layers", 3):
            return None
        return _shallow(name, weights) if predictable else weights

    options["change"] = change
    known = {**recurrent, **_ARCHITECTURES}[architecture]
    return write_architecture(path, architecture, known, n_mtp=n_mtp, **options)


def _shallow(name: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Let the token's embedding outweigh what the layers add to it, and the hidden state beside it."""
    if any(part in name for part in ("attn_output", "ffn_down")):
        return _ADDED * weights
    if "eh_proj" in name:
        n = len(weights)
        return np.hstack([np.eye(n, dtype=np.float32), np.zeros((n, n), np.float32)]) + _ADDED * weights
    return weights


# Parts of layers


def _moe(n: int, *, bias: str = "", gated: bool = True) -> Iterator[Tensor]:
    """Yield experts and one more that all tokens use.

    bias: name of the router's bias; "": there is none. gated: whether the experts have a gate.
    """
    for name, shape, scale in _experts(n):
        if "gate_inp_shexp" not in name and (gated or "ffn_gate_" not in name or "gate_inp" in name):
            yield name, shape, scale
    if bias:
        yield bias, (_N_EXPERTS,), 0.1


def _low_rank_attention(n: int) -> Iterator[Tensor]:
    """Yield the latent attention of DeepSeek, whose keys have half a head without position and half with."""
    n_heads, rotated = n // _HEAD, _HEAD // 2
    yield _matrix("attn_q_a", _RANK, n)
    yield _vector("attn_q_a_norm", _RANK)
    yield _matrix("attn_q_b", n, _RANK, 2.0)
    yield _matrix("attn_kv_a_mqa", _RANK + rotated, n)
    yield _vector("attn_kv_a_norm", _RANK)
    yield "attn_k_b.weight", (n_heads, _RANK, rotated), _RANK**-0.5
    yield "attn_v_b.weight", (n_heads, _HEAD, _RANK), _RANK**-0.5
    yield _matrix("attn_output", n, n, 1.5)


def _gated_low_rank_attention(n: int) -> Iterator[Tensor]:
    yield from _low_rank_attention(n)
    yield _matrix("attn_gate", n // _HEAD, n)


def _kimi_delta_net(n: int) -> Iterator[Tensor]:
    for name in ("attn_q", "attn_k", "attn_v"):
        yield _matrix(name, n, n)
    for part in ("q", "k", "v"):
        yield f"ssm_conv1d_{part}.weight", (1, n, 1, _N_CONV), 0.5
    yield _matrix("ssm_f_a", n, n)
    yield _matrix("ssm_g_a", n, n)
    yield _matrix("ssm_beta", n // _HEAD, n)
    yield "ssm_a", (n // _HEAD, 1), 0.5
    yield _vector("ssm_dt.bias", n)
    yield _vector("ssm_norm", _HEAD)
    yield _matrix("attn_output", n, n, 1.5)


# Layers


def _glm_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _attention(n)
    yield _vector("post_attention_norm", n)
    yield from _moe(n, bias=_BIAS) if i else _ffn(n)


def _hy_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _attention(n, norms=True)
    yield _vector("ffn_norm", n)
    yield from _moe(n, bias="exp_probs_b") if i else _ffn(n)


def _step_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _attention(n, norms=True)
    yield _vector("ffn_norm", n)
    yield from _moe(n, bias=_BIAS) if i else _ffn(n)
    yield _matrix("attn_gate", n // _HEAD, n)


def _mimo_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield _matrix("attn_qkv", 2 * n, n, 1.5)
    yield _matrix("attn_output", n, n, 1.5)
    yield "attn_sinks.weight", (n // _HEAD,), 1.0
    yield _vector("ffn_norm", n)
    yield from _ffn(n)


def _deepseek_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _low_rank_attention(n)
    yield _vector("ffn_norm", n)
    yield from _moe(n) if i else _ffn(n)


def _indexed_layer(n: int, i: int) -> Iterator[Tensor]:
    """Yield a layer whose attention is limited to the tokens that an indexer selects."""
    yield from _deepseek_layer(n, i)
    yield from _indexer(n)


def _indexer(n: int) -> Iterator[Tensor]:
    yield _vector("indexer.k_norm", _INDEXER_HEAD)
    yield _vector("indexer.k_norm.bias", _INDEXER_HEAD)
    yield _matrix("indexer.proj", _N_INDEXER_HEADS, n)
    yield _matrix("indexer.attn_k", _INDEXER_HEAD, n)
    yield _matrix("indexer.attn_q_b", _N_INDEXER_HEADS * _INDEXER_HEAD, _RANK)


def _streams_layer(n: int, i: int) -> Iterator[Tensor]:
    """Yield a layer of DeepSeek-V4, with several residual streams, and attention to compressed keys."""
    ratio = _RATIOS[i]
    yield _vector("attn_norm", n)
    yield "attn_sinks.weight", (n // _HEAD,), 1.0
    yield _matrix("attn_q_a", _RANK, n)
    yield _vector("attn_q_a_norm", _RANK)
    yield _matrix("attn_q_b", n, _RANK, 2.0)
    yield _matrix("attn_kv", _HEAD, n)
    yield _vector("attn_kv_a_norm", _HEAD)
    yield _matrix("attn_output_a", 2 * _RANK, n // 2)
    yield _matrix("attn_output_b", n, 2 * _RANK, 1.5)
    yield from _streams(n)
    if ratio:
        width = 2 * _HEAD if ratio == _INDEXED else _HEAD
        yield from _compressor("attn", n, ratio, width)
        yield _vector("attn_compressor_norm", _HEAD)
    if ratio == _INDEXED:
        yield _matrix("indexer.proj", _N_INDEXER_HEADS, n)
        yield _matrix("indexer.attn_q_b", _N_INDEXER_HEADS * _INDEXER_HEAD, _RANK)
        yield from _compressor("indexer", n, ratio, 2 * _INDEXER_HEAD)
        yield _vector("indexer_compressor_norm", _INDEXER_HEAD)
    yield _vector("ffn_norm", n)
    yield from _moe(n, bias=_BIAS)


def _streams(n: int) -> Iterator[Tensor]:
    n_mixed = (2 + _N_STREAMS) * _N_STREAMS
    for part in ("attn", "ffn"):
        yield _matrix(f"hc_{part}_fn", n_mixed, _N_STREAMS * n)
        yield f"hc_{part}_base.weight", (n_mixed,), 0.5
        yield f"hc_{part}_scale.weight", (3,), 1.0


def _compressor(name: str, n: int, ratio: int, width: int) -> Iterator[Tensor]:
    yield _matrix(f"{name}_compressor_kv", width, n)
    yield _matrix(f"{name}_compressor_gate", width, n)
    yield f"{name}_compressor_ape.weight", (ratio, width), 0.5


def _streams_mtp(n: int, i: int) -> Iterator[Tensor]:
    yield from _streams_layer(n, 0)
    yield from _mtp(n)


def _streams_end(n: int) -> Iterator[Tensor]:
    yield _matrix("output_hc_fn", _N_STREAMS, _N_STREAMS * n)
    yield "output_hc_base.weight", (_N_STREAMS,), 0.5
    yield "output_hc_scale.weight", (1,), 1.0


def _cohere_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _attention(n)
    yield from _moe(n) if i else _ffn(n)


def _nemotron_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from (_mamba2(n), _attention(n), _moe(n, bias=_BIAS, gated=False))[i % 3]


def _nemotron_mtp(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _attention(n)
    yield _vector("post_attention_norm", n)
    yield from _moe(n, bias=_BIAS, gated=False)
    yield from _mtp(n)


def _bailing_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _gated_low_rank_attention(n) if i % 2 else _kimi_delta_net(n)
    yield _vector("ffn_norm", n)
    yield from _moe(n, bias=_BIAS) if i else _ffn(n)


def _bailing_mtp(n: int, i: int) -> Iterator[Tensor]:
    yield from _bailing_layer(n, 1)
    for name, shape, scale in _mtp(n):
        yield name.replace("nextn.shared_head_norm", "layer_output_norm"), shape, scale


def _pooled_layer(n: int, i: int) -> Iterator[Tensor]:
    """Yield a layer of GLM5-Next; every other one has an indexer of pooled keys."""
    yield _vector("attn_norm", n)
    yield from _streams(n)
    if i % 2:
        yield from _pooled_attention(n)
    else:
        shapes = {"ssm_a": (n // _HEAD,)}
        for part in ("f", "g"):  # of low rank
            shapes[f"ssm_{part}_a.weight"] = (_HEAD, n)
            yield _matrix(f"ssm_{part}_b", n, _HEAD)
        for name, shape, scale in _kimi_delta_net(n):
            yield name, shapes.get(name, shape), scale
    yield _vector("ffn_norm", n)
    yield from _moe(n, bias=_BIAS) if i else _ffn(n)


def _pooled_attention(n: int) -> Iterator[Tensor]:
    for name, shape, scale in _low_rank_attention(n):
        # No part of a key has a position.
        shapes = {"attn_kv_a_mqa.weight": (_RANK, n), "attn_k_b.weight": (n // _HEAD, _RANK, _HEAD)}
        yield name, shapes.get(name, shape), scale
    yield from _indexer(n)
    yield _matrix("indexer_compressor_gate", _INDEXER_HEAD, n)
    yield "indexer_compressor_ape.weight", (_N_POOLED, _INDEXER_HEAD), 0.5


def _pooled_mtp(n: int, i: int) -> Iterator[Tensor]:
    yield from (tensor for tensor in _pooled_layer(n, 1) if not tensor[0].startswith("hc_"))
    yield from _mtp(n)


def _qwen4_layer(n: int, i: int) -> Iterator[Tensor]:
    for part in ("attn", "ffn"):
        yield from _mixed_streams(f"hc_{part}", n)
        yield _matrix(f"hc_{part}_inject", _N_STREAMS, _N_STREAMS * n)
    if i % 2:
        yield from _attention(n, norms=True, gate=True)
        yield _matrix("indexer.q_proj", _N_INDEXER_HEADS * _INDEXER_HEAD, n)
        yield _matrix("indexer.k_proj", _INDEXER_HEAD, n)
        yield _vector("indexer.q_norm", _INDEXER_HEAD)
        yield _vector("indexer.k_norm", _INDEXER_HEAD)
    else:
        yield from _delta_net(n, joint=False)
    yield from _experts(n)


def _mixed_streams(name: str, n: int) -> Iterator[Tensor]:
    yield f"{name}_norm.weight", (_N_STREAMS, n), 1.0
    yield _matrix(f"{name}_down", _RANK, _N_STREAMS * n)
    yield _matrix(f"{name}_up", _N_STREAMS * n, _RANK)


def _unused_layer(n: int, i: int) -> Iterator[Tensor]:
    """Yield a layer of EXAONE 4, whose layers for multi-token prediction llama.cpp does not evaluate."""
    yield from _attention(n, norms=True)
    yield _vector("post_attention_norm", n)
    yield from _ffn(n)
    yield _vector("post_ffw_norm", n)


# Metadata


def _moe_settings(n: int, n_layers: int) -> dict[str, Any]:
    return {
        "expert_count": _N_EXPERTS,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": n // 2,
        "expert_shared_feed_forward_length": n // 2,
        "leading_dense_block_count": 1,
    }


def _window_settings(n: int, n_layers: int) -> dict[str, Any]:
    """Return experts, and a sliding window in every other layer."""
    return _moe_settings(n, n_layers) | {
        "attention.sliding_window": _WINDOW,
        "attention.sliding_window_pattern": [i % 2 for i in range(n_layers)],
    }


def _deepseek_settings(n: int, n_layers: int) -> dict[str, Any]:
    return _moe_settings(n, n_layers) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": _RANK,
        "attention.kv_lora_rank": _RANK,
        "attention.key_length": _RANK + _HEAD // 2,
        "attention.value_length": _RANK,
        "attention.key_length_mla": _HEAD,
        "attention.value_length_mla": _HEAD,
        "rope.dimension_count": _HEAD // 2,
    }


def _indexed_settings(n: int, n_layers: int) -> dict[str, Any]:
    return _deepseek_settings(n, n_layers) | {
        "attention.indexer.head_count": _N_INDEXER_HEADS,
        "attention.indexer.key_length": _INDEXER_HEAD,
        "attention.indexer.top_k": _N_SELECTED,
        "expert_gating_func": 2,  # sigmoid
    }


def _streams_settings(n: int, n_layers: int) -> dict[str, Any]:
    return _moe_settings(n, n_layers) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": _RANK,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.sliding_window": _WINDOW,
        "attention.compress_ratios": [*_RATIOS, 0][:n_layers],
        "attention.compress_rope_freq_base": 10_000.0,
        "attention.indexer.head_count": _N_INDEXER_HEADS,
        "attention.indexer.key_length": _INDEXER_HEAD,
        "attention.indexer.top_k": _N_SELECTED // _INDEXED,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": _RANK,
        "expert_gating_func": 4,  # the root of softplus
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "hash_layer_count": 0,
        "hyper_connection.count": _N_STREAMS,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.sinkhorn_iterations": 3,
        "rope.dimension_count": _HEAD // 2,
        "swiglu_clamp_exp": [7.0] * n_layers,
    }


def _pooled_settings(n: int, n_layers: int) -> dict[str, Any]:
    n_heads = [*(i % 2 for i in range(n_layers - 1)), 1]  # the last one is for multi-token prediction
    streams = _streams_settings(n, n_layers)
    return _indexed_settings(n, n_layers) | {
        **{name: value for name, value in streams.items() if name.startswith("hyper_connection")},
        "attention.head_count_kv": n_heads,
        "attention.key_length": _RANK,
        "attention.indexer.kpool": _N_POOLED,
        "kda.head_dim": _HEAD,
        "rope.dimension_count": 0,
    }


def _qwen4_settings(n: int, n_layers: int) -> dict[str, Any]:
    indexed = _indexed_settings(n, n_layers)
    return _qwen3next_settings(n, n_layers) | {
        **{name: value for name, value in indexed.items() if "indexer" in name},
        "attention.compress_ratios": [_INDEXED] * n_layers,
        "hyper_connection.count": _N_STREAMS,
        "hyper_connection.low_rank": _RANK,
    }


def _cohere_settings(n: int, n_layers: int) -> dict[str, Any]:
    return _window_settings(n, n_layers) | {"logit_scale": 1.0}


def _nemotron_settings(n: int, n_layers: int) -> dict[str, Any]:
    kinds = [*(i % 3 for i in range(n_layers - 1)), 1]  # the last one is for multi-token prediction
    return _moe_settings(n, n_layers) | {
        "feed_forward_length": [2 * n if kind == 2 else 0 for kind in kinds],
        "attention.head_count_kv": [n // _HEAD // 2 if kind == 1 else 0 for kind in kinds],
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
    }


def _bailing_settings(n: int, n_layers: int) -> dict[str, Any]:
    n_heads = [*(i % 2 for i in range(n_layers - 1)), 1]  # the last one is for multi-token prediction
    return _deepseek_settings(n, n_layers) | {
        "attention.head_count_kv": n_heads,
        "kda.head_dim": _HEAD,
        "kda.gate_lower_bound": -1.0,
        "expert_gating_func": 2,  # sigmoid
    }


_ARCHITECTURES = {
    "glm4moe": Architecture(_glm_layer, _moe_settings),
    "hy_v3": Architecture(_hy_layer, _moe_settings),
    "step35": Architecture(_step_layer, _window_settings),
    "mimo2": Architecture(_mimo_layer, _window_settings),
    "deepseek2": Architecture(_deepseek_layer, _deepseek_settings),
    "deepseek32": Architecture(_indexed_layer, _indexed_settings),
    "deepseek4": Architecture(_streams_layer, _streams_settings, mtp=_streams_mtp, others=_streams_end),
    "glm-dsa": Architecture(_indexed_layer, _indexed_settings),
    "glm5-next": Architecture(_pooled_layer, _pooled_settings, mtp=_pooled_mtp),
    "qwen4exp": Architecture(
        _qwen4_layer, _qwen4_settings, norms=(), others=partial(_mixed_streams, "output_hc")
    ),
    "exaone4": Architecture(_unused_layer, lambda n, n_layers: {}),
    "cohere2moe": Architecture(_cohere_layer, _cohere_settings),
    "nemotron_h_moe": Architecture(_nemotron_layer, _nemotron_settings, mtp=_nemotron_mtp),
    "bailingmoe3": Architecture(_bailing_layer, _bailing_settings, mtp=_bailing_mtp),
    "qwen35moe": Architecture(_qwen(partial(_delta_net, joint=False), ffn=_experts), _qwen3next_settings),
}
MTP_ARCHITECTURES = ("qwen35", "qwen3next", *_ARCHITECTURES)
"""The names that `write_tiny_mtp` accepts."""
