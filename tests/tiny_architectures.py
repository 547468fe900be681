"""Tiny models with random weights, of recurrent and hybrid architectures.

They share the vocabulary of `spec_local.llama.tiny`: any two of these models can be a model and its draft
model. mamba2 and rwkv7 are recurrent. The others are hybrids: layer 0 is recurrent and layer 1 has attention,
and so on in turn; each layer of falcon-h1 has both.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from spec_local.llama import tiny

_HEAD = 32  # width of a head, of attention and of mamba2
_N_STATE, _N_GROUPS, _N_CONV = 32, 2, 4  # of mamba and of the delta net
_N_SHORT_CONV = 3  # of lfm2
_RWKV_HEAD = 64  # with AVX-512, llama.cpp's kernel reads 64 values at a time, also beyond a smaller head
_N_RANK = 16  # of rwkv7's low-rank matrices
_N_EXPERTS = 4  # of qwen3next; each token uses two of them
_DECAY = 0.05  # factor of the decay rates of a state: at 1, tokens would be forgotten within a few steps

Tensor = tuple[str, tuple[int, ...], float]
"""Name, shape (in numpy's order) and standard deviation; of a norm, the value."""
Layer = Callable[[int, int], Iterable[Tensor]]
"""Returns the tensors of a layer, named without its prefix, from the model's width and the layer's number."""
Settings = Callable[[int, int], dict[str, Any]]
"""Returns metadata, named without the architecture, from the model's width and its number of layers."""


def write_tiny(path: Path | str, architecture: str, **options: Any) -> Path:
    """Write a model of one of `ARCHITECTURES`: see `write_architecture`."""
    return write_architecture(path, architecture, _ARCHITECTURES[architecture], **options)


def write_architecture(
    path: Path | str,
    architecture: str,
    known: "Architecture",
    *,
    noise: float = 0.0,
    n_layers: int = 3,
    n_embd: int = 64,
    n_mtp: int = 0,
    n_ctx: int = 2048,
    chat_template: str = tiny.CHAT_TEMPLATE,
    extra_tokens: Sequence[str] = (),
    control: Collection[str] = (),
    change: Callable[[str, NDArray[np.float32]], NDArray[np.float32] | None] = lambda name, weights: weights,
) -> Path:
    """Write a model of about 1 MB, in F32.

    Args:
        path: an existing file is overwritten.
        architecture: its name in the file. known: its layers.
        noise: deviation from the weights at noise 0, for draft models. At 0.05, such a model has the same
            greedy token as the original at every other position, at 0.2 at one of eight, at 1 at none.
        n_layers: number of layers; a hybrid needs two. A layer's weights do not depend on it. Every third of
            nemotron_h is a feed-forward network.
        n_embd: width, a multiple of 64.
        n_mtp: number of layers for multi-token prediction, in addition.
        n_ctx: context length in training, as stated in the file.
        chat_template: for the control tokens of `spec_local.llama.tiny`.
        extra_tokens: user-defined tokens to add to the vocabulary. control: those that are control tokens.
        change: called with the name and the weights of each tensor; returns those to write; None: leave it
            out.

    Returns:
        `path`.
    """
    path = Path(path)
    tokens, scores, types = tiny.vocabulary(extra_tokens, control)
    layer, settings, norms, mtp, others = known
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny-{architecture}")
    values = _settings(n_embd) | settings(n_embd, n_layers + n_mtp)
    values |= {"vocab_size": len(tokens), "context_length": n_ctx, "block_count": n_layers + n_mtp}
    if n_mtp:
        values["nextn_predict_layers"] = n_mtp
    for key, value in values.items():
        _add(writer, f"{architecture}.{key}", value)
    tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False, chat_template=chat_template)

    layers = [layer(n_embd, i) for i in range(n_layers)]
    for _ in range(n_mtp):
        layers.append(mtp(n_embd, 1) if mtp else [*layer(n_embd, 1), *_mtp(n_embd)])
    for name, shape, scale in [*_tensors(len(tokens), n_embd, layers, norms), *others(n_embd)]:
        weights = tiny.random_weights(name, shape, scale, 0, noise)
        if name.endswith("ssm_a"):
            weights *= _DECAY
        if name == "output.weight":  # tokens that end the answer are almost never chosen
            weights[: len(tiny.CONTROL_TOKENS) + 1] = 0
        changed = change(name, weights)
        if changed is not None:
            writer.add_tensor(name, changed)
    return tiny.finish(writer, path)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _tensors(
    n_vocab: int, n: int, layers: Iterable[Iterable[Tensor]], norms: Iterable[str]
) -> Iterator[Tensor]:
    yield "token_embd.weight", (n_vocab, n), 1.0
    for i, tensors in enumerate(layers):
        for name, shape, scale in tensors:
            yield f"blk.{i}.{name}", shape, scale
    for name in norms:
        yield _vector(name, n)
    yield _matrix("output", n_vocab, n, 3.0)  # peaked distributions, as in `spec_local.llama.tiny`


