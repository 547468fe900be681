"""Folders of safetensors, whole and damaged."""

import json

import numpy as np
import pytest

from spec_local import bfloat16
from spec_local.conversion.checkpoint import Checkpoint
from spec_local.errors import ModelFileError
from tests.checkpoints import safetensors, write_checkpoint

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) / 7


def test_values_of_each_type(tmp_path):
    tensors = {
        "f32": VALUES,
        "f16": VALUES.astype(np.float16),
        "bf16": bfloat16.encode(VALUES),
        "i64": np.array([1 << 40, -5]),
        "bool": np.array([True, False]),
        "empty": np.empty((0, 3), np.float32),
    }
    found = Checkpoint(write_checkpoint(tmp_path, {"a": 1}, tensors))
    assert found.config == {"a": 1}
    assert sorted(found.names) == sorted(tensors)
    assert found.shape("bf16") == (3, 4)
    assert "f32" in found
    assert "other" not in found
    for name, atol in (("f32", 0), ("f16", 1e-3), ("bf16", 1e-2)):
        values = found.tensor(name)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, VALUES, atol=atol)
    assert found.tensor("i64").tolist() == [1 << 40, -5]
    assert found.tensor("bool").tolist() == [1, 0]
    assert found.tensor("empty").shape == (0, 3)


def with_header(header, data=b"\0" * 48):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(3, 4), start=0, end=48):
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}}


DAMAGED = {
    "empty": b"",
    "cut in the length": b"\1\0",
    "cut in the header": safetensors({"t": VALUES})[:40],
    "cut in the data": safetensors({"t": VALUES})[:-1],
    "a header without end": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": with_header(b"\xff" * 20),
    "a list": with_header([1]),
    "nested too deeply": with_header(b"[" * 100_000),
    "no entry": with_header({"t": 3}),
    "beyond the end": with_header(entry(end=52, shape=(13,))),
    "before the start": with_header(entry(start=-48, end=0)),
    "backwards": with_header(entry(start=48, end=0)),
    "of another size": with_header(entry(end=44)),
    "negative": with_header(entry(shape=(-3, -4))),
    "huge": with_header(entry(shape=(1 << 62, 1 << 62))),
    "a fraction": with_header(entry(shape=(1.5, 8))),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(tmp_path, case):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[case])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged: download it again$"):
        Checkpoint(tmp_path)


def test_what_cannot_be_read(tmp_path):
    def refusal(why):
        with pytest.raises(ModelFileError, match=why):
            Checkpoint(tmp_path)

    refusal(r"config\.json does not exist: give the folder of a head")
    for text in (b"{", b"[]", b"\xff"):
        (tmp_path / "config.json").write_bytes(text)
        refusal(r"config\.json is damaged: download it again")
    (tmp_path / "config.json").write_bytes(b" " * (1 << 21))
    refusal(r"config\.json cannot be read \(File too large\): check it")
    (tmp_path / "config.json").write_text("{}")
    refusal("give the folder of a head")
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header(entry("F8_E4M3", end=12)))
    refusal("t has the type F8_E4M3, which cannot be converted: give a head in BF16, F16 or F32")
    path.write_bytes(safetensors({"t": VALUES}))
    (tmp_path / "more.safetensors").write_bytes(safetensors({"t": VALUES}))
    refusal("contains the tensor t twice: download it again")
    path.unlink()
    with pytest.raises(ModelFileError, match="has no tensor u: download it again"):
        Checkpoint(tmp_path).tensor("u")
