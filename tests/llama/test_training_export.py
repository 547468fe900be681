"""The file of a trained head, and what training takes from the main model's file."""

import gguf
import numpy as np
import pytest

from spec_local import bfloat16
from spec_local.errors import InvalidRequest, ModelError, ModelFileError
from spec_local.llama.gguf_tensors import floats, integers
from spec_local.llama.heads.choose import choose_head
from spec_local.llama.hidden_states import HiddenStates
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.system.files import sha256
from spec_local.training.head_file import export_head
from spec_local.training.head_shape import HeadShape, tensor_shapes
from spec_local.training.main_weights import read_feed_forward, read_main_weights
from tests.tiny_heads import N_EMBD, write_tiny_eagle, write_tiny_main

SHAPE = HeadShape(n_embd=N_EMBD, n_head=3, head_dim=16, n_ff=80, rope_base=5000.0, eps=1e-4)
LAYERS = (1, 2, 3)
DRAFTED = np.array([3, 7, 100, 101, 400])


@pytest.fixture(scope="module")
def main_path(tmp_path_factory):
    path = write_tiny_main(tmp_path_factory.mktemp("main") / "main.gguf")
    path.chmod(0o640)
    return path


def weights_of(shape=SHAPE):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in tensor_shapes(shape).items()}


def write(path, main_path, weights=None, **options):
    output = np.random.default_rng(1).normal(size=(len(DRAFTED), N_EMBD)).astype(np.float32)
    given = {"layers": LAYERS, "drafted": DRAFTED} | options
    return export_head(
        path, main_path, SHAPE, {"output.weight": output, **(weights or weights_of())}, **given
    )


def test_the_file_has_everything_that_a_head_needs(main_path, tmp_path):
    provenance = {"tokens": 2**33, "agreement": 0.625, "device": "cpu"}
    path = write(tmp_path / "new" / "head.gguf", main_path, provenance=provenance)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    assert tensors.keys() == {*tensor_shapes(SHAPE), "output.weight", "d2t"}
    kinds = {name: each.tensor_type.name for name, each in tensors.items()}
    matrices = {name for name, size in tensor_shapes(SHAPE).items() if len(size) == 2}
    # Rows of 48 or 80 values cannot be divided into blocks of 32.
    assert {n for n in matrices if kinds[n] == "F16"} == {"blk.0.attn_output.weight", "blk.0.ffn_down.weight"}
    assert {kinds[n] for n in matrices} == {"F16", "Q8_0"}
    assert (kinds["output.weight"], kinds["d2t"], kinds["output_norm.weight"]) == ("Q8_0", "I64", "F32")
    for name, values in weights_of().items():
        np.testing.assert_allclose(
            floats(path, name, values.shape[-1]).reshape(values.shape), values, atol=0.02
        )
    assert integers(path, "d2t").tolist() == DRAFTED.tolist()

    main, head = Model(main_path, weights=False), Model(path, weights=False)
    assert head.is_head
    assert head.n_ctx_train == main.n_ctx_train
    assert choose_head(main, head).hidden == HiddenStates(LAYERS)
    facts = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert facts["eagle3.rope.freq_base"] == 5000
    assert facts["eagle3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-4)
    assert facts["general.base_model.0.name"] == facts["specdec.main.name"] == main_path.stem
    assert facts["specdec.main.sha256"] == sha256(main_path)
    assert {key: facts[f"specdec.{key}"] for key in provenance} == provenance
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.iterdir()] == ["head.gguf"]


def test_a_failed_export_leaves_the_old_file(main_path, tmp_path):
    path = tmp_path / "head.gguf"
    path.write_text("old")
    good = weights_of()
    narrow = good | {"blk.0.ffn_up.weight": np.zeros((64, 64), np.float32)}
    less = {name: value for name, value in good.items() if name != "blk.0.attn_q.weight"}
    for weights, why in [(narrow, "ffn_up.*wrong shape"), (less, "attn_q.*not found")]:
        with pytest.raises(ModelFileError, match=why):
            write(path, main_path, weights)
    with pytest.raises(InvalidRequest, match="is the main model itself: give another name"):
        write(main_path, main_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/head.gguf cannot be written \(.*\): give another path$"):
        write(tmp_path / "file" / "head.gguf", main_path)
    assert path.read_text() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "head.gguf"]


def test_the_main_models_weights_are_read(main_path):
    main = Model(main_path, weights=False)
    found = read_main_weights(main, DRAFTED, at_a_time=100)
    tensors = {each.name: each.data for each in gguf.GGUFReader(main_path).tensors}
    assert np.array_equal(found.embeddings, bfloat16.encode(tensors["token_embd.weight"]))
    assert np.array_equal(found.output, tensors["output.weight"][DRAFTED])
    assert np.array_equal(found.norm, tensors["output_norm.weight"])
    last = max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    feed_forward = read_feed_forward(main)
    assert feed_forward
    for part in ("norm", "gate", "up", "down"):
        values = tensors[f"blk.{last}.ffn_{part}.weight"]
        assert np.array_equal(getattr(feed_forward, part), values)


@pytest.mark.parametrize(
    ("old", "new"),
    [("ffn_gate.weight", "ffn_gate_inp.weight"), ("attn_norm.weight", "post_ffw_norm.weight")],
)
def test_a_feed_forward_part_of_another_form_is_left_out(old, new, main_path, tmp_path):
    """Some models have experts instead of one gate, and others scale the result."""
    main = Model(main_path, weights=False)
    assert read_feed_forward(main)
    rename(main, tmp_path / "main.gguf", f"blk.{main.n_layers - 1}.{old}", f"blk.{main.n_layers - 1}.{new}")
    assert read_feed_forward(main) is None


def rename(model, target, old, new):
    """Let a model have a file in which one of its tensors has another name."""
    writer, names = gguf.GGUFWriter(target, "llama"), []
    for tensor in gguf.GGUFReader(model.path).tensors:
        names.append(tensor.name)
        name = new if tensor.name == old else tensor.name
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    assert old in names
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.path = target


def test_tied_and_quantized_weights_are_read(tmp_path):
    path = write_tiny_model(tmp_path / "main.gguf", tensor_type="Q8_0")
    main = Model(path, weights=False)
    found = read_main_weights(main, DRAFTED)
    np.testing.assert_array_equal(
        found.embeddings, bfloat16.encode(floats(path, "token_embd.weight", N_EMBD))
    )
    rename(main, tmp_path / "tied.gguf", "output.weight", "other.weight")
    tied = read_main_weights(main, DRAFTED)
    np.testing.assert_array_equal(tied.output, floats(path, "token_embd.weight", N_EMBD, DRAFTED))
    rename(main, tmp_path / "none.gguf", "output_norm.weight", "norm.weight")
    with pytest.raises(ModelError, match=r"no head can be trained for none.gguf \(.*output_norm.*give"):
        read_main_weights(main, DRAFTED)


def test_a_head_is_no_main_model(tmp_path):
    path = write_tiny_eagle(tmp_path / "head.gguf")
    with pytest.raises(ModelError, match=r"no head can be trained for head\.gguf"):
        read_main_weights(Model(path, weights=False), DRAFTED)
    with pytest.raises(ModelFileError, match="does not exist"):
        write(tmp_path / "a.gguf", tmp_path / "none.gguf")
