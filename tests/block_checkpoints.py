"""Tiny heads that draft blocks, in the layouts in which they are published, with random weights."""

import numpy as np

from tests.tiny_block_heads import MASK
from tests.tiny_heads import N_EMBD

N_LAYERS, N_HEADS, N_HEADS_KV, HEAD, N_FF = 2, 2, 1, 48, 96
SIZE, RANK, N_CANDIDATES, KERNEL, GROUP = 6, 12, 5, 3, 16
N_VOCAB, N_DRAFTED = 823, 300
SHAPE = {
    "hidden_size": N_EMBD,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_HEADS_KV,
    "head_dim": HEAD,
    "intermediate_size": N_FF,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
READ = {"target_layer_ids": [0, 1, 3], "mask_token_id": MASK}
SELECTOR = {
    "conv_kernel_size": KERNEL,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": N_CANDIDATES,
}
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
}
DFLASH = SHAPE | {
    "architectures": ["DFlashDraftModel"],
    "block_size": SIZE,
    "rope_theta": 100_000,
    "dflash_config": READ,
}
DFLASH2 = DFLASH | {"architectures": ["DFlash2DraftModel"], "dflash_config": READ | SELECTOR}
DSPARK = SHAPE | READ | {"architectures": ["Qwen3DSparkModel"], "block_size": SIZE, "rope_theta": 1e6}
SPECULATORS = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "transformer_layer_config": SHAPE | {"rope_theta": 5000.0},
    "aux_hidden_state_layer_ids": [1, 2, 4],
    "mask_token_id": MASK,
    "block_size": SIZE,
    "draft_vocab_size": N_DRAFTED,
    "markov_head_type": "vanilla",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
HEADS = {
    "DFlash": (DFLASH, {}),
    "DFlash, prefixed names": (DFLASH, {"prefix": "model."}),
    "DFlash, window": (DFLASH | WINDOW | {"is_causal": False}, {}),
    "DFlash, window in no layer": (DFLASH | WINDOW | {"layer_types": ["full_attention"] * 2}, {}),
    "DFlash, window from a layer on": (
        DFLASH | WINDOW | {"layer_types": None, "max_window_layers": 1, "is_causal": True},
        {},
    ),
    "DFlash, window in all layers": (
        DFLASH | {"dflash_config": READ | {"use_swa": True, "swa_window_size": 5, "causal": True}},
        {},
    ),
    "DFlash, factors": (
        DFLASH | {"dflash_config": READ | {"input_embedding_scale": 3.0, "attention_value_scale": 0.5}},
        {},
    ),
    "DFlash, sinks": (DFLASH, {"sinks": True}),
    "DFlash, part rotated": (DFLASH | {"partial_rotary_factor": 0.5}, {}),
    "DFlash, pairs rotated": (DFLASH | {"rope_is_neox_style": False}, {}),
    "DFlash, pairs of a part": (DFLASH | {"rope_is_neox_style": False, "partial_rotary_factor": 0.5}, {}),
    "DFlash, linear": (DFLASH | {"rope_scaling": {"type": "linear", "factor": 2.0}}, {}),
    "DFlash, Llama 3": (DFLASH | {"rope_scaling": LLAMA3}, {}),
    "DFlash, YaRN": (DFLASH | {"rope_parameters": YARN}, {}),
    "DFlash, YaRN's factor": (DFLASH | {"rope_parameters": YARN | {"attention_factor": 1.5}}, {}),
    "DFlash, own embeddings": (DFLASH, {"own": ("embed_tokens",)}),
    "DFlash, tied embeddings": (DFLASH | {"tie_word_embeddings": True}, {"own": ("embed_tokens",)}),
    "DFlash, own tensors": (DFLASH, {"own": ("embed_tokens", "lm_head")}),
    "DFlash, unused embeddings": (DFLASH | {"has_embed_tokens": False}, {"own": ("embed_tokens",)}),
    "DFlash, list of tokens": (DFLASH | {"draft_vocab_size": 300}, {}),
    "DSpark": (DSPARK, {}),
    "DSpark, own tensors": (DSPARK, {"own": ("embed_tokens", "lm_head")}),
    "DSpark of LFM2": (DSPARK | {"architectures": ["Lfm2DSparkDraftModel"]}, {}),
    "DSpark of Ling": (DSPARK | {"architectures": ["LingDSparkModel"], "rope_is_neox_style": False}, {}),
    "DSpark, after the anchor": (DSPARK | {"sample_from_anchor": False}, {}),
    "DSpark of speculators": (SPECULATORS, {}),
    "DSpark of speculators, from the anchor": (SPECULATORS | {"sample_from_anchor": True}, {}),
    "DSpark of vLLM": (DSPARK | {"dspark_bonus_anchor": True}, {}),
    "DSpark, a plain confidence": (DSPARK | {"confidence_head_with_markov": False}, {}),
    "DFlash of speculators": (SPECULATORS | {"architectures": ["DFlashSpeculator"]}, {}),
    "DFlash2": (DFLASH2, {}),
    "DFlash2, factors": (
        DFLASH2
        | {"dflash_config": READ | SELECTOR | {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}},
        {},
    ),
}
"""Configuration, and options of `block_tensors`, of heads of each layout."""


