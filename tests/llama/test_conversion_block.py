"""Published heads that draft blocks become GGUF files, from which llama.cpp computes what PyTorch does."""

import ctypes

import numpy as np
import pytest
import torch

from spec_local.conversion import block
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.convert import convert_head
from spec_local.conversion.writer import write_head
from spec_local.errors import ModelError, ModelFileError
from spec_local.llama import runtime
from spec_local.llama.gguf_tensors import floats
from spec_local.llama.heads.block import BlockFormat
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequences
from tests.block_checkpoints import (
    DFLASH,
    DFLASH2,
    DSPARK,
    HEAD,
    HEADS,
    LLAMA3,
    N_CANDIDATES,
    READ,
    SELECTOR,
    SHAPE,
    SIZE,
    SPECULATORS,
    WINDOW,
    YARN,
    block_tensors,
)
from tests.checkpoints import write_checkpoint
from tests.reference_block_head import ReferenceBlockHead
from tests.tiny_architectures import write_tiny
from tests.tiny_block_heads import MASK
from tests.tiny_heads import N_EMBD, write_tiny_main
from tests.torch_block_head import TorchBlockHead

pytestmark = pytest.mark.usefixtures("f32_caches", "unchecked_headers")
PROMPT = [1, *range(300, 312), 77]
NOISE = 1e-3


@pytest.fixture(scope="module")
def main(folder):
    model = Model(write_tiny_main(folder / "conversion-main.gguf"))
    yield model
    model.close()


class Converted:
    """A head in its checkpoint and in its file."""

    def __init__(self, folder, main, config, *, kind="F32", mask=None, **options):
        self.tensors = block_tensors(config, **options)
        self.folder = write_checkpoint(folder / "head", config, self.tensors, kind)
        self.checkpoint = Checkpoint(self.folder)
        tensors = {name: self.checkpoint.tensor(name) for name in self.tensors}
        if config.get("has_embed_tokens") is False:
            del tensors["embed_tokens.weight"]
        if config.get("tie_word_embeddings") and mask is None:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        matrices = [floats(main.path, f"{name}.weight", N_EMBD) for name in ("token_embd", "output")]
        if mask is not None:
            content = mask if config["tie_word_embeddings"] else {"mask_token_id": MASK, "embedding": mask}
            torch.save(content, self.folder / "mask_embedding.pt")
            tensors.setdefault("lm_head.weight", matrices[1])
            tensors["embed_tokens.weight"] = tensors.get("embed_tokens.weight", matrices[0]).copy()
            tensors["embed_tokens.weight"][MASK] = mask.float()
        self.torch = TorchBlockHead(config, tensors, *matrices)
        assert block.recognizes(self.checkpoint)
        self.head = block.convert(self.checkpoint, main)
        self.path = folder / "head.gguf"
        self.main = main

    def blocks(self, kind="F32"):
        """llama.cpp's logits, and its other outputs, and the reference's normalized hidden states."""
        write_head(self.path, self.head, self.main, kind)
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


@pytest.mark.parametrize("config", [SPECULATORS, DFLASH2])
@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_quantized_heads_are_evaluated(main, tmp_path, config, kind):
    """llama.cpp would abort the process for some types."""
    converted = Converted(tmp_path, main, config)
    first, logits, _, hidden = converted.blocks(kind)
    if converted.head.layout == "DSpark":
        expected = converted.torch.chain(hidden, PROMPT[-1], first)[0][first].numpy()
    else:
        expected = converted.torch.logits(hidden)[first].numpy()
    known = np.isfinite(expected)
    assert np.corrcoef(logits[0][known], expected[known])[0, 1] > 0.999


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            DFLASH | WINDOW | {"is_causal": False, "dflash_config": READ | {"block_size": None}},
            {
                "rope.freq_base": 100_000,
                "attention.sliding_window": 6,
                "attention.sliding_window_pattern": [False, True],
                "attention.causal": False,
            },
        ),
        (DFLASH2, SELECTOR | {"rope.freq_base": 100_000}),
        (DSPARK, {"rope.freq_base": 1e6, "sample_from_anchor": True, "has_confidence_head": True}),
        (
            DSPARK | {"dspark_bonus_anchor": True},  # which the converter does not know
            {"rope.freq_base": 1e6, "sample_from_anchor": False, "has_confidence_head": True},
        ),
        (SPECULATORS, {"rope.freq_base": 5000, "sample_from_anchor": False, "has_confidence_head": True}),
    ],
)
def test_fields_are_those_of_llama_cpp_s_converter(main, tmp_path, config, fields):
    """As the pinned commit of convert_hf_to_gguf.py wrote them for these heads."""
    head = Converted(tmp_path, main, config).head
    assert head.architecture == "dflash"
    assert head.mask == MASK
    assert head.fields == fields | {
        "block_count": 2,
        "context_length": 2048,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 48,
        "attention.value_length": 48,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "block_size": 6,
        "target_layers": [1, 2, 4],
    }


