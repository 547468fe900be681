"""The settings of heads that draft blocks, from the config.json of each of their layouts."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.rotation import Rotation, read_rotation
from spec_local.conversion.settings import STRICT, Index, Number, Positive, Size, read_settings, unsupported
from spec_local.errors import ModelFileError

_LAYOUTS = {
    "DFlashDraftModel": "DFlash",
    "DFlashSpeculator": "DFlash",
    "DFlash2DraftModel": "DFlash2",
    "Qwen3DSparkModel": "DSpark",
    "DSparkDraftModel": "DSpark",
    "DSparkSpeculator": "DSpark",
    "Lfm2DSparkDraftModel": "DSpark",
    "LingDSparkModel": "DSpark",
}
_UNSUPPORTED = {
    "DeepseekV4DSparkModel": "DSpark of DeepSeek-V4",
    "Gemma4DSparkModel": "DSpark of Gemma 4",
    "MuseGlimmerAssistantModel": "DFlash of Muse Glimmer",
}
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Settings of the convolution and of the candidate selector of DFlash2."""
_MAX_LAYERS = 512  # llama.cpp's limit, which it asserts


def architecture(checkpoint: Checkpoint) -> str | None:
    """The name of the layout in config.json, if it is one of a head that drafts blocks."""
    names = checkpoint.config.get("architectures")
    known = (*_LAYOUTS, *_UNSUPPORTED)
    return next((name for name in known if name in names), None) if isinstance(names, list) else None


class BlockSettings(BaseModel):
    """Those of one head, with the names of config.json; a block has the anchor besides its mask tokens."""

    model_config = STRICT

    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=_MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    draft_vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: Positive = 1e-6  # of transformers
    hidden_act: Literal["silu"] = "silu"
    block_size: Size = 16  # of heads that do not state it; as in llama.cpp
    target_layer_ids: Annotated[list[Index], Field(min_length=1)] | None = None
    aux_hidden_state_layer_ids: Annotated[list[Index], Field(min_length=1)] | None = None
    mask_token_id: Index
    sample_from_anchor: bool | None = None
    dspark_bonus_anchor: bool | None = None  # the opposite, in vLLM
    markov_head_type: Literal["vanilla"] | None = None
    markov_rank: Size | None = None
    confidence_head_with_markov: bool | None = None
    projector_type: Literal["dflash"] | None = None
    shift_label: Literal[False] | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    use_sliding_window: bool | None = None
    sliding_window: Size | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    max_window_layers: Index = 28  # the first layer with a window, where `layer_types` is missing
    use_swa: bool | None = None  # in all layers
    swa_window_size: Size | None = None
    has_embed_tokens: bool | None = None
    tie_word_embeddings: bool | None = None
    rope_is_neox_style: bool | None = None
    attention_value_scale: Number | None = None
    output_multiplier: Number | None = None
    final_logit_softcapping: Number | None = None
    input_embedding_scale: Number | None = None
    conv_kernel_size: Size | None = None
    conv_group_size: Size | None = None
    selector_rank: Size | None = None
    selector_top_k: Size | None = None

    @property
    def head_size(self) -> int:
        """Dimensions of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def n_heads_kv(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def n_drafted(self) -> int:
        """Number of tokens that the head can draft."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of the main model's layers whose input the head reads."""
        if self.target_layer_ids is not None:  # whose output it reads
            return [layer + 1 for layer in self.target_layer_ids]
        return self.aux_hidden_state_layer_ids or ()

    @property
    def window(self) -> tuple[int, Sequence[bool]] | None:
        """Tokens of the sliding window, and which layers have it; None: there is none."""
        size, n = self.swa_window_size or self.sliding_window, self.num_hidden_layers
        if not size or not (self.use_sliding_window or self.use_swa):
            return None
        if self.use_swa:
            return size, [True] * n
        if self.layer_types is None:  # as in transformers
            has_window = [i >= self.max_window_layers for i in range(n)]
        else:
            has_window = [kind == "sliding_attention" for kind in self.layer_types]
        return (size, has_window) if any(has_window) else None  # llama.cpp would abort the process