def _matrix(name: str, n_parallel: int, n_columns: int, gain: float = 1.0) -> Tensor:
    """Return a matrix that multiplies the standard deviation of activations by `gain`."""
    return f"{name}.weight", (n_parallel, n_columns), gain * n_columns**-0.5


def _vector(name: str, n: int, scale: float = 1.0) -> Tensor:
    """Return a vector of weights, or a small bias."""
    return (name, (n,), 0.1) if name.endswith(".bias") else (f"{name}.weight", (n,), scale)


# Parts of layers


def _attention(n: int, *, norms: bool = False, gate: bool = False) -> Iterator[Tensor]:
    """Yield sharp attention: with flat attention, single tokens would hardly change the output."""
    yield _matrix("attn_q", 2 * n if gate else n, n, 2.0)
    yield _matrix("attn_k", n // 2, n)
    yield _matrix("attn_v", n // 2, n)
    yield _matrix("attn_output", n, n, 1.5)
    if norms:
        yield _vector("attn_q_norm", _HEAD, 2.0)
        yield _vector("attn_k_norm", _HEAD)


def _ffn(n: int, n_ff: int = 0) -> Iterator[Tensor]:
    n_ff = n_ff or 2 * n
    yield _matrix("ffn_gate", n_ff, n)
    yield _matrix("ffn_up", n_ff, n)
    yield _matrix("ffn_down", n, n_ff)


def _experts(n: int) -> Iterator[Tensor]:
    """Yield experts and their router, and one more expert that all tokens use."""
    yield _matrix("ffn_gate_inp", _N_EXPERTS, n)
    yield _vector("ffn_gate_inp_shexp", n, n**-0.5)
    for name, shape, scale in _ffn(n, n // 2):
        yield name.replace(".", "_exps."), (_N_EXPERTS, *shape), scale
        yield name.replace(".", "_shexp."), shape, scale


def _mamba(n: int) -> Iterator[Tensor]:
    """Yield mamba with norms, as jamba has it."""
    n_inner, n_rank = 2 * n, 2 * n // _HEAD
    yield _matrix("ssm_in", 2 * n_inner, n)
    yield "ssm_conv1d.weight", (n_inner, _N_CONV), 0.5
    yield _vector("ssm_conv1d.bias", n_inner)
    yield _matrix("ssm_x", n_rank + 2 * _N_STATE, n_inner)
    yield _matrix("ssm_dt", n_inner, n_rank)
    yield _vector("ssm_dt.bias", n_inner)
    yield _vector("ssm_dt_norm", n_rank)
    yield _vector("ssm_b_norm", _N_STATE)
    yield _vector("ssm_c_norm", _N_STATE)
    yield "ssm_a", (n_inner, _N_STATE), 0.5
    yield "ssm_d", (n_inner,), 1.0
    yield _matrix("ssm_out", n, n_inner, 1.5)


def _mamba2(n: int) -> Iterator[Tensor]:
    n_inner, n_heads = 2 * n, 2 * n // _HEAD
    n_conv = n_inner + 2 * _N_GROUPS * _N_STATE
    yield _matrix("ssm_in", n_inner + n_conv + n_heads, n)
    yield "ssm_conv1d.weight", (n_conv, _N_CONV), 0.5
    yield _vector("ssm_conv1d.bias", n_conv)
    yield _vector("ssm_dt.bias", n_heads)
    yield "ssm_a", (n_heads, 1), 0.5
    yield "ssm_d", (n_heads, 1), 1.0
    yield "ssm_norm.weight", (_N_GROUPS, n_inner // _N_GROUPS), 1.0
    yield _matrix("ssm_out", n, n_inner, 1.5)


def _delta_net(n: int, *, joint: bool) -> Iterator[Tensor]:
    """Yield a gated delta net; joint: with one matrix for both beta and alpha."""
    n_inner, n_heads = 2 * n, 2 * n // _HEAD
    n_conv = n_inner + 2 * _N_GROUPS * _N_STATE
    yield _matrix("attn_qkv", n_conv, n)
    yield _matrix("attn_gate", n_inner, n)
    for name in ("ssm_ba",) if joint else ("ssm_beta", "ssm_alpha"):
        yield _matrix(name, 2 * n_heads if joint else n_heads, n)
    yield "ssm_conv1d.weight", (n_conv, _N_CONV), 0.5
    yield _vector("ssm_dt.bias", n_heads)
    yield "ssm_a", (n_heads,), 0.5
    yield _vector("ssm_norm", _N_STATE)
    yield _matrix("ssm_out", n, n_inner, 1.5)


def _short_convolution(n: int) -> Iterator[Tensor]:
    yield "shortconv.conv.weight", (n, _N_SHORT_CONV), 0.7
    yield _matrix("shortconv.in_proj", 3 * n, n)
    yield _matrix("shortconv.out_proj", n, n, 1.5)


def _mtp(n: int) -> Iterator[Tensor]:
    """Yield what a layer for multi-token prediction has in addition to attention and feed-forward."""
    yield _matrix("nextn.eh_proj", n, 2 * n)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield _vector(f"nextn.{name}", n)


# Layers


def _alternating(
    recurrent: Callable[[int], Iterable[Tensor]],
    *,
    attention: Callable[[int], Iterable[Tensor]] = _attention,
    ffn: Callable[[int], Iterable[Tensor]] = _ffn,
    ffn_norm: str = "ffn_norm",
) -> Layer:
    def layer(n: int, i: int) -> Iterator[Tensor]:
        yield _vector("attn_norm", n)
        yield from attention(n) if i % 2 else recurrent(n)
        yield _vector(ffn_norm, n)
        yield from ffn(n)

    return layer


def _mamba2_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _mamba2(n)


def _falcon_h1_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    yield from _mamba2(n)
    yield from _attention(n)
    yield "ffn_norm", (n,), 1.0  # this architecture's name has no suffix
    yield from _ffn(n)


def _nemotron_h_layer(n: int, i: int) -> Iterator[Tensor]:
    yield _vector("attn_norm", n)
    _, *ffn = _ffn(n)  # without a gate
    yield from (_mamba2(n), _attention(n), ffn)[i % 3]


def _rwkv7_layer(n: int, i: int) -> Iterator[Tensor]:
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        yield _vector(name, n)
        yield _vector(f"{name}.bias", n)
    for name, gain in (("w", 1.0), ("a", 1.0), ("v", 1.0), ("g", 2.0)):
        yield _matrix(f"time_mix_{name}1", _N_RANK, n)
        yield _matrix(f"time_mix_{name}2", n, _N_RANK, gain)
    # Decay is near 1 where w0 is very negative: some channels of the state last.
    for name, scale in (("w0", 4.0), ("a0", 1.0), ("v0", 1.0), ("k_k", 1.0), ("k_a", 0.5), ("r_k", 0.2)):
        yield _vector(f"time_mix_{name}", n, scale)
    yield "time_mix_lerp_fused.weight", (6, 1, 1, n), 0.5
    for name in ("receptance", "key", "value"):
        yield _matrix(f"time_mix_{name}", n, n)
    yield _matrix("time_mix_output", n, n, 1.5)
    yield _vector("channel_mix_lerp_k", n, 0.5)
    yield _matrix("channel_mix_key", 2 * n, n)
    yield _matrix("channel_mix_value", n, 2 * n)


# Metadata


def _settings(n: int) -> dict[str, Any]:
    """Return what the architectures have in common; llama.cpp ignores what one of them does not have."""
    return {
        "embedding_length": n,
        "feed_forward_length": 2 * n,
        "attention.head_count": n // _HEAD,
        "attention.head_count_kv": n // _HEAD // 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": _HEAD,
        "ssm.conv_kernel": _N_CONV,
        "ssm.inner_size": 2 * n,
        "ssm.state_size": _N_STATE,
        "ssm.time_step_rank": 2 * n // _HEAD,  # in mamba2 and the delta net, the number of heads
        "ssm.group_count": _N_GROUPS,
        "shortconv.l_cache": _N_SHORT_CONV,
    }


def _heads_settings(n: int, n_layers: int, *, period: int = 2) -> dict[str, Any]:
    """Return in which layers there is attention: where there are heads for keys and values."""
    return {"attention.head_count_kv": [n // _HEAD // 2 if i % period == 1 else 0 for i in range(n_layers)]}


def _nemotron_h_settings(n: int, n_layers: int) -> dict[str, Any]:
    lengths = [2 * n if i % 3 == 2 else 0 for i in range(n_layers)]
    return {"feed_forward_length": lengths, **_heads_settings(n, n_layers, period=3)}


def _recurrent_settings(n: int, n_layers: int) -> dict[str, Any]:
    names = ("decay", "iclr", "value_residual_mix", "gate")
    ranks = {f"attention.{name}_lora_rank": _N_RANK for name in names}
    return {"attention.head_count": 0, "wkv.head_size": _RWKV_HEAD, "token_shift_count": 2, **ranks}


def _qwen_settings(n: int, n_layers: int) -> dict[str, Any]:
    return {
        "full_attention_interval": 2,
        "rope.dimension_sections": [6, 5, 5, 0],
        "expert_feed_forward_length": n // 2,
        "expert_shared_feed_forward_length": n // 2,
    }


def _qwen3next_settings(n: int, n_layers: int) -> dict[str, Any]:
    return {"expert_count": _N_EXPERTS, "expert_used_count": 2, **_qwen_settings(n, n_layers)}


class Architecture(NamedTuple):
    """The layers of an architecture.

    norms: those outside the layers. mtp: a layer for multi-token prediction, if it is not as layer 1 is.
    others: more tensors outside the layers, from the model's width.
    """

    layer: Layer
    settings: Settings = _heads_settings
    norms: tuple[str, ...] = ("output_norm",)
    mtp: Layer | None = None
    others: Callable[[int], Iterable[Tensor]] = lambda n: ()


_with_norms = partial(_attention, norms=True)
_qwen = partial(_alternating, attention=partial(_with_norms, gate=True), ffn_norm="post_attention_norm")
_rwkv_norms = ("token_embd_norm", "token_embd_norm.bias", "output_norm", "output_norm.bias")
_ARCHITECTURES = {
    "mamba2": Architecture(_mamba2_layer, _recurrent_settings),
    "rwkv7": Architecture(_rwkv7_layer, _recurrent_settings, _rwkv_norms),
    "lfm2": Architecture(_alternating(_short_convolution, attention=_with_norms), norms=("token_embd_norm",)),
    "qwen35": Architecture(_qwen(partial(_delta_net, joint=False)), _qwen_settings),
    "qwen3next": Architecture(_qwen(partial(_delta_net, joint=True), ffn=_experts), _qwen3next_settings),
    "granitehybrid": Architecture(_alternating(_mamba2)),
    "falcon-h1": Architecture(_falcon_h1_layer, lambda n, n_layers: {}),
    "nemotron_h": Architecture(_nemotron_h_layer, _nemotron_h_settings),
    "jamba": Architecture(_alternating(_mamba)),
}
ARCHITECTURES = tuple(_ARCHITECTURES)
"""The names that `write_tiny` accepts."""
