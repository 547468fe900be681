"""Models with random weights in the shapes of known ones, which benchmarks write."""

import math
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spec_local.core.calls import run
from spec_local.llama.model import Model

BILLIONS = {
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "llama3.1-8b": 8.030,
    "llama3.2-1b": 1.236,
    "olmoe": 6.919,
    "qwen3-30b-a3b": 30.53,
    "gpt-oss-20b": 20.91,
}
"""Parameters, from the models' cards."""


@pytest.fixture(scope="module")
def shaped():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import shaped_models

        yield shaped_models
        for name in ("shaped_models", "common"):
            sys.modules.pop(name, None)


def test_every_shape_is_known(shaped):
    assert shaped.SHAPES.keys() == BILLIONS.keys()


@pytest.mark.parametrize("name", BILLIONS)
def test_shapes_have_the_published_number_of_parameters(shaped, name):
    shape = shaped.SHAPES[name]
    n = sum(math.prod(size) for _, size, _ in shaped._tensors(shape, shape.n_vocab))
    assert n / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)


@pytest.mark.parametrize("name", BILLIONS)
def test_a_small_model_of_each_kind_computes(shaped, make_context, tmp_path, name):
    shape = shaped.SHAPES[name]
    norm = {0: 0, shape.head: 64}.get(shape.head_norm, 256)
    small = replace(
        shape, layers=2, width=256, n_ff=256, n_heads=4, n_kv_heads=4, head=64, head_norm=norm, n_vocab=1000
    )
    with closing(Model(shaped.write(tmp_path / "m.gguf", small, "Q4_K_M"))) as model:
        row = make_context(model)
        assert row.limits.n_vocab == 1000
        logits = run(row.call([1, 300, 301], n_logits=1))
        assert np.isfinite(logits).all()
        assert logits.std() > 0.1
        row.close()


def test_types_are_mixed_as_in_published_files(shaped):
    """Half of the layers are better in Q4_K_M; the 0.5B's rows are too short for K-quants."""
    types = {}
    for name in ("qwen2.5-1.5b", "qwen2.5-0.5b"):
        shape = shaped.SHAPES[name]
        for tensor, size, _ in shaped._tensors(shape, shape.n_vocab):
            types[name, tensor] = shaped._type(tensor, size, "Q4_K_M", shape).name
    better = [i for i in range(28) if types["qwen2.5-1.5b", f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert better == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert types["qwen2.5-1.5b", "token_embd.weight"] == "Q6_K"
    assert types["qwen2.5-1.5b", "blk.3.attn_q.weight"] == "Q4_K"
    assert types["qwen2.5-0.5b", "token_embd.weight"] == "Q8_0"
    assert types["qwen2.5-0.5b", "blk.3.attn_q.weight"] == "Q5_0"
