"""Tensors of GGUF files, read without loading the model."""

import gguf
import numpy as np
import pytest

from spec_local.llama.gguf_tensors import has_tensor, integers
from spec_local.llama.model import Model
from tests.tiny_heads import write_tiny_eagle


def test_tensors_of_a_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "ä model.gguf", "llama")
    writer.add_tensor("first", np.arange(7, dtype=np.float32))
    writer.add_tensor("ids", np.array([5, 3, 2**40], np.int64))
    writer.add_tensor("last", np.arange(9, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = tmp_path / "ä model.gguf"
    assert integers(path, "ids").tolist() == [5, 3, 2**40]
    assert integers(path, "last").tolist() == list(range(9))
    assert integers(path, "first") is None
    assert integers(path, "other") is None
    assert has_tensor(path, "first")
    assert not has_tensor(path, "firs")


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(OSError, match="cannot be read"):
        has_tensor(tmp_path / "none.gguf", "first")


@pytest.mark.parametrize("n", [100, None])
def test_tokens_that_a_head_can_draft(tmp_path, n):
    model = Model(write_tiny_eagle(tmp_path / "head.gguf", n_draft_vocab=n))
    if n:
        assert len(model.draft_tokens) == n
        assert (np.diff(model.draft_tokens) > 0).all()
    else:
        assert model.draft_tokens is None
    model.close()
