"""Tiny EAGLE-3 heads, and main models that such a head can predict.

In these main models, the next token depends mostly on the last one, so that a head made by hand predicts it:
its attention looks at the last token only, and its output matrix is the main model's. Random weights are
added to all of it, so that everything a head reads changes its output.
"""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from spec_local.llama import tiny

N_EMBD, N_LAYERS = 64, 5
LAYERS = (1, 2, 4)
"""Layers whose input the head reads."""
_HEAD = 32
_NOISE = 0.15  # size of the random weights: at 1, a head predicts nothing
_SHALLOW = 0.1  # factor of what layers add to the last token's embedding


def write_tiny_main(path: Path | str, *, end_scale: float = 0.0, n_layers: int = N_LAYERS) -> Path:
    """Write a llama model in F32, with the vocabulary of `spec_local.llama.tiny`.

    end_scale: as of `write_tiny_model`.
    """
    path = Path(path)
    tokens, scores, types = tiny.vocabulary(())
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, len(tokens), n_layers, n_head_kv=1)
    tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False)
    for name, shape, scale in tiny.llama_tensors(len(tokens), N_EMBD, n_layers):
        weights = tiny.random_weights(name, shape, scale, 0, 0)
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            weights *= _SHALLOW
        if name == "output.weight":
            weights[: len(tiny.CONTROL_TOKENS) + 1] = 0
            ends = [tokens.index(text) for text in ("</s>", "<|im_end|>")]
            weights[ends] = end_scale * tiny.random_weights("ends", (2, N_EMBD), scale, 0, 0)
        writer.add_tensor(name, weights)
    return tiny.finish(writer, path)


def write_tiny_eagle(
    path: Path | str,
    *,
    n_vocab: int | None = None,
    n_draft_vocab: int | None = 400,
    layers: Sequence[int] = LAYERS,
    target_width: int = N_EMBD,
    with_tokenizer: bool = False,
) -> Path:
    """Write a head for `write_tiny_main` in F32.

    Args:
        n_vocab: number of the main model's tokens.
        n_draft_vocab: number of tokens that the head can predict; None: all, without a list of them.
        layers: layers whose input the head reads.
        target_width: width of the main model's hidden states, as stated in the file.
        with_tokenizer: write the main model's tokenizer, as llama.cpp's converter does.
    """
    path = Path(path)
    tokens, scores, types = tiny.vocabulary(())
    n_vocab = n_vocab or len(tokens)
    writer = gguf.GGUFWriter(path, "eagle3")
    _add_shape(writer, n_vocab, 1, n_head_kv=2)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", target_width)
    if with_tokenizer:
        tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False)
    else:
        writer.add_tokenizer_model("none")

    matrices = eagle_matrices(n_draft_vocab)
    if n_draft_vocab:
        writer.add_tensor("d2t", matrices.pop("d2t"))
    for name, weights in matrices.items():
        writer.add_tensor(name, weights)
    shape = (N_EMBD, len(layers) * target_width)
    writer.add_tensor("fc.weight", tiny.random_weights("fc", shape, _NOISE * shape[1] ** -0.5, 1, 0))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, np.float32))
    return tiny.finish(writer, path)


def eagle_matrices(n_draft_vocab: int | None) -> dict[str, np.ndarray]:
    """The matrices of a head by llama.cpp's names, and ``d2t`` if it drafts a part of the tokens."""
    tokens, _, _ = tiny.vocabulary(())
    output = tiny.random_weights("output.weight", (len(tokens), N_EMBD), 3 * N_EMBD**-0.5, 0, 0)
    output[: len(tiny.CONTROL_TOKENS) + 1] = 0
    found = {}
    if n_draft_vocab:
        chosen = np.random.default_rng(0).choice(len(tokens), n_draft_vocab, replace=False)
        ids = np.sort(chosen)
        found["d2t"] = ids.astype(np.int64)
        output = output[ids]
    found["output.weight"] = output
    token_part = np.hstack([np.eye(N_EMBD), np.zeros((N_EMBD, N_EMBD))])
    known = {
        "attn_q": 3 * token_part,
        "attn_k": token_part,
        "attn_v": token_part,
        "attn_output": np.eye(N_EMBD),
        "ffn_gate": np.zeros((2 * N_EMBD, N_EMBD)),
        "ffn_up": np.zeros((2 * N_EMBD, N_EMBD)),
        "ffn_down": np.zeros((N_EMBD, 2 * N_EMBD)),
    }
    for name, weights in known.items():
        full = f"blk.0.{name}.weight"
        random = tiny.random_weights(full, weights.shape, weights.shape[1] ** -0.5, 1, 0)
        found[full] = (weights + _NOISE * random).astype(np.float32)
    return found


def _add_shape(writer: gguf.GGUFWriter, n_vocab: int, n_layers: int, n_head_kv: int) -> None:
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(2 * N_EMBD)
    writer.add_head_count(N_EMBD // _HEAD)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
