"""Published heads that draft blocks become GGUF files: llama.cpp computes what PyTorch does with the original."""

import ctypes

import numpy as np
import pytest

from spec_local.conversion import block
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.writer import write_head
from spec_local.llama import runtime
from spec_local.llama.gguf_tensors import floats
from spec_local.llama.heads.block import BlockFormat
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from tests.block_checkpoints import (
    DFLASH,
    DFLASH2,
    DSPARK,
    N_CANDIDATES,
    READ,
    SELECTOR,
    SIZE,
    SPECULATORS,
    WINDOW,
    block_tensors,
)
from tests.checkpoints import write_checkpoint
from tests.reference_block_head import ReferenceBlockHead
from tests.tiny_block_heads import MASK
from tests.tiny_heads import N_EMBD, write_tiny_main
from tests.torch_block_head import TorchBlockHead

pytestmark = pytest.mark.usefixtures("f32_caches", "unchecked_headers")
PROMPT = [1, *range(300, 312), 77]
NOISE = 1e-3
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
    "DFlash2": (DFLASH2, {}),
    "DFlash2, factors": (
        DFLASH2
        | {"dflash_config": READ | SELECTOR | {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}},
        {},
    ),
}


@pytest.fixture(scope="module")
def main(folder):
    model = Model(write_tiny_main(folder / "conversion-main.gguf"))
    yield model
    model.close()


class Converted:
    """A head in its checkpoint and in its file."""

    def __init__(self, folder, main, config, *, kind="F32", sinks=False, **options):
        self.tensors = block_tensors(config, **options)
        if sinks:
            for i in range(config["num_hidden_layers"]):
                self.tensors[f"layers.{i}.self_attn.sinks"] = np.array([0.5, 2.0], np.float32)
        self.folder = write_checkpoint(folder / "head", config, self.tensors, kind)
        self.checkpoint = Checkpoint(self.folder)
        tensors = {name: self.checkpoint.tensor(name) for name in self.tensors}
        if config.get("has_embed_tokens") is False:
            del tensors["embed_tokens.weight"]
        if config.get("tie_word_embeddings"):
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        matrices = [floats(main.path, f"{name}.weight", N_EMBD) for name in ("token_embd", "output")]
        self.torch = TorchBlockHead(config, tensors, *matrices)
        assert block.recognizes(self.checkpoint)
        self.head = block.convert(self.checkpoint, main)
        self.path = folder / "head.gguf"
        self.main = main

    def blocks(self):
        """llama.cpp's logits, and its other outputs, and the reference's normalized hidden states."""
        write_head(self.path, self.head, self.main, "F32")
        model = Model(self.path)
        rows = open_sequences(self.main, 1, n_ctx=64, max_tokens=32, threads=1, flash_attention=False)
        fields = self.head.fields
        first = 0 if fields.get("sample_from_anchor") else 1
        form = BlockFormat(SIZE, first, MASK, fields.get("attention.causal", False))
        reference = ReferenceBlockHead(model, rows[0].context, form, n_ctx=64)
        extensions = runtime.extensions()
        extensions.llama_set_embeddings_nextn(reference._context, True, False)
        states = np.random.default_rng(1).normal(size=(len(PROMPT) - 1, 3 * N_EMBD)).astype(np.float32)
        try:
            reference.n_drafted = SIZE - first
            logits = np.array(reference.logits(PROMPT, states, [0] * (SIZE - first - 1)))
            pointer = extensions.llama_get_embeddings_nextn(reference._context)
            pointer = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
            other = np.ctypeslib.as_array(pointer, (SIZE, N_EMBD)).copy() if pointer else None
        finally:
            reference.close()
            rows[0].context.close()
            model.close()
        return first, logits, other, self.torch.hidden(states, PROMPT[-1], SIZE)


def agree(found, expected):
    known = np.isfinite(expected)
    assert np.array_equal(np.isfinite(found), known)
    assert np.abs(found[known] - expected[known]).max() < NOISE
    assert np.abs(expected[known]).max() > 1


@pytest.mark.parametrize("name", HEADS)
def test_llama_cpp_computes_the_same(main, tmp_path, name):
    """Of each draft token of a block, the logits; of DSpark the confidence, of DFlash2 the pairs."""
    config, options = HEADS[name]
    converted = Converted(tmp_path, main, config, **options)
    first, logits, other, hidden = converted.blocks()
    layout = converted.head.layout
    if layout == "DSpark":
        expected, confidences = converted.torch.chain(hidden, PROMPT[-1], first)
        assert np.allclose(other[first:, 0], confidences, atol=NOISE)
    else:
        expected = converted.torch.logits(hidden)
    agree(logits, expected[first:].numpy())
    if layout == "DFlash2":
        before = [PROMPT[-1]] * N_CANDIDATES
        for place in range(1, SIZE):
            tokens = other[place][:N_CANDIDATES].astype(int)
            assert set(tokens) == set(np.argsort(-logits[place - 1])[:N_CANDIDATES])
            scores = other[place][N_CANDIDATES:][: N_CANDIDATES**2].reshape(N_CANDIDATES, -1)
            for row, token in zip(scores, before, strict=True):
                agree(row, converted.torch.pairs(hidden, place, token)[tokens].numpy())
            before = tokens


@pytest.mark.parametrize("config", [DFLASH, SPECULATORS, DFLASH2])
def test_a_checkpoint_in_bfloat16(main, tmp_path, config):
    converted = Converted(tmp_path, main, config, kind="BF16")
    first, logits, _, hidden = converted.blocks()
    if converted.head.layout == "DSpark":
        expected, _ = converted.torch.chain(hidden, PROMPT[-1], first)
    else:
        expected = converted.torch.logits(hidden)
    agree(logits, expected[first:].numpy())
