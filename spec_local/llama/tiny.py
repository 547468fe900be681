"""Tiny models with random weights: real GGUF files that are written quickly and without a download.

`specdec doctor` uses them to check the build of llama.cpp, and the tests use them as models. Their output
makes no sense but, as in a real model, it depends on the whole context, its distributions are peaked, and it
varies.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TensorType = Literal["F32", "F16", "Q8_0", "Q4_0"]
Weights = Callable[[str, tuple[int, ...], float, int, float], NDArray[np.float32]]
"""As `random_weights`."""

CONTROL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")  # ids 1 to 4, after <unk>
FIRST_BYTE = 5
"""Id of the token <0x00>; those of the other 255 bytes follow."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS = (
    "the of and to in is you that it he was for on are with as his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more her two like him see time could no "
    "make than first been its who now people my made over did down only way find use may water long "
    "little very after words called just where most know user assistant system ing ed er tion ly"
)
_HEAD = 32  # the block size of quantized caches
_N_STATE, _N_CONV = 16, 4  # of mamba
SLIDING_WINDOW = 8
"""Window size, in tokens, of every other layer of a tiny gemma3."""


@dataclass(frozen=True, slots=True)
class TinyProperties:
    """The properties of a tiny model.

    seed: seed of the weights. A layer's weights do not depend on the number of layers.
    noise: deviation from the weights at noise 0, for draft models. At 0.05, such a model has the same greedy
        token as the original at two of three positions, at 0.2 at one of four, at 1 at none.
    n_layers: number of transformer layers; with 0, loading the file crashes llama.cpp (to test crashes).
    n_embd: width, a multiple of 64; K-quants need 256.
    n_ctx: context length in training, as stated in the file.
    tensor_type: type of the matrices; norms are always F32.
    extra_tokens: user-defined tokens to add to the vocabulary.
    end_scale: scale of the logits that end the answer: 0 almost never, 1 as often as any other token.
    architecture: ``llama``; ``mamba``, which is recurrent; ``gemma3``, with a sliding window of
        `SLIDING_WINDOW` tokens; any other name stores llama's tensors under that name.
    space_prefix: whether the tokenizer adds a space before every text, as Llama 2's does.
    n_experts: number of experts, of which each token uses two; 0: a dense model.
    chat_template: for the control tokens `CONTROL_TOKENS` or others in `extra_tokens`.
    suppressed: tokens that the file forbids in answers.
    control: `extra_tokens` that are control tokens.
    weights: returns the values of a tensor; None: `random_weights`.
    """

    seed: int = 0
    noise: float = 0.0
    n_layers: int = 2
    n_embd: int = 64
    n_ctx: int = 2048
    tensor_type: TensorType = "F16"
    extra_tokens: Sequence[str] = ()
    end_scale: float = 0.0
    architecture: str = "llama"
    space_prefix: bool = False
    n_experts: int = 0
    chat_template: str = CHAT_TEMPLATE
    suppressed: Sequence[int] = ()
    control: Collection[str] = ()
    weights: Weights | None = None


def write_tiny_model(path: Path | str, **properties: Any) -> Path:
    """Write a model of a few hundred kB.

    Args:
        path: an existing file is overwritten.
        properties: fields of `TinyProperties`.

    Returns:
        `path`.
    """
    # Imported here because it takes 0.1 s.
    import gguf

    path, own = Path(path), TinyProperties(**properties)
    tokens, scores, types = vocabulary(own.extra_tokens, own.control)
    weights = own.weights or random_weights
    writer = gguf.GGUFWriter(path, own.architecture)
    writer.add_name(f"tiny-{own.architecture}-{own.seed}")
    writer.add_context_length(own.n_ctx)
    writer.add_vocab_size(len(tokens))
    _add_shape(writer, own)
    add_tokenizer(writer, tokens, scores, types, own.space_prefix, own.chat_template)
    if own.suppressed:
        writer.add_array("tokenizer.ggml.suppress_tokens", list(own.suppressed))

    kind = gguf.GGMLQuantizationType[own.tensor_type]
    tensors = {"mamba": _mamba_tensors, "gemma3": _gemma3_tensors}.get(own.architecture, llama_tensors)
    for name, shape, scale in _with_experts(tensors(len(tokens), own.n_embd, own.n_layers), own.n_experts):
        values = weights(name, shape, scale, own.seed, own.noise)
        if name == "output.weight":
            values[: len(CONTROL_TOKENS) + 1] = 0
            ends = [tokens.index(t) for t in ("</s>", "<|im_end|>")]
            values[ends] = own.end_scale * weights("ends", (2, own.n_embd), scale, own.seed, own.noise)
        if _requires_f32(name) or shape[-1] % 32:  # the width does not fit the blocks
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return finish(writer, path)


