"""EAGLE-3 heads in safetensors: their GGUF files have the logits of PyTorch. In F32."""

import gguf
import numpy as np
import pytest

from spec_local import bfloat16
from spec_local.conversion import eagle
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.convert import convert_head
from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.model import Model
from spec_local.training.head_file import export_head
from spec_local.training.head_shape import HeadShape, tensor_shapes
from tests.checkpoints import write_checkpoint
from tests.llama.converted_eagles import agree_token_by_token, converted_pairs
from tests.tiny_heads import write_tiny_main
from tests.torch_eagle import tiny_eagles

pytestmark = pytest.mark.usefixtures("f32_caches")

HEADS = tiny_eagles()


@pytest.fixture(scope="module")
def main_path(folder):
    return write_tiny_main(folder / "conversion-main.gguf", n_layers=8)


@pytest.fixture(scope="module")
def embeddings(main_path):
    (found,) = (each for each in gguf.GGUFReader(main_path).tensors if each.name == "token_embd.weight")
    return np.array(found.data)


@pytest.fixture
def open_pair(main_path, tmp_path):
    with converted_pairs(main_path, tmp_path) as make:
        yield make


@pytest.mark.parametrize("layout", HEADS)
def test_logits_are_those_of_pytorch(open_pair, embeddings, layout):
    agree_token_by_token(open_pair(HEADS[layout]), HEADS[layout], embeddings)


def test_quantized_matrices_and_bfloat16(open_pair):
    """The types of the file; what is written in F32 stays exact."""
    head, tensors = HEADS["SpecForge"], {}
    for kind in ("Q8_0", "BF16"):
        pair = open_pair(head, kind, "BF16")
        reader = gguf.GGUFReader(pair.head.path)
        tensors[kind] = {tensor.name: tensor for tensor in reader.tensors}
        assert {tensor.tensor_type.name for tensor in reader.tensors} == {kind, "F32", "I64"}
    exact, quantized = (
        gguf.dequantize(each["fc.weight"].data, each["fc.weight"].tensor_type)
        for each in (tensors["BF16"], tensors["Q8_0"])
    )
    assert np.array_equal(exact, bfloat16.decode(bfloat16.encode(head.tensors["fc.weight"])))
    assert np.abs(quantized - exact).max() < 0.01 * np.abs(exact).max()
    norm = "blk.0.attn_norm.weight"
    assert np.array_equal(tensors["Q8_0"][norm].data, tensors["BF16"][norm].data)


def test_the_tokenizer_is_the_main_models(open_pair, main_path):
    def fields(path):
        found = {name: field for name, field in gguf.GGUFReader(path).fields.items() if "tokenizer." in name}
        return {name: (field.types, field.contents()) for name, field in found.items()}

    expected = fields(main_path)
    assert expected.pop("tokenizer.chat_template", None)
    assert fields(open_pair(HEADS["SpecForge"]).head.path) == expected


@pytest.fixture(scope="module")
def header(main_path):
    model = Model(main_path, weights=False)
    yield model
    model.close()


def convert(folder, header, head, config):
    """The converted head, with other settings; those with the value None are left out."""
    config = {key: value for key, value in (head.config | config).items() if value is not None}
    return eagle.convert(Checkpoint(write_checkpoint(folder, config, head.tensors)), header)


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("layout", "given", "expected"),
    [
        ("SafeAILab", None, [2, 4, 5]),
        ("SafeAILab", [2, 4, 5], [2, 4, 5]),
        ("SafeAILab", [1, 3, 4], [2, 4, 5]),
        ("SafeAILab", [1, 3, 6], [2, 4, 7]),
        ("SafeAILab", [3, 4, 6], [3, 4, 6]),
        ("speculators", [1, 3, 4], [2, 4, 5]),  # as in a head that was made elsewhere
        ("speculators", [1, 4, 6], [1, 4, 6]),
        ("speculators", None, [2, 4, 5]),
    ],
)
def test_layers_read(tmp_path, header, layout, given, expected):
    assert convert(tmp_path, header, HEADS[layout], {IDS: given}).fields["target_layers"] == expected


def test_a_copy_of_the_embeddings_is_left_out(tmp_path, header):
    """It can be larger than the rest of the file."""
    for grad, is_written in ((None, True), (True, True), (False, False)):
        found = convert(tmp_path, header, HEADS["speculators"], {"embed_requires_grad": grad})
        assert ("token_embd.weight" in found.tensors) == is_written


