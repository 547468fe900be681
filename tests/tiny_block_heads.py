"""Tiny DFlash, DFlash2 and DSpark heads for the main models of `tests.tiny_heads`.

The weights are made by hand so that a part of the drafts is right. Attention copies the embedding of the last
token of the history to all tokens of a block, and the output matrix is the main model's: this predicts the
first draft token. In DSpark, the Markov model does the same for each draft token and the one before it, and
in DFlash2 the selector for pairs of candidates.
Random weights are added to all of it, so that everything a head reads changes its output.
"""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from spec_local.llama import tiny
from tests.tiny_heads import LAYERS, N_EMBD, _add_shape

MASK = 10
"""The mask token."""
N_CANDIDATES = 7
"""Of a DFlash2 head, as many as fit into its width."""
_HEAD, _N_LAYERS = 32, 2
_KERNEL, _GROUP = 3, 16  # of the convolutions of a DFlash2 head
_NOISE = 0.1  # size of the random weights


def write_tiny_block_head(
    path: Path | str,
    kind: str = "dflash",
    *,
    size: int | None = 8,
    n_draft_vocab: int | None = None,
    own_tensors: bool = False,
    window: int | None = None,
    several_positions: bool = False,
    layers: Sequence[int] = LAYERS,
    extra_tokens: Sequence[str] = (),
    mask: int | None = MASK,
    drop: str | None = None,
    base_type: type[np.floating] = np.float32,
    with_markov: bool = False,
    **facts: bool | int,
) -> Path:
    """Write a head in F32.

    Args:
        kind: ``dflash``, ``dflash2`` or ``dspark``.
        size: number of tokens in a block; None: the file does not state it.
        n_draft_vocab: number of tokens that the head can predict; None: all, without a list of them.
        own_tensors: write token embeddings and output matrix; otherwise only the output of a list of tokens.
        window: of attention in the last layer, in tokens.
        several_positions: rotate like the heads of models that read images (M-RoPE).
        layers: layers whose input the head reads.
        extra_tokens, mask: of the vocabulary; mask None: there is no mask token.
        drop: a tensor that is left out.
        base_type: of the bases of convolutions. with_markov: add the Markov model of a DSpark head.
        facts: further fields of the header, without the architecture; a dot is written as two underscores.
    """
    path = Path(path)
    tokens, scores, types = tiny.vocabulary(extra_tokens)
    writer = gguf.GGUFWriter(path, "dflash")
    _add_shape(writer, len(tokens), _N_LAYERS, n_head_kv=2)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_array("dflash.target_layers", list(layers))
    if size is not None:
        writer.add_uint32("dflash.block_size", size)
    if window:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([False] * (_N_LAYERS - 1) + [True])
    if several_positions:
        writer.add_rope_dimension_sections([_HEAD // 2, 0, 0, 0])
    kernel, group = facts.get("conv_kernel_size", _KERNEL), facts.get("conv_group_size", _GROUP)
    if kind == "dflash2":
        sizes = {"conv_kernel_size": kernel, "conv_group_size": group}
        facts = sizes | {"selector_rank": N_EMBD, "selector_top_k": N_CANDIDATES} | facts
    for name, value in facts.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"dflash.{name.replace('__', '.')}", value)
    tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False)
    if mask is not None:
        writer.add_mask_token_id(mask)

    embeddings = tiny.random_weights("token_embd.weight", (len(tokens), N_EMBD), 1.0, 0, 0)
    output = tiny.random_weights("output.weight", (len(tokens), N_EMBD), 3 * N_EMBD**-0.5, 0, 0)
    output[: len(tiny.CONTROL_TOKENS) + 1] = 0
    tensors: dict[str, np.ndarray] = {}
    all_output = output
    if own_tensors:
        tensors["token_embd.weight"] = embeddings
    if n_draft_vocab:
        chosen = np.random.default_rng(0).choice(len(tokens), n_draft_vocab, replace=False)
        tensors["d2t"] = ids = np.sort(chosen).astype(np.int64)
        output = output[ids]
    if n_draft_vocab or own_tensors:
        tensors["output.weight"] = output

    def add(name: str, weights: np.ndarray, scale: float = 1.0) -> None:
        shape = weights.shape
        random = tiny.random_weights(name, shape, scale * _NOISE * shape[-1] ** -0.5, 1, 0)
        tensors[name] = (weights + random).astype(np.float32)

    if kind == "dspark" or with_markov:
        add("markov_w1.weight", embeddings)
        add("markov_w2.weight", 3 * output)
    # The embedding of the mask token must neither be copied nor stay.
    direction = embeddings[MASK] / np.linalg.norm(embeddings[MASK])
    rest = np.eye(N_EMBD) - np.outer(direction, direction)
    if kind == "dflash2":
        add("selector_predecessor.weight", embeddings)
        add("selector_successor.weight", all_output)
        add("selector_hidden.weight", np.tile(direction, (N_EMBD, 1)), 3)  # what stays of the mask token
    for i in range(_N_LAYERS):
        block, is_first = f"blk.{i}.", i == 0
        add(f"{block}attn_q.weight", np.zeros((N_EMBD, N_EMBD)), 10)
        add(f"{block}attn_k.weight", np.zeros((N_EMBD, N_EMBD)), 10)
        add(f"{block}attn_v.weight", is_first * rest, 0.3 if is_first else 10)
        add(f"{block}attn_output.weight", is_first * 200 * np.eye(N_EMBD), 40 if is_first else 120)
        if kind == "dflash2":
            for part in ("attn", "ffn"):
                unchanged = np.zeros((2, kernel, N_EMBD))
                unchanged[:, 0] = 1
                add(base := f"{block}{part}_conv_base", unchanged, 3)
                tensors[base] = tensors[base].astype(base_type)
                add(f"{block}{part}_conv_proj.weight", np.zeros((2 * kernel * N_EMBD // group, N_EMBD)), 1)
        add(f"{block}ffn_gate.weight", np.zeros((2 * N_EMBD, N_EMBD)))
        add(f"{block}ffn_up.weight", np.zeros((2 * N_EMBD, N_EMBD)))
        add(f"{block}ffn_down.weight", np.zeros((N_EMBD, 2 * N_EMBD)))
        for norm, width, scale in (
            ("attn", N_EMBD, 1),
            ("ffn", N_EMBD, 1),
            ("attn_q", _HEAD, 1 if is_first else 4),  # sharp: the tokens of a block read different positions
            ("attn_k", _HEAD, 0.3 if is_first else 1),
        ):
            tensors[f"{block}{norm}_norm.weight"] = np.full(width, scale, np.float32)
    add("fc.weight", np.zeros((N_EMBD, len(layers) * N_EMBD)), 10)
    tensors["enc.output_norm.weight"] = np.full(N_EMBD, 0.05, np.float32)
    tensors["output_norm.weight"] = np.full(N_EMBD, 0.3 if kind == "dspark" else 1.0, np.float32)
    for name, tensor in tensors.items():
        if name != drop:
            writer.add_tensor(name, tensor)
    return tiny.finish(writer, path)
