"""Layers for multi-token prediction from safetensors: they become the GGUF file that they were taken from."""

import re

import gguf
import numpy as np
import pytest

from spec_local.conversion import mtp
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.conversion.writer import write_head
from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.model import Model
from spec_local.session import Session
from tests.checkpoints import write_checkpoint
from tests.llama.answers import drafts_of
from tests.tiny_mtp import write_tiny_mtp

N_LAYERS, WIDTH, N_HEADS, N_KEY = 3, 64, 2, 16  # of the tiny models; of keys, the part without a position
COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
OF_QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
OF_GLM = ("eh_proj", "enorm", "hnorm", "shared_head.norm")


def tensors_of(path):
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def published(path, *, is_qwen, packed=False):
    """The layer's tensors as they are published."""
    found, latent = {}, {}
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{N_LAYERS}."
    shared = "shared_expert" if is_qwen else "shared_experts"
    for full, values in tensors_of(path).items():
        if not (match := re.fullmatch(rf"blk\.{N_LAYERS}\.(.+)\.(weight|bias)", full)):
            continue
        name, ending = match.groups()
        if is_qwen and name.endswith("norm"):
            values = values - 1
        if name in ("attn_k_b", "attn_v_b"):
            latent[name] = values.transpose(0, 2, 1) if name == "attn_k_b" else values
        elif experts := re.fullmatch(r"ffn_(\w+)_exps", name):
            if packed:
                found[f"{prefix}mlp.experts.{experts[1]}_proj"] = values
            else:
                for i, matrix in enumerate(values):
                    found[f"{prefix}mlp.experts.{i}.{experts[1]}_proj.weight"] = matrix
        elif of_all := re.fullmatch(r"ffn_(gate|up|down)_shexp", name):
            found[f"{prefix}mlp.{shared}.{of_all[1]}_proj.weight"] = values
        elif name == "exp_probs_b":
            found[f"{prefix}mlp.gate.e_score_correction_bias"] = values
        elif name.startswith("nextn."):
            number = NEXTN.index(name.removeprefix("nextn."))
            found[f"mtp.{OF_QWEN[number]}.weight" if is_qwen else f"{prefix}{OF_GLM[number]}.weight"] = values
        else:
            plain = f"{prefix}{COMMON[name]}.{ending}"
            found[plain] = values[None] if name == "ffn_gate_inp_shexp" else values
    if latent:
        both = np.concatenate([latent["attn_k_b"], latent["attn_v_b"]], axis=1)
        found[f"{prefix}self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    if packed:
        base = f"{prefix}mlp.experts."
        parts = [found.pop(f"{base}{part}_proj") for part in ("gate", "up")]
        found[f"{base}gate_up_proj"] = np.concatenate(parts, axis=1)
    return found


CONFIG = {"num_hidden_layers": N_LAYERS, "hidden_size": WIDTH}


@pytest.fixture
def files(folder, tmp_path):
    """A function that writes the main model, its layer as llama.cpp reads it, and the layer as published."""

    def write(architecture, **options):
        is_qwen = architecture.startswith("qwen")
        main, alone = (folder / f"converted-{architecture}-{kind}.gguf" for kind in ("main", "alone"))
        write_tiny_mtp(main, architecture, n_mtp=0, predictable=True)
        write_tiny_mtp(alone, architecture, n_mtp=1, predictable=True, alone=True)
        tensors = published(alone, is_qwen=is_qwen, **options)
        # The folder also has the main model's own layers.
        tensors["model.layers.0.input_layernorm.weight"] = np.ones(WIDTH, np.float32)
        config = {"text_config": CONFIG} if is_qwen else CONFIG
        return main, alone, write_checkpoint(tmp_path / architecture, config, tensors)

    return write


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen35", {}),
        *(("qwen35moe", {"packed": packed}) for packed in (False, True)),
        *(
            (architecture, {})
            for architecture in ("qwen3next", "glm4moe", "deepseek2", "deepseek32", "glm-dsa")
        ),
    ],
)
def test_the_file_is_the_one_the_layer_was_taken_from(files, folder, architecture, options):
    main, alone, published = files(architecture, **options)
    checkpoint, model = Checkpoint(published), Model(main, weights=False)
    assert mtp.recognizes(checkpoint)
    head = mtp.convert(checkpoint, model)
    path = write_head(folder / f"converted-{architecture}.gguf", head, model, "F32")
    model.close()
    found, expected = tensors_of(path), tensors_of(alone)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.allclose(found[name].reshape(values.shape), values, atol=1e-6), name
    headers = [gguf.GGUFReader(file).fields for file in (path, alone)]
    for name, field in headers[1].items():
        if name.startswith(f"{architecture}."):
            assert headers[0][name].contents() == pytest.approx(field.contents()), name


@pytest.mark.usefixtures("unchecked")
def test_a_converted_layer_drafts(files, folder):
    main, alone, published = files("glm4moe")
    model = Model(main, weights=False)
    path = write_head(folder / "drafts.gguf", mtp.convert(Checkpoint(published), model), model, "F32")
    model.close()
    found = []
    for head in (alone, path):
        with Session.open(main, head, n_ctx=256, threads=1) as session:
            found.append(drafts_of(session))
    assert found[0] == found[1]
    assert found[0][2] > 0


def without(names, *removed):
    return {name: values for name, values in names.items() if not any(part in name for part in removed)}


LAYER = f"model.layers.{N_LAYERS}."


@pytest.mark.parametrize(
    ("removed", "added", "why"),
    [
        (("eh_proj",), {}, "a layer without eh_proj"),
        ((LAYER,), {}, "no complete layers"),
        (("experts.1.up",), {}, "no complete experts"),
        ((), {"new.weight": (1,)}, "new.weight, which is not known"),
        ((), {"mlp.experts.0.up_proj.weight": (2, 2)}, "experts of different sizes"),
        ((), {"enorm.weight": ()}, "enorm.weight of one value"),
        ((), {f"mlp.experts.{'9' * 5000}.up_proj.weight": (2, 2)}, "of 2 dimensions"),
    ],
)
def test_damaged_folders(files, removed, added, why):
    main, alone, folder = files("glm4moe")
    tensors = without(published(alone, is_qwen=False), *removed)
    tensors |= {f"{LAYER}{name}": np.ones(shape, np.float32) for name, shape in added.items()}
    config = CONFIG | {"text_config": [1]}  # is ignored
    write_checkpoint(folder, config, tensors or {"none": np.ones(1, np.float32)})
    with pytest.raises(ModelFileError, match=why):
        mtp.convert(Checkpoint(folder), Model(main, weights=False))


def test_layers_that_do_not_fit(files, folder):
    *_, published = files("glm4moe")
    wide = write_tiny_mtp(folder / "converted-wide.gguf", "glm4moe", n_mtp=0, n_embd=128)
    with pytest.raises(ModelError, match=r"model than converted-wide.gguf .`hidden_size` 64 against 128"):
        mtp.convert(Checkpoint(published), Model(wide, weights=False))
    other = write_tiny_mtp(folder / "converted-other.gguf", "step35", n_mtp=0)
    with pytest.raises(ModelError, match="of step35 cannot be converted"):
        mtp.convert(Checkpoint(published), Model(other, weights=False))