def read_block_settings(checkpoint: Checkpoint) -> tuple[str, BlockSettings, Rotation]:
    """The layout of a head, its settings, and how it rotates.

    Raises:
        ModelFileError: a setting is missing, wrong or not supported, or the layout is; the message names it.
    """
    name, folder = architecture(checkpoint), checkpoint.folder
    if name not in _LAYOUTS:
        raise ModelFileError(
            f"{folder} has the layout {_UNSUPPORTED.get(name or '', name)}, which cannot be converted: "
            "convert it with llama.cpp's convert_hf_to_gguf.py, or use another head"
        )
    config = dict(checkpoint.config)
    for part in ("transformer_layer_config", "dflash_config"):
        inner = config.pop(part, None) or {}
        if not isinstance(inner, dict):
            raise unsupported(checkpoint.folder, part, "it is not an object")
        config |= {name: value for name, value in inner.items() if value is not None}
    settings = read_settings(BlockSettings, config, folder)
    layout = _LAYOUTS[name]
    if layout == "DFlash" and settings.conv_kernel_size:
        layout = "DFlash2"
    _complete(checkpoint, layout, settings)
    _check(checkpoint, settings)
    for setting in SELECTOR if layout == "DFlash2" else ():
        if getattr(settings, setting) is None:
            raise unsupported(checkpoint.folder, setting, "it is missing")
    return layout, settings, read_rotation(config, settings.head_size, folder)


def _complete(checkpoint: Checkpoint, layout: str, settings: BlockSettings) -> None:
    """Set what a layout means by default, or raise an error for what llama.cpp does not do."""
    is_speculators = "transformer_layer_config" in checkpoint.config
    if layout != "DSpark":
        if settings.sample_from_anchor:
            raise unsupported(checkpoint.folder, "sample_from_anchor", f"llama.cpp skips {layout}'s anchor")
    elif settings.sample_from_anchor is None:
        is_bonus = is_speculators or "aux_hidden_state_layer_ids" in checkpoint.config
        if settings.dspark_bonus_anchor is not None:
            is_bonus = settings.dspark_bonus_anchor
        settings.sample_from_anchor = not is_bonus
    is_known = settings.causal is not None or settings.is_causal is not None
    if not is_speculators or not settings.window or is_known:
        return
    non_causal = settings.sliding_window_non_causal
    if not (layout == "DFlash2" if non_causal is None else non_causal):
        if not all(settings.window[1]):
            raise unsupported(
                checkpoint.folder, "sliding_window_non_causal", "only layers with a window would be causal"
            )
        settings.causal = True


def _check(checkpoint: Checkpoint, settings: BlockSettings) -> None:
    """Raise an error for settings that contradict each other."""
    window, width = settings.window, settings.hidden_size
    n_windows = len(window[1]) if window else settings.num_hidden_layers
    for name, is_wrong, why in (
        ("target_layer_ids", not settings.layers, "it is missing"),
        ("layer_types", n_windows != settings.num_hidden_layers, f"it has {n_windows} layers"),
        ("draft_vocab_size", settings.n_drafted > settings.vocab_size, "it exceeds vocab_size"),
        ("mask_token_id", settings.mask_token_id >= settings.vocab_size, "it exceeds vocab_size"),
        ("head_dim", settings.head_size % 2 or not settings.head_size, f"it is {settings.head_size}"),
        (
            "num_key_value_heads",
            settings.num_attention_heads % settings.n_heads_kv,
            f"there are {settings.num_attention_heads} heads",
        ),
        ("conv_group_size", width % (settings.conv_group_size or 1), f"the width is {width}"),
        # llama.cpp returns the candidates of a position and their scores in place of a hidden state.
        ("selector_top_k", _n_scores(settings.selector_top_k or 0) > width, f"the width is {width}"),
    ):
        if is_wrong:
            raise unsupported(checkpoint.folder, name, why)


def _n_scores(n_candidates: int) -> int:
    return n_candidates * (n_candidates + 1)
