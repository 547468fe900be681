"""An EAGLE-3 head with random weights for any main model: it takes the time of a trained one."""

from pathlib import Path

import gguf
import numpy as np

from spec_local.llama.model import Model

_LOGITS = 4.0  # standard deviation of the logits, for which distributions are as narrow as a language model's
N_DRAFT_VOCAB = 8192  # tokens that it can draft, as few as in trained heads for small main models


def write_random_head(path: Path, main: Model, seed: int = 0) -> Path:
    """Write a head of one layer, which has the width and the attention heads of the main model.

    Its weights are Q8_0, and it reads the states of the layers that EAGLE-3 reads.
    """
    rng = np.random.default_rng(seed)
    width, n_heads = main.n_embd, main.number("attention.head_count") or 1
    n_kv_heads = main.number("attention.head_count_kv") or n_heads
    length = main.number("attention.key_length") or width // n_heads
    n_vocab = main.vocabulary.n_tokens
    ids = np.sort(rng.choice(n_vocab, min(N_DRAFT_VOCAB, n_vocab), replace=False))
    n_inner = main.number("feed_forward_length") or 4 * width
    layers = (2, main.n_layers // 2, main.n_layers - 3)
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_context_length(main.n_ctx_train or 4096)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(n_inner)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_key_length(length)
    writer.add_value_length(length)
    writer.add_rope_dimension_count(length)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(n_vocab)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", width)
    writer.add_tokenizer_model("none")
    writer.add_tensor("d2t", ids.astype(np.int64))
    q, kv = n_heads * length, n_kv_heads * length
    shapes = {
        "output": (len(ids), width),
        "fc": (width, len(layers) * width),
        "blk.0.attn_q": (q, 2 * width),
        "blk.0.attn_k": (kv, 2 * width),
        "blk.0.attn_v": (kv, 2 * width),
        "blk.0.attn_output": (width, q),
        "blk.0.ffn_gate": (n_inner, width),
        "blk.0.ffn_up": (n_inner, width),
        "blk.0.ffn_down": (width, n_inner),
    }
    for name, shape in shapes.items():
        scale = (_LOGITS if name == "output" else 1.0) * shape[1] ** -0.5
        weights = rng.standard_normal(shape, np.float32) * np.float32(scale)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
