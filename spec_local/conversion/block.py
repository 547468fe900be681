"""Convert heads that draft blocks, DFlash, DSpark and DFlash2, to llama.cpp's architecture ``dflash``.

DFlash: Chen et al. 2026, arXiv 2602.06036. DSpark: DeepSeek-AI 2026, arXiv 2607.05147. The layouts name their
tensors as Qwen3 does, whatever main model they are for. Most share its embeddings and output matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spec_local.conversion.block_settings import SELECTOR, BlockSettings, architecture, read_block_settings
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.head import ConvertedHead, HeadTensor, Value, draft_tokens, of_main
from spec_local.conversion.mask_embedding import read_mask_embedding
from spec_local.conversion.rotation import Rotation
from spec_local.errors import ModelFileError
from spec_local.llama.heads.fit import difference, layer_inputs
from spec_local.llama.model import Model

_PREFIX = "model."  # some checkpoints have it before all names
_EMBEDDINGS, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_MARKOV, _TOKENS = "markov_head.markov_w1.weight", "d2t"
_UNUSED = ("t2d",)  # the opposite of d2t
_FACTORS = {
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "input_embedding_scale": "embedding_scale",
    "attention_value_scale": "attention.value_scale",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor belongs.

    name: llama.cpp's. is_rotated: its rows are dimensions of queries or keys. is_exact: see `HeadTensor`.
    n_zeros: columns that llama.cpp expects in addition.
    """

    name: str
    shape: tuple[int, ...]
    is_required: bool = True
    is_rotated: bool = False
    is_exact: bool = False
    n_zeros: int = 0


