"""Rejected tokens leave no trace beyond a sliding window: see benchmarks/rollback.py.

Everything is in F32, and the attention does not round to F16, so that the noise is small. What is left comes
from llama.cpp's F16 table of the activation function.
"""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from spec_local.llama.model import Model
from spec_local.llama.tiny import SLIDING_WINDOW, write_tiny_model

NOISE = 0.005  # at most 0.0006


@pytest.fixture
def rollback(f32_caches, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import rollback

    yield rollback
    for name in ("rollback", "common"):
        sys.modules.pop(name, None)


def test_rejected_tokens_do_not_change_later_logits(rollback, folder):
    path = write_tiny_model(folder / "gemma3-f32.gguf", architecture="gemma3", tensor_type="F32")
    text = random.Random(0).choices(range(5, 500), k=12 * SLIDING_WINDOW)
    first = 8 * SLIDING_WINDOW + 1
    found = rollback.measure(Model(path), text, first, rounds=60, flash_attention=False, threads=1)
    assert max(found.pop("noise")) < NOISE
    for shape in ("chain", "tree"):
        differences = found.pop(f"difference, {shape}s")
        assert len(differences) > 100
        assert max(differences) < NOISE
    assert len(found) == 3
    for distance, differences in found.items():  # a wrong token would be noticed
        assert np.median(differences) > 20 * NOISE, distance