def test_the_folder_of_a_head_is_recognized(tmp_path):
    for head in HEADS.values():
        assert eagle.recognizes(Checkpoint(write_checkpoint(tmp_path, head.config, head.tensors)))
    assert not eagle.recognizes(
        Checkpoint(write_checkpoint(tmp_path, {}, {"fc.weight": np.ones((2, 2), np.float32)}))
    )


ONES = np.ones(64, np.float32)
DISTANCES = HEADS["SafeAILab"].tensors["d2t"]
SETTINGS = [
    ({"hidden_act": "gelu"}, "`hidden_act` cannot be converted .input should be 'silu'"),
    ({"eagle_config": {"parallel_draft_step": 4}}, "`parallel_draft_step` cannot"),
    ({"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "`use_sliding_window` cannot"),
    ({IDS: [2, 4]}, f"`{IDS}` cannot be converted .list should have at least 3"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "`rope_scaling.rope_type` cannot"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "`factor` cannot"),
    ({"rope_scaling": 3}, "`rope_scaling` cannot be converted .it is not an object"),
    ({"partial_rotary_factor": 0.5}, "it rotates 8 of 16 dimensions, which llama.cpp does not support"),
    ({"num_attention_heads": "many"}, "`num_attention_heads` cannot"),
    ({"num_attention_heads": 0}, "`num_attention_heads` cannot"),
]
UNSUPPORTED = [
    ({IDS: [2, 4, 8]}, {}, "that reads the last layer of"),
    ({}, {"midlayer.self_attn.q_norm.weight": ONES}, "a tensor midlayer.self_attn.q_norm.weight"),
    ({}, {"midlayer.self_attn.q_proj.bias": ONES}, "a tensor midlayer.self_attn.q_proj.bias"),
    ({}, {"midlayer.self_attn.gate_proj.weight": ONES}, "a tensor midlayer.self_attn.gate_proj.weight"),
]
MISFITS = [
    ({"vocab_size": 900}, {}, "900 tokens against 823"),
    ({}, {"fc.weight": np.ones((64, 3 * 128), np.float32)}, "hidden states of width 128 against 64"),
    ({}, {"fc.weight": np.ones((64, 4 * 64), np.float32)}, "it does not read 3 layers"),
    ({IDS: [3, 3, 4]}, {}, "it reads a layer twice"),
    ({IDS: [2, 4, 9]}, {}, "it reads layers up to 8, but there are only 8"),
    ({IDS: [0, 4, 5]}, {}, "it reads the token embeddings"),
    ({}, {"embed_tokens.weight": np.ones((900, 64), np.float32)}, "embed_tokens.weight has the shape"),
    ({}, {"d2t": None}, r"lm_head.weight has the shape \[300, 64\] instead of \[823, 64\]"),
]
DAMAGED = [
    ({"num_key_value_heads": 3}, {}, "4 and 3 attention heads"),
    ({"head_dim": 32}, {}, r"q_proj.weight has the shape \[64, 128\] instead of \[128, 128\]"),
    ({"norm_before_fc": True}, {}, "it has no tensor input_norm.weight"),
    ({"fc_norm": True}, {}, "it has no tensor fc_norm.0.weight"),
    ({}, {"lm_head.weight": None}, "it has no tensor lm_head.weight"),
    ({}, {"midlayer.mlp.up_proj.weight": None}, "it has no tensor layer.mlp.up_proj.weight"),
    ({}, {"norm.weight": np.ones((2, 2, 2), np.float32)}, r"norm.weight has the shape \[2, 2, 2\]"),
    ({}, {"d2t": DISTANCES + 600}, "d2t does not list different tokens"),
    ({}, {"d2t": DISTANCES - 900}, "d2t does not list different tokens"),
    ({}, {"d2t": -np.arange(300)}, "d2t does not list different tokens"),
    ({}, {"d2t": DISTANCES.astype(np.float32)}, "d2t does not list different tokens"),
    ({}, {"d2t": DISTANCES[:0]}, r"d2t has the shape \[0\]"),
]


@pytest.mark.parametrize(
    ("config", "tensors", "why", "kind"),
    [
        *((config, {}, why, (ModelError, ModelFileError)) for config, why in SETTINGS),
        *((*case, ModelError) for case in (*UNSUPPORTED, *MISFITS)),
        *((*case, ModelFileError) for case in DAMAGED),
    ],
)
def test_what_is_refused(tmp_path, main_path, config, tensors, why, kind):
    """In one line that names the folder, and without a file."""
    head, folder = HEADS["SafeAILab"], tmp_path / "folder"
    config = head.config | config
    tensors = {key: value for key, value in (head.tensors | tensors).items() if value is not None}
    with pytest.raises(kind, match=why) as caught:
        convert_head(write_checkpoint(folder, config, tensors), main_path, tmp_path / "head.gguf")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_values_that_are_not_numbers(tmp_path, main_path):
    head, folder = HEADS["SafeAILab"], tmp_path / "folder"
    broken = head.tensors["fc.weight"].copy()
    broken[3, 3] = np.nan
    write_checkpoint(folder, head.config, head.tensors | {"fc.weight": broken})
    with pytest.raises(ModelFileError, match=r"fc\.weight has values that are not finite: download"):
        convert_head(folder, main_path, tmp_path / "head.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_name_that_is_not_unicode(tmp_path, main_path):
    """That of a folder on Linux can be any bytes."""
    folder = write_checkpoint(tmp_path / "folder", HEADS["SafeAILab"].config, HEADS["SafeAILab"].tensors)
    path = convert_head(folder, main_path, tmp_path / "head.gguf", name="a\udcff")
    assert gguf.GGUFReader(path).fields["general.name"].contents() == "a?"


def test_speculators_must_state_what_has_several_defaults(tmp_path, header):
    with pytest.raises(ModelFileError, match="has no norm_before_residual"):
        convert(tmp_path, header, HEADS["speculators"], {"norm_before_residual": None})


def test_other_folders(tmp_path, main_path):
    folder = write_checkpoint(tmp_path / "x", {"architectures": ["LlamaForCausalLM"]}, {"a": ONES})
    with pytest.raises(ModelError, match=r"x has no layout that can be converted .architectures: .'LlamaFor"):
        convert_head(folder, main_path, tmp_path / "head.gguf")


def test_a_head_of_draft_train_comes_back(tmp_path, main_path):
    """Exported in SafeAILab's layout and converted, it has the same tensors and fields: the same drafts."""
    rng, shape = (
        np.random.default_rng(0),
        HeadShape(64, n_head=3, head_dim=16, n_ff=80, rope_base=5e3, eps=1e-4),
    )
    weights = {name: rng.normal(size=size).astype(np.float32) for name, size in tensor_shapes(shape).items()}
    drafted, output = np.array([3, 7, 100, 101, 400]), rng.normal(size=(5, 64)).astype(np.float32)
    trained = tmp_path / "trained.gguf"
    weights["output.weight"] = output
    export_head(trained, main_path, shape, weights, layers=(1, 3, 6), drafted=drafted)
    folder = write_safeailab(tmp_path / "folder", gguf.GGUFReader(trained))
    again = gguf.GGUFReader(convert_head(folder, main_path, tmp_path / "again.gguf"))
    before = {each.name: each for each in gguf.GGUFReader(trained).tensors}
    assert sorted(each.name for each in again.tensors) == sorted(before)
    for each in again.tensors:
        assert each.tensor_type == before[each.name].tensor_type
        assert np.array_equal(each.data, before[each.name].data), each.name
    fields = gguf.GGUFReader(trained).fields
    names = [name for name in fields if name.startswith("eagle3.")]
    assert {name: again.fields[name].contents() for name in names} == {
        name: fields[name].contents() for name in names
    }


def write_safeailab(folder, reader):
    """Export a head's GGUF file: names, rotation and draft tokens as in SafeAILab's checkpoints."""
    names = {
        "attn_norm": "input_layernorm",
        "attn_norm_2": "hidden_norm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    }
    names = {f"blk.0.{ours}.weight": f"midlayer.{theirs}.weight" for ours, theirs in names.items()} | {
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "enc.output_norm.weight": "input_norm.weight",
        "fc.weight": "fc.weight",
    }
    field = {name.removeprefix("eagle3."): each.contents() for name, each in reader.fields.items()}
    n_heads, tensors = field["attention.head_count"], {}
    for each in reader.tensors:
        if each.name == "d2t":
            tensors["d2t"] = np.array(each.data) - np.arange(len(each.data))
            continue
        values = gguf.dequantize(each.data, each.tensor_type)
        if each.name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            pairs = values.reshape(n_heads, -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        tensors[names[each.name]] = values
    config = {
        "hidden_size": field["embedding_length"],
        "num_attention_heads": n_heads,
        "rms_norm_eps": round(field["attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": field["rope.freq_base"],
        "max_position_embeddings": field["context_length"],
        "vocab_size": field["vocab_size"],
        IDS: field["target_layers"],
    }
    return write_checkpoint(folder, config, tensors)