def block_tensors(config, *, prefix="", own=(), sinks=False):
    """The tensors of a head, by the names of its layout, in float32.

    prefix: before all names. own: tensors of the main model that are added, ``embed_tokens`` and ``lm_head``.
    sinks: add some to the attention.
    """
    rng = np.random.default_rng(0)
    settings = config | config.get("dflash_config", {})
    n, shapes = N_EMBD, {}
    n_drafted = config.get("draft_vocab_size") or N_VOCAB
    n_read = len(settings.get("target_layer_ids") or settings["aux_hidden_state_layer_ids"])
    shapes["fc"] = (n, n_read * n)
    shapes["hidden_norm"] = shapes["norm"] = (n,)
    for i in range(N_LAYERS):
        layer = f"layers.{i}."
        for name, shape in {
            "input_layernorm": (n,),
            "post_attention_layernorm": (n,),
            "self_attn.q_proj": (N_HEADS * HEAD, n),
            "self_attn.k_proj": (N_HEADS_KV * HEAD, n),
            "self_attn.v_proj": (N_HEADS_KV * HEAD, n),
            "self_attn.o_proj": (n, N_HEADS * HEAD),
            "self_attn.q_norm": (HEAD,),
            "self_attn.k_norm": (HEAD,),
            "mlp.gate_proj": (N_FF, n),
            "mlp.up_proj": (N_FF, n),
            "mlp.down_proj": (n, N_FF),
        }.items():
            shapes[layer + name] = shape
        if "conv_kernel_size" in settings:
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}{part}.base_kernel"] = (2, KERNEL, n)
                shapes[f"{layer}{part}.kernel_projection"] = (2 * KERNEL * n // GROUP, n)
    if "conv_kernel_size" in settings:
        shapes["candidate_selector.predecessor_codebook"] = (N_VOCAB, RANK)
        shapes["candidate_selector.successor_codebook"] = (N_VOCAB, RANK)
        shapes["candidate_selector.hidden_projection"] = (RANK, n)
    elif "DFlash" not in config["architectures"][0]:
        shapes["markov_head.markov_w1"] = (N_VOCAB, RANK)
        shapes["markov_head.markov_w2"] = (n_drafted, RANK)
        shapes["confidence_head.proj"] = (1, n + RANK * config.get("confidence_head_with_markov", True))
    shapes |= {"embed_tokens": (N_VOCAB, n)} if "embed_tokens" in own else {}
    shapes |= {"lm_head": (n_drafted, n)} if "lm_head" in own or n_drafted < N_VOCAB else {}
    found = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape)
        if name == "embed_tokens":
            pass
        elif "norm" in name:
            values = 1 + 0.2 * values
        elif "markov" in name or "codebook" in name:
            values *= 0.7
        else:
            values *= 1.5 * shape[-1] ** -0.5
        plain = name if name.endswith(("base_kernel", "_codebook")) else f"{name}.weight"
        found[prefix + plain] = values.astype(np.float32)
    if "confidence_head.proj" in shapes:
        found[f"{prefix}confidence_head.proj.bias"] = np.array([0.3], np.float32)
    if n_drafted < N_VOCAB:
        tokens = np.sort(rng.choice(N_VOCAB, n_drafted, replace=False))
        found["d2t"] = tokens - np.arange(n_drafted)
        found["t2d"] = np.isin(np.arange(N_VOCAB), tokens)
    if sinks:
        found |= {f"layers.{i}.self_attn.sinks": np.array([0.5, 2], np.float32) for i in range(N_LAYERS)}
    return found