def test_a_copy_of_the_main_model_s_output_is_left_out(main, tmp_path):
    assert "output.weight" not in Converted(tmp_path, main, DSPARK, own=("lm_head",)).head.tensors


def test_the_command_s_function_converts_each_layout(main, tmp_path):
    for name, config in {"DFlash": DFLASH, "DSpark": SPECULATORS, "DFlash2": DFLASH2}.items():
        folder = write_checkpoint(tmp_path / name, config, block_tensors(config))
        log = []
        head = Model(convert_head(folder, main.path, tmp_path / f"{name}.gguf", log=log.append))
        assert head.target_layers == (1, 2, 4)
        assert log == [f"converting {name} ({name}) for {main.name} to Q8_0"]
        head.close()


def test_a_window_in_no_layer(main, tmp_path):
    """llama.cpp's own converter writes it for some heads; llama.cpp would abort the process."""
    head = Converted(tmp_path, main, DFLASH | WINDOW).head
    head.fields["attention.sliding_window_pattern"] = [False, False]
    with pytest.raises(ModelError, match=r"an incomplete head \(a window of attention in no layer\)"):
        write_head(tmp_path / "head.gguf", head, main, "F32")


@pytest.mark.parametrize("own", [(), ("embed_tokens",)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_vector_for_the_mask_token(main, tmp_path, own, kind):
    mask = torch.linspace(-2, 2, N_EMBD).to(kind)
    converted = Converted(tmp_path, main, DFLASH | {"tie_word_embeddings": bool(own)}, own=own, mask=mask)
    first, logits, _, hidden = converted.blocks()
    agree(logits, converted.torch.logits(hidden)[first:].numpy())


def test_main_models_that_read_images(folder, tmp_path):
    """The head rotates by the first of their positions only, as llama.cpp's converter has it."""
    model = Model(write_tiny(folder / "images.gguf", "qwen35", n_layers=5))
    try:
        for config in (DFLASH, DFLASH | {"partial_rotary_factor": 0.5}):
            converted = Converted(tmp_path, model, config)
            assert converted.head.fields["rope.dimension_sections"] == [HEAD // 2, 0, 0, 0]
            _, logits, _, hidden = converted.blocks()
            agree(logits, converted.torch.logits(hidden)[1:].numpy())
        scaled = write_checkpoint(
            tmp_path / "scaled", DFLASH | {"rope_scaling": LLAMA3}, block_tensors(DFLASH)
        )
        with pytest.raises(ModelFileError, match="scales its rotation as Llama 3 does"):
            block.convert(Checkpoint(scaled), model)
    finally:
        model.close()


@pytest.mark.parametrize(
    ("changes", "kinds", "is_causal"),
    [
        ({}, ["sliding_attention"] * 2, True),
        ({}, ["full_attention"] * 2, None),
        ({"sliding_window_non_causal": True}, WINDOW["layer_types"], None),
        ({"causal": False}, WINDOW["layer_types"], False),
    ],
)
def test_blocks_of_speculators_are_causal_within_a_window(main, tmp_path, changes, kinds, is_causal):
    layer = SHAPE | WINDOW | {"layer_types": kinds}
    head = Converted(tmp_path, main, SPECULATORS | {"transformer_layer_config": layer} | changes).head
    assert head.fields.get("attention.causal") is is_causal


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def dflash(**changes):
    return DFLASH | {"dflash_config": READ | changes}


WRONG = {
    "another width": (DFLASH | {"hidden_size": 128}, "another model .hidden states of width 128 against 64"),
    "another vocabulary": (DFLASH | {"vocab_size": 900}, "another model .900 tokens against 823"),
    "too many layers": (dflash(target_layer_ids=[0, 1, 5]), "reads layers up to 5, but there are only 5"),
    "the last layer": (dflash(target_layer_ids=[0, 1, 4]), "reads the last layer"),
    "a layer twice": (dflash(target_layer_ids=[0, 1, 1]), "it reads a layer twice"),
    "embeddings": (SPECULATORS | {"aux_hidden_state_layer_ids": [0, 1, 2]}, "it reads the token embeddings"),
    "no draft tokens": (DFLASH | {"block_size": 1}, r"^head.gguf is an incomplete head .blocks without"),
    "no layers": (DFLASH | {"dflash_config": {"mask_token_id": MASK}}, "`target_layer_ids` .*missing"),
    "no mask token": (
        DFLASH | {"dflash_config": without(READ, "mask_token_id")},
        "`mask_token_id` .*missing",
    ),
    "mask token": (dflash(mask_token_id=823), "`mask_token_id` .*it exceeds vocab_size"),
    "no size": (without(DFLASH, "intermediate_size"), "`intermediate_size` .*is missing"),
    "a text": (DFLASH | {"num_hidden_layers": "2"}, "`num_hidden_layers` .*valid integer"),
    "too large": (DFLASH | {"num_hidden_layers": 10**30}, "`num_hidden_layers` "),
    "heads": (
        DFLASH | {"num_attention_heads": 3, "num_key_value_heads": 2},
        "`num_key_value_heads` .*3 heads",
    ),
    "odd": (DFLASH | {"head_dim": 33}, "`head_dim` .*it is 33"),
    "a nested text": (DFLASH | {"dflash_config": "x"}, "`dflash_config` .*not an object"),
    "activation": (DFLASH | {"hidden_act": "gelu"}, "`hidden_act` .*'silu'"),
    "another Markov model": (DSPARK | {"markov_head_type": "rnn"}, "`markov_head_type` .*'vanilla'"),
    "kinds of layers": (DFLASH | {"layer_types": ["linear_attention"] * 2}, "`layer_types.0` "),
    "number of layers": (
        DFLASH | WINDOW | {"layer_types": ["sliding_attention"]},
        "`layer_types` .*1 layers",
    ),
    "rotation": (DFLASH | {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "`rope_scaling.rope"),
    "further rotation": (DFLASH | {"rope_parameters": YARN | {"mscale": 1.0}}, "`mscale` .*unknown key"),
    "no factor": (DFLASH | {"rope_scaling": {"rope_type": "linear"}}, "`rope_scaling.factor` .*missing"),
    "rotation of layers": (
        DFLASH | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}},
        "`rope_parameters` .*differs between layers",
    ),
    "no rank": (DSPARK | {"markov_rank": 0}, "`markov_rank` .*greater than 0"),
    "from the anchor": (
        DFLASH | {"sample_from_anchor": True},
        "`sample_from_anchor` .*DFlash's anchor",
    ),
    "Domino": (DFLASH | {"projector_type": "domino"}, "`projector_type` .*'dflash'"),
    "causal in some layers": (
        SPECULATORS | {"transformer_layer_config": SHAPE | WINDOW},
        "`sliding_window_non_causal` .*only layers with a window would be causal",
    ),
    "draft tokens": (SPECULATORS | {"draft_vocab_size": 1000}, "`draft_vocab_size` .*exceeds"),
    "no selector": (DFLASH2 | {"dflash_config": READ}, "`conv_kernel_size` .*missing"),
    "groups": (DFLASH2 | {"dflash_config": READ | SELECTOR | {"conv_group_size": 24}}, "`conv_group_size`"),
    "candidates": (DFLASH2 | {"dflash_config": READ | SELECTOR | {"selector_top_k": 8}}, "`selector_top_k`"),
    "DeepSeek": (
        DSPARK | {"architectures": ["DeepseekV4DSparkModel"]},
        "layout DSpark of DeepSeek-V4",
    ),
    "Gemma": (DSPARK | {"architectures": ["Gemma4DSparkModel"]}, "layout DSpark of Gemma 4"),
    "no Markov model": (DFLASH | {"architectures": ["DSparkDraftModel"]}, "no tensor markov_head.markov_w1"),
}


def refuses(main, folder, config, tensors, why):
    """One line, and nothing is written."""
    checkpoint = Checkpoint(write_checkpoint(folder / "head", config, tensors))

    def convert():
        write_head(folder / "head.gguf", block.convert(checkpoint, main), main, "F32")

    with pytest.raises((ModelError, ModelFileError), match=why) as caught:
        convert()
    assert "\n" not in str(caught.value)
    assert {path.name for path in folder.iterdir()} <= {"head", "unchecking"}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_converted_is_named(main, tmp_path, name):
    config, why = WRONG[name]
    tensors = block_tensors(DFLASH2 if config["architectures"] == DFLASH2["architectures"] else DFLASH)
    refuses(main, tmp_path, config, tensors, why)


def test_wrong_tensors(main, tmp_path):
    tensors, speculators = block_tensors(DFLASH), block_tensors(SPECULATORS)
    bias = {"layers.0.self_attn.q_proj.bias": np.zeros(96, np.float32)}
    for i, (config, changed, why) in enumerate(
        [
            (DFLASH, tensors | bias, "tensor layers.0.self_attn.q_proj.bias, which DFlash heads do not have"),
            (DFLASH, without(tensors, "fc.weight"), "has no tensor fc.weight"),
            (
                DFLASH,
                tensors | {"norm.weight": np.ones(32, np.float32)},
                "norm.weight has the shape",
            ),
            (DFLASH | {"num_hidden_layers": 3}, tensors, "has no tensor layers.2"),
            (SPECULATORS, without(speculators, "d2t"), "has no tensor d2t"),
            (SPECULATORS, without(speculators, "lm_head.weight"), "has no tensor lm_head.weight"),
            (SPECULATORS, speculators | {"d2t": np.full(300, 600)}, "d2t does not list different tokens"),
            (SPECULATORS, speculators | {"d2t": -np.arange(300)}, "d2t does not list different tokens"),
        ]
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        refuses(main, folder, config, changed, why)


def test_wrong_vectors_of_the_mask_token(main, tmp_path):
    folder = write_checkpoint(tmp_path / "head", DFLASH, block_tensors(DFLASH))
    path = folder / "mask_embedding.pt"
    for content in ({"mask_token_id": MASK, "embedding": torch.zeros(8)}, {"mask_token_id": MASK}):
        torch.save(content, path)
        with pytest.raises(ModelFileError, match="has no vector of 64 values"):
            block.convert(Checkpoint(folder), main)
    torch.save([1], path)
    with pytest.raises(ModelFileError, match="is damaged"):
        block.convert(Checkpoint(folder), main)
    torch.save({"mask_token_id": 7, "embedding": torch.zeros(N_EMBD)}, path)
    with pytest.raises(ModelFileError, match="is for token 7 instead of 10"):
        block.convert(Checkpoint(folder), main)
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelFileError, match="is damaged"):
        block.convert(Checkpoint(folder), main)


@pytest.mark.parametrize(
    "architectures", [None, "DFlashDraftModel", ["LlamaForCausalLMEagle3"], [None, 1, []]]
)
def test_other_checkpoints_are_not_recognized(tmp_path, architectures):
    config = DFLASH | {"architectures": architectures}
    assert not block.recognizes(Checkpoint(write_checkpoint(tmp_path, config, {"a": np.ones(1, np.float32)})))


VALUES = [None, True, -1, 0, 1, 10**30, 2**31 - 1, 1e308, "x", [], {}, [1], [None], {"a": 1}]


@pytest.mark.parametrize("config", [DFLASH | WINDOW | {"rope_parameters": YARN}, SPECULATORS, DFLASH2])
def test_any_value_of_any_setting_is_converted_or_refused(main, tmp_path, config):
    checkpoint = Checkpoint(write_checkpoint(tmp_path, config, block_tensors(config)))
    refused = []
    for part in [(), *((name,) for name, value in config.items() if isinstance(value, dict))]:
        for name in config[part[0]] if part else config:
            for value in VALUES:
                changed = {name: value}
                checkpoint.config = config | ({part[0]: config[part[0]] | changed} if part else changed)
                if not block.recognizes(checkpoint):
                    continue
                try:
                    block.convert(checkpoint, main)
                except (ModelError, ModelFileError) as error:
                    refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in line for line in refused)
