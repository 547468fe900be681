"""Tensors of GGUF files, read without loading the model."""

import gguf
import numpy as np
import pytest

from spec_local.llama.gguf_tensors import floats, has_tensor, integers, numbers, parts
from spec_local.llama.tiny import finish


def test_tensors_of_a_file(tmp_path):
    path = tmp_path / "ä model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.arange(7, dtype=np.float32))
    writer.add_tensor("ids", np.array([5, 3, 2**40], np.int64))
    writer.add_tensor("last", np.arange(9, dtype=np.int64))
    finish(writer, path)
    assert integers(path, "ids").tolist() == [5, 3, 2**40]
    assert integers(path, "last").tolist() == list(range(9))
    assert integers(path, "first") is None
    assert integers(path, "other") is None
    assert has_tensor(path, "first")
    assert not has_tensor(path, "firs")


def test_floats_of_a_file(tmp_path):
    path, kinds = tmp_path / "model.gguf", gguf.GGMLQuantizationType
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("F32", "F16", "BF16", "Q8_0"):
        writer.add_tensor(kind, gguf.quants.quantize(values, kinds[kind]), raw_dtype=kinds[kind])
    writer.add_tensor("Q4_K", np.zeros((1, 144), np.uint8), raw_dtype=kinds.Q4_K)
    finish(writer, path)
    for kind, error in (("F32", 0), ("F16", 0.002), ("BF16", 0.02), ("Q8_0", 0.02)):
        found = floats(path, kind, 64)
        assert (found.dtype, found.flags.c_contiguous) == (np.float32, True)
        np.testing.assert_allclose(found, values, atol=error)
        assert np.array_equal(floats(path, kind, 64, np.array([3, 0, 3])), found[[3, 0, 3]])
    assert not floats(path, "Q4_K", 256).any()
    with pytest.raises(KeyError, match="other"):
        floats(path, "other", 64)
    for kind, width in (("F32", 48), ("Q8_0", 48), ("Q4_K", 64)):
        with pytest.raises(ValueError, match=f"{kind} does not have {width} columns"):
            floats(path, kind, width)


def test_numbers_of_a_file(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("wide", [True, False, True])
    writer.add_array("sizes", [5, 6, 7])
    writer.add_uint32("size", 9)
    writer.add_float32("scale", 1.5)
    writer.add_array("names", ["a", "b"])
    finish(writer, path)
    assert numbers(path, "wide", 3) == [1, 0, 1]
    assert numbers(path, "sizes", 2) == [5, 6]
    assert numbers(path, "size", 3) == [9, 9, 9]
    for key, n in (("sizes", 4), ("scale", 1), ("names", 1), ("other", 1)):
        assert numbers(path, key, n) is None


def test_parts_of_a_model(tmp_path):
    names = ["a[1]-00001-of-00002.gguf", "a[1]-00002-of-00002.gguf", "a[1]-00001-of-00003.gguf", "a[1].gguf"]
    for name in names:
        (tmp_path / name).touch()
    assert parts(tmp_path / names[0]) == [tmp_path / name for name in names[:2]]
    assert parts(tmp_path / names[3]) == [tmp_path / names[3]]


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(OSError, match="cannot be read"):
        has_tensor(tmp_path / "none.gguf", "first")