def _add_shape(writer: Any, own: TinyProperties) -> None:
    architecture, n_embd = own.architecture, own.n_embd
    writer.add_embedding_length(n_embd)
    writer.add_block_count(own.n_layers)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(_N_CONV)
        writer.add_ssm_inner_size(2 * n_embd)
        writer.add_ssm_state_size(_N_STATE)
        writer.add_ssm_time_step_rank(n_embd // 16)
    else:
        writer.add_feed_forward_length(2 * n_embd)
        writer.add_head_count(n_embd // _HEAD)
        writer.add_head_count_kv(n_embd // _HEAD // 2)
        writer.add_rope_dimension_count(_HEAD)
    if own.n_experts:
        writer.add_expert_count(own.n_experts)
        writer.add_expert_used_count(2)
    if architecture == "gemma3":
        writer.add_key_length(_HEAD)
        writer.add_value_length(_HEAD)
        writer.add_sliding_window(SLIDING_WINDOW)
        writer.add_sliding_window_pattern(2)  # the even layers have a window, the odd ones do not


def _requires_f32(name: str) -> bool:
    """Whether llama.cpp accepts no other type for a tensor."""
    parts = ("norm", "ssm_conv1d", "gate_inp")
    return any(part in name for part in parts) or name.endswith(("bias", "ssm_a", "ssm_d"))


def finish(writer: Any, path: Path) -> Path:
    """Write what a `gguf.GGUFWriter` has collected to its file; returns `path`."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def vocabulary(
    extra: Sequence[str], control: Collection[str] = ()
) -> tuple[list[str], list[float], list[int]]:
    """Return the texts, scores and types of a SentencePiece vocabulary."""
    from gguf import TokenType

    kinds = {"<unk>": TokenType.UNKNOWN}
    kinds |= dict.fromkeys(CONTROL_TOKENS, TokenType.CONTROL)
    kinds |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    kinds |= dict.fromkeys(["▁", *map(chr, range(0x21, 0x7F)), "é"], TokenType.NORMAL)
    # The tokenizer builds a word by merging two tokens at a time, so all prefixes must be tokens, too.
    for word in [*(f"▁{w}" for w in _WORDS.split()), *_WORDS.split(), "▁" * 16]:
        kinds |= dict.fromkeys((word[:n] for n in range(2, len(word) + 1)), TokenType.NORMAL)
    kinds |= dict.fromkeys(extra, TokenType.USER_DEFINED)
    kinds |= dict.fromkeys(control, TokenType.CONTROL)
    scores = [-float(i) if kind == TokenType.NORMAL else 0.0 for i, kind in enumerate(kinds.values())]
    return list(kinds), scores, [int(kind) for kind in kinds.values()]


def add_tokenizer(
    writer: Any,
    tokens: list[str],
    scores: list[float],
    types: list[int],
    space_prefix: bool,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(space_prefix)
    writer.add_chat_template(chat_template)


def random_weights(
    name: str, shape: tuple[int, ...], scale: float, seed: int, noise: float
) -> NDArray[np.float32]:
    """Return random values with standard deviation `scale`; the values of a norm are all `scale`."""
    if name.endswith("norm.weight"):
        return np.full(shape, scale, np.float32)
    key = [seed, zlib.crc32(name.encode())]
    values = np.random.default_rng(key).normal(size=shape)
    if noise:
        values += noise * np.random.default_rng([*key, 1]).normal(size=shape)
        values /= np.hypot(1, noise)
    values *= scale
    if name.endswith("ssm_a"):  # a decay rate, which is negative
        values = -np.exp(values)
    return values.astype(np.float32)


def llama_tensors(n_vocab: int, n_embd: int, n_layers: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield each tensor's name, shape (in numpy's order) and standard deviation; activations are near 1."""
    n_ff, n_kv = 2 * n_embd, n_embd // 2
    yield "token_embd.weight", (n_vocab, n_embd), 1.0
    for i in range(n_layers):
        block = f"blk.{i}."
        yield f"{block}attn_norm.weight", (n_embd,), 1.0
        # Sharp attention: with flat attention, single tokens would hardly change the output.
        yield f"{block}attn_q.weight", (n_embd, n_embd), 2 * n_embd**-0.5
        yield f"{block}attn_k.weight", (n_kv, n_embd), n_embd**-0.5
        yield f"{block}attn_v.weight", (n_kv, n_embd), n_embd**-0.5
        yield f"{block}attn_output.weight", (n_embd, n_embd), 1.5 * n_embd**-0.5
        yield f"{block}ffn_norm.weight", (n_embd,), 1.0
        yield f"{block}ffn_gate.weight", (n_ff, n_embd), n_embd**-0.5
        yield f"{block}ffn_up.weight", (n_ff, n_embd), n_embd**-0.5
        yield f"{block}ffn_down.weight", (n_embd, n_ff), n_ff**-0.5
    yield "output_norm.weight", (n_embd,), 1.0
    # Logits with standard deviation 3: the best of some hundred tokens then has a probability of about 1/3.
    yield "output.weight", (n_vocab, n_embd), 3 * n_embd**-0.5


def _with_experts(
    tensors: Iterator[tuple[str, tuple[int, ...], float]], n_experts: int
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield the same tensors, with `n_experts` experts and a router for each feed-forward network."""
    for name, shape, scale in tensors:
        if not n_experts or ".ffn_" not in name or "norm" in name:
            yield name, shape, scale
            continue
        if "ffn_gate" in name:
            yield name.replace("ffn_gate", "ffn_gate_inp"), (n_experts, shape[1]), scale
        yield name.replace(".weight", "_exps.weight"), (n_experts, *shape), scale


def _gemma3_tensors(n_vocab: int, n_embd: int, n_layers: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield llama's tensors, and norms after attention and feed-forward, and of queries and keys."""
    for name, shape, scale in llama_tensors(n_vocab, n_embd, n_layers):
        # llama.cpp multiplies gemma's embeddings by the square root of the width.
        yield name, shape, n_embd**-0.5 if name == "token_embd.weight" else scale
    for i in range(n_layers):
        block = f"blk.{i}."
        yield f"{block}attn_q_norm.weight", (_HEAD,), 2.0  # sharp attention, as above
        yield f"{block}attn_k_norm.weight", (_HEAD,), 1.0
        yield f"{block}post_attention_norm.weight", (n_embd,), 1.5
        yield f"{block}post_ffw_norm.weight", (n_embd,), 1.0


def _mamba_tensors(n_vocab: int, n_embd: int, n_layers: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    n_inner, n_rank = 2 * n_embd, n_embd // 16
    yield "token_embd.weight", (n_vocab, n_embd), 1.0
    for i in range(n_layers):
        block = f"blk.{i}."
        yield f"{block}attn_norm.weight", (n_embd,), 1.0
        yield f"{block}ssm_in.weight", (2 * n_inner, n_embd), n_embd**-0.5
        yield f"{block}ssm_conv1d.weight", (n_inner, _N_CONV), 0.5
        yield f"{block}ssm_conv1d.bias", (n_inner,), 0.1
        yield f"{block}ssm_x.weight", (n_rank + 2 * _N_STATE, n_inner), n_inner**-0.5
        yield f"{block}ssm_dt.weight", (n_inner, n_rank), n_rank**-0.5
        yield f"{block}ssm_dt.bias", (n_inner,), 0.1
        yield f"{block}ssm_a", (n_inner, _N_STATE), 0.5
        yield f"{block}ssm_d", (n_inner,), 1.0
        yield f"{block}ssm_out.weight", (n_embd, n_inner), 1.5 * n_inner**-0.5
    yield "output_norm.weight", (n_embd,), 1.0
    yield "output.weight", (n_vocab, n_embd), 3 * n_embd**-0.5