def recognizes(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a head that drafts blocks."""
    return architecture(checkpoint) is not None


def convert(checkpoint: Checkpoint, main: Model) -> ConvertedHead:
    """Convert a head, which must fit its main model; see `recognizes`.

    Raises:
        ModelFileError: the checkpoint is damaged or incomplete, or has something that cannot be converted.
        ModelError: it is for another main model.
    """
    layout, settings, rotation = read_block_settings(checkpoint)
    why = difference(main, settings.hidden_size, settings.layers, settings.vocab_size)
    layer_inputs(str(checkpoint.folder), f"a {layout} head", main, settings.layers, why)
    tensors = _tensors(checkpoint, layout, settings, rotation)
    if rotation.factors is not None:
        if main.n_axes > 1:
            raise ModelFileError(
                f"{checkpoint.folder} scales its rotation as Llama 3 does, which llama.cpp does not for main "
                "models that read images: use another head"
            )
        factors = rotation.factors
        tensors["rope_freqs.weight"] = HeadTensor(factors.shape, lambda: factors)
    _add_main_tensors(checkpoint, settings, main, tensors)
    fields = _fields(layout, settings, main) | dict(rotation.fields)
    if layout == "DSpark":
        fields["has_confidence_head"] = "conf_proj.weight" in tensors
    return ConvertedHead("dflash", layout, fields, tensors, settings.mask_token_id)


def _fields(layout: str, settings: BlockSettings, main: Model) -> dict[str, Value]:
    """The header, without what concerns the rotation and the tensors."""
    fields: dict[str, Value] = {
        "block_count": settings.num_hidden_layers,
        "context_length": settings.max_position_embeddings or main.n_ctx_train,
        "embedding_length": settings.hidden_size,
        "feed_forward_length": settings.intermediate_size,
        "attention.head_count": settings.num_attention_heads,
        "attention.head_count_kv": settings.n_heads_kv,
        "attention.key_length": settings.head_size,
        "attention.value_length": settings.head_size,
        "attention.layer_norm_rms_epsilon": float(settings.rms_norm_eps),
        "block_size": settings.block_size,
        "target_layers": settings.layers,
    }
    for name, known in _FACTORS.items():
        if factor := getattr(settings, name):
            fields[known] = float(factor)
    if settings.window:
        fields["attention.sliding_window"], fields["attention.sliding_window_pattern"] = settings.window
    is_causal = settings.causal if settings.is_causal is None else settings.is_causal
    if is_causal is not None:
        fields["attention.causal"] = is_causal
    if layout == "DSpark":
        fields["sample_from_anchor"] = bool(settings.sample_from_anchor)
    if layout == "DFlash2":
        fields |= {name: getattr(settings, name) for name in SELECTOR}
    if main.n_axes > 1:  # M-RoPE: the head rotates by the first position only
        fields["rope.dimension_sections"] = [settings.head_size // 2, 0, 0, 0]
    return fields


# Tensors


def _tensors(
    checkpoint: Checkpoint, layout: str, settings: BlockSettings, rotation: Rotation
) -> dict[str, HeadTensor]:
    """The checkpoint's tensors, by llama.cpp's names."""
    names = {name.removeprefix(_PREFIX): name for name in checkpoint.names}
    places = _places(layout, settings)
    if layout == "DSpark" and _MARKOV in names:
        places |= _markov_places(settings, checkpoint.shape(names[_MARKOV])[-1:])
    if settings.has_embed_tokens is False:
        names.pop(_EMBEDDINGS, None)
    if layout == "DSpark" and settings.n_drafted == settings.vocab_size and _EMBEDDINGS not in names:
        names.pop(_OUTPUT, None)  # a copy of the main model's
    found: dict[str, HeadTensor] = {}
    for name, full in names.items():
        if name in _UNUSED or name.endswith(".rotary_emb.inv_freq"):
            continue
        if name not in places:
            raise ModelFileError(
                f"{checkpoint.folder} has the tensor {full}, which {layout} heads do not have: use another "
                "head"
            )
        place = places[name]
        if checkpoint.shape(full) != place.shape:
            raise ModelFileError(
                f"{checkpoint.folder}: {full} has the shape {checkpoint.shape(full)} instead of "
                f"{place.shape}: download the head again"
            )
        if name == _TOKENS:
            found["d2t"] = draft_tokens(checkpoint, full, settings.vocab_size)
            continue
        shape = (*place.shape[:-1], place.shape[-1] + place.n_zeros)
        load = _loader(checkpoint, full, place, settings, rotation)
        found[place.name] = HeadTensor(shape, load, place.is_exact)
    needed = {_TOKENS, _OUTPUT} if settings.n_drafted < settings.vocab_size else set()
    needed |= {_MARKOV} if layout == "DSpark" else set()
    needed |= {name for name, place in places.items() if place.is_required}
    if missing := sorted(needed - names.keys()):
        raise ModelFileError(f"{checkpoint.folder} has no tensor {missing[0]}: download the head again")
    return found


def _places(layout: str, settings: BlockSettings) -> dict[str, _Place]:
    """Where the tensors of a layout belong, by their names in a checkpoint."""
    n, n_ff, head = settings.hidden_size, settings.intermediate_size, settings.head_size
    n_q, n_kv = settings.num_attention_heads * head, settings.n_heads_kv * head
    n_vocab, n_drafted = settings.vocab_size, settings.n_drafted
    places = {
        "fc.weight": _Place("fc.weight", (n, n * len(settings.layers))),
        "hidden_norm.weight": _Place("enc.output_norm.weight", (n,)),
        "norm.weight": _Place("output_norm.weight", (n,)),
        _EMBEDDINGS: _Place("token_embd.weight", (n_vocab, n), is_required=False),
        _OUTPUT: _Place("output.weight", (n_drafted, n), is_required=False),
        _TOKENS: _Place("d2t", (n_drafted,), is_required=False),
    }
    layer = {
        "input_layernorm.weight": _Place("attn_norm.weight", (n,)),
        "self_attn.q_proj.weight": _Place("attn_q.weight", (n_q, n), is_rotated=True),
        "self_attn.k_proj.weight": _Place("attn_k.weight", (n_kv, n), is_rotated=True),
        "self_attn.v_proj.weight": _Place("attn_v.weight", (n_kv, n)),
        "self_attn.o_proj.weight": _Place("attn_output.weight", (n, n_q)),
        "self_attn.q_norm.weight": _Place("attn_q_norm.weight", (head,), is_rotated=True),
        "self_attn.k_norm.weight": _Place("attn_k_norm.weight", (head,), is_rotated=True),
        "post_attention_layernorm.weight": _Place("ffn_norm.weight", (n,)),
        "mlp.gate_proj.weight": _Place("ffn_gate.weight", (n_ff, n)),
        "mlp.up_proj.weight": _Place("ffn_up.weight", (n_ff, n)),
        "mlp.down_proj.weight": _Place("ffn_down.weight", (n, n_ff)),
    }
    for sinks in ("sinks", "attention_sink_bias"):
        for suffix in ("", ".weight"):
            place = _Place("attn_sinks.weight", (settings.num_attention_heads,), is_required=False)
            layer[f"self_attn.{sinks}{suffix}"] = place
    if layout == "DFlash2":
        kernel, group, rank = (getattr(settings, name) for name in SELECTOR[:3])
        for block, known in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
            # llama.cpp adds to the first one, which it does in F32 only.
            base = _Place(f"{known}_base", (2, kernel, n), is_exact=True)
            layer[f"{block}.base_kernel"] = base
            projected = 2 * kernel * (n // group)
            layer[f"{block}.kernel_projection.weight"] = _Place(f"{known}_proj.weight", (projected, n))
        for end, known in (("predecessor", "selector_predecessor"), ("successor", "selector_successor")):
            place = _Place(f"{known}.weight", (n_vocab, rank))
            places[f"candidate_selector.{end}_codebook"] = place
        hidden = _Place("selector_hidden.weight", (rank, n))
        places["candidate_selector.hidden_projection.weight"] = hidden
    for i in range(settings.num_hidden_layers):
        for name, place in layer.items():
            places[f"layers.{i}.{name}"] = replace(place, name=f"blk.{i}.{place.name}")
    return places


def _markov_places(settings: BlockSettings, rank: tuple[int, ...]) -> dict[str, _Place]:
    """Of the Markov model, which corrects the logits for the token before, and of the confidence head."""
    n = sum(rank)
    confidence = _Place("conf_proj.weight", (1, settings.hidden_size + n), False, is_exact=True)
    if settings.confidence_head_with_markov is False:
        confidence = replace(confidence, shape=(1, settings.hidden_size), n_zeros=n)
    return {
        _MARKOV: _Place("markov_w1.weight", (settings.vocab_size, *rank)),
        "markov_head.markov_w2.weight": _Place("markov_w2.weight", (settings.n_drafted, *rank)),
        "confidence_head.proj.weight": confidence,
        "confidence_head.proj.bias": _Place("conf_proj.bias", (1,), is_required=False),
    }


def _loader(
    checkpoint: Checkpoint, name: str, place: _Place, settings: BlockSettings, rotation: Rotation
) -> Callable[[], NDArray[np.float32] | NDArray[np.int64]]:
    if place.is_rotated and settings.rope_is_neox_style is False:
        return lambda: _in_halves(checkpoint.tensor(name), settings.head_size, rotation.n_rotated)
    if place.n_zeros:
        zeros = np.zeros((place.shape[0], place.n_zeros), np.float32)
        return lambda: np.hstack([checkpoint.tensor(name).astype(np.float32, copy=False), zeros])
    return lambda: checkpoint.tensor(name)


def _in_halves(
    values: NDArray[np.float32] | NDArray[np.int64], head_size: int, n_rotated: int
) -> NDArray[np.float32] | NDArray[np.int64]:
    """Reorder the rows from pairs (0, 1), (2, 3), … that are rotated to pairs (0, n/2), (1, n/2 + 1), …"""
    order = np.arange(head_size)
    order[:n_rotated] = np.concatenate([np.arange(0, n_rotated, 2), np.arange(1, n_rotated, 2)])
    heads = values.reshape(-1, head_size, *values.shape[1:])
    return heads[:, order].reshape(values.shape)


def _add_main_tensors(
    checkpoint: Checkpoint, settings: BlockSettings, main: Model, tensors: dict[str, HeadTensor]
) -> None:
    """Add what a head lacks if llama.cpp would not take it from the main model."""
    shape = (settings.vocab_size, settings.hidden_size)
    mask = read_mask_embedding(checkpoint.folder, settings.hidden_size)
    if mask:
        token, vector = settings.mask_token_id, mask[1]
        if mask[0] not in (None, token):
            raise ModelFileError(
                f"{checkpoint.folder / 'mask_embedding.pt'} is for token {mask[0]} instead of {token}: "
                "download the head again"
            )
        known = tensors.get("token_embd.weight") or of_main(main, shape, "token_embd.weight")[0]
        tensors["token_embd.weight"] = HeadTensor(shape, lambda: _with_row(known.load(), token, vector))
    has_output = "output.weight" in tensors or (settings.tie_word_embeddings and not mask)
    if "token_embd.weight" in tensors and not has_output:
        # llama.cpp would take the embeddings.
        tensors["output.weight"] = of_main(main, shape, "output.weight", "token_embd.weight")[0]


def _with_row(
    values: NDArray[np.float32] | NDArray[np.int64], row: int, vector: NDArray[np.float32]
) -> NDArray[np.float32]:
    found = values.astype(np.float32, copy=False)
    found[row] = vector
    return found
