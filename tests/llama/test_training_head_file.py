"""Reading a trained head to train it further: what is refused, and why."""

import gguf
import numpy as np
import pytest

from spec_local.errors import ModelError, ModelFileError
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.training.head_file import export_head, read_head
from spec_local.training.head_shape import head_shape, layers_read, tensor_shapes
from tests.tiny_heads import N_EMBD, write_tiny_eagle, write_tiny_main

DRAFTED = np.array([3, 7, 100, 101, 400])
SHAPE = head_shape(N_EMBD)


@pytest.fixture(scope="module")
def main_path(tmp_path_factory):
    return write_tiny_main(tmp_path_factory.mktemp("main") / "main.gguf")


@pytest.fixture(scope="module")
def main(main_path):
    return Model(main_path, weights=False)


def weights():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in tensor_shapes(SHAPE).items()}


def write(path, main_path, changes=None, layers=None):
    output = np.random.default_rng(1).normal(size=(len(DRAFTED), N_EMBD)).astype(np.float32)
    layers = layers or layers_read(5)
    written = weights() | {"output.weight": output} | (changes or {})
    return export_head(path, main_path, SHAPE, written, layers=layers, drafted=DRAFTED)


def test_what_was_written_is_read(main, main_path, tmp_path):
    found = read_head(write(tmp_path / "head.gguf", main_path), main)
    assert found.drafted.tolist() == DRAFTED.tolist()
    assert found.weights.keys() == weights().keys()
    for name, values in weights().items():
        assert found.weights[name].shape == values.shape
        np.testing.assert_allclose(found.weights[name], values, atol=0.02)


def refused(path, main, why):
    with pytest.raises(ModelError, match=why) as error:
        read_head(path, main)
    assert "\n" not in str(error.value)


def test_other_files_are_refused(main, main_path, tmp_path):
    refused(main_path, main, "is not a head that specdec has trained: give a head that")
    refused(write_tiny_eagle(tmp_path / "eagle.gguf"), main, "is not a head that specdec has trained")
    refused(tmp_path / "none.gguf", main, "cannot be continued")
    (tmp_path / "nonsense.gguf").write_bytes(b"GGUF" + bytes(100))
    refused(tmp_path / "nonsense.gguf", main, "cannot be continued")


def test_heads_of_other_main_models_are_refused(main, main_path, tmp_path):
    other = write_tiny_model(tmp_path / "other.gguf", n_layers=5)
    refused(write(tmp_path / "a.gguf", other), main, "was made for tiny-llama-0, not for main")
    refused(write(tmp_path / "b.gguf", main_path, layers=(0, 1, 2)), main, "was made for main, not for main")


def test_damaged_heads_are_refused(main, main_path, tmp_path):
    path = write(tmp_path / "head.gguf", main_path)
    content = path.read_bytes()
    for n in (len(content) // 2, len(content) - 1000, 200):
        (tmp_path / "short.gguf").write_bytes(content[:n])
        refused(tmp_path / "short.gguf", main, "is damaged|cannot be continued")
    bad = np.full((SHAPE.n_embd,), np.nan, np.float32)
    with pytest.raises(ModelFileError, match=r"output_norm.weight has values that are not finite"):
        write(tmp_path / "nan.gguf", main_path, {"output_norm.weight": bad})
    starts = {each.name: each.data_offset for each in gguf.GGUFReader(path).tensors}
    at = starts["output_norm.weight"]
    (tmp_path / "nan.gguf").write_bytes(content[:at] + bad.tobytes() + content[at + bad.nbytes :])
    refused(tmp_path / "nan.gguf", main, "values that are not finite")
    start = starts["blk.0.ffn_up.weight"]
    (tmp_path / "cut.gguf").write_bytes(content[:start])
    refused(tmp_path / "cut.gguf", main, "is damaged|cannot be continued")
