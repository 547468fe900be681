"""Checking pairs of GGUF files of any size, with their measured costs."""

import os
import subprocess
import sys

import gguf
import numpy as np
import psutil
import pytest

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.errors import ModelFileError
from spec_local.llama import tiny
from spec_local.llama.devices import OFFLOADED, ON_CPU
from spec_local.llama.headers import open_header
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantized_size
from spec_local.llama.tiny import write_tiny_model
from spec_local.models import pairs
from spec_local.policies.cost_model import CostModel


@pytest.fixture(scope="module")
def huge_path(folder):
    """A model of more than 100 GB, as a sparse file."""
    path, n_embd, n_layers = folder / "huge.gguf", 8192, 400
    tokens, scores, types = tiny.vocabulary(())
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in [
        (writer.add_context_length, 8192),
        (writer.add_embedding_length, n_embd),
        (writer.add_block_count, n_layers),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_feed_forward_length, 2 * n_embd),
        (writer.add_head_count, n_embd // 32),
        (writer.add_head_count_kv, n_embd // 64),
        (writer.add_rope_dimension_count, 32),
    ]:
        add(value)
    tiny.add_tokenizer(writer, tokens, scores, types, space_prefix=False)
    size = 0
    for name, shape, _ in tiny.llama_tensors(len(tokens), n_embd, n_layers):
        kind = np.dtype(np.float32 if "norm" in name else np.float16)
        n_bytes = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(name, shape, kind, n_bytes)
        size += n_bytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + size + 64)
    return path, size


def test_a_header_agrees_with_the_loaded_model(tiny_path, tiny_model, window_path, window_model):
    for path, model in ((tiny_path, tiny_model), (window_path, window_model)):
        header = open_header(path)
        for what in ("size", "n_ctx_train", "description", "is_recurrent", "has_window", "chat_template"):
            assert getattr(header, what) == getattr(model, what), what
        assert header.kv_bytes(100) == model.kv_bytes(100) > 0
        ours, theirs = header.vocabulary, model.vocabulary
        assert [ours.text(t) for t in range(ours.n_tokens)] == [
            theirs.text(t) for t in range(theirs.n_tokens)
        ]
        assert ours.tokenize("the one") == theirs.tokenize("the one")
        header.close()


def test_weights_are_not_loaded(huge_path):
    path, size = huge_path
    assert size > 100 << 30
    before = psutil.Process().memory_info().rss
    model = Model(path, weights=False)
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert model.size == size
    model.close()


def test_the_size_of_a_copy_needs_no_weights(huge_path):
    path, size = huge_path
    assert quantized_size(path, "Q4_0") == pytest.approx(size * 4.5 / 16, rel=0.01)


def test_a_header_that_crashes_llama_cpp(tmp_path):
    path = write_tiny_model(tmp_path / "deadly.gguf", n_layers=0)
    with pytest.raises(ModelFileError, match=r"crashes llama.cpp \(SIG[A-Z]+\)"):
        open_header(path)


def test_a_header_that_cannot_be_read(tmp_path, tiny_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_path.read_bytes()[:5000])
    with pytest.raises(ModelFileError, match="cannot be loaded"):
        open_header(cut)
    with pytest.raises(ModelFileError, match="does not exist"):
        open_header(tmp_path / "absent.gguf")


def test_a_child_ends_with_its_parent_and_deletes_its_partial_file(tmp_path):
    partial = tmp_path / "half"
    partial.touch()
    script = (
        "import sys, time; from pathlib import Path; from spec_local.system.child_process import child_main\n"
        "child_main(lambda: time.sleep(60) or {}, partial=Path(sys.argv[1]))"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(partial)], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.stdin.close()
    assert child.wait(10) == 1
    assert not partial.exists()


@pytest.mark.usefixtures("unchecked_headers")
def test_a_pair(tiny_path, tiny_draft_path, tiny_model, tiny_draft, own_cache):
    report = pairs.check(tiny_path, tiny_draft_path, n_ctx=512)
    assert report.vocabulary_match.verdict == "same"
    assert (report.main.path, report.draft.path) == (tiny_path, tiny_draft_path)
    assert (report.main.n_ctx, report.main.size) == (512, tiny_model.size)
    assert report.memory.weights == tiny_model.size + tiny_draft.size
    assert report.memory.caches == tiny_model.kv_bytes(512) + tiny_draft.kv_bytes(512)
    assert report.memory.suffices
    assert not report.expectation.is_measured
    small = pairs.check(tiny_path, tiny_draft_path, n_ctx=512, cache_type="q8_0").memory
    assert small.caches == pytest.approx(report.memory.caches * 17 / 32, rel=0.001)
    assert pairs.check(tiny_path, tiny_draft_path, n_ctx=1 << 20).main.n_ctx == tiny_model.n_ctx_train


@pytest.mark.usefixtures("unchecked_headers")
def test_a_sliding_window_is_reported(tiny_path, window_path):
    report = pairs.check(tiny_path, window_path)
    assert (report.main.has_window, report.draft.has_window) == (False, True)


@pytest.mark.usefixtures("unchecked_headers")
def test_too_little_memory(huge_path, tiny_path):
    report = pairs.check(huge_path[0], tiny_path)
    assert not report.memory.suffices
    assert report.memory.weights > huge_path[1]


@pytest.mark.usefixtures("unchecked_headers")
def test_recurrent_models_make_a_pair(tiny_path, recurrent_path):
    for pair in ((tiny_path, recurrent_path), (recurrent_path, tiny_path)):
        assert pairs.check(*pair).vocabulary_match.verdict == "same"


@pytest.mark.usefixtures("unchecked_headers")
def test_measured_costs_give_expected_speedups(
    tiny_path, tiny_draft_path, tiny_model, tiny_draft, make_context, own_cache
):
    settings = {"n_ctx": 256, "threads": 1}
    expensive, cheap = CostModel({1: 1.0, 64: 1.2}), CostModel({1: 0.05})

    def save_costs(model, table, others=0.0):  # with the batch of a session and the logits of a draft model
        context = make_context(model, **settings, max_tokens=96, max_logits=1)
        cost_store.save(context, table, others=others)

    save_costs(tiny_model, expensive)
    one_of_two = pairs.check(tiny_path, tiny_draft_path, **settings)
    assert not one_of_two.expectation.is_measured
    save_costs(tiny_draft, cheap)
    report = pairs.check(tiny_path, tiny_draft_path, **settings)
    assert report.expectation.is_measured
    known = report.expectation.speedups
    assert known == pairs.expected_speedups(expensive, cheap, pairs.ACCEPTANCE_RATES)
    assert known[-1].speedup > 3
    assert report.others == 0.0
    for other in ({"threads": 2}, {"n_ctx": 128}, {"offload": ON_CPU}, {"cache_type": "q8_0"}):
        changed = pairs.check(tiny_path, tiny_draft_path, **settings | other)
        assert not changed.expectation.is_measured, other
    save_costs(tiny_draft, cheap, 64.0)  # other programs were busy
    rough = pairs.check(tiny_path, tiny_draft_path, **settings)
    assert (rough.others, rough.expectation.is_measured) == (64.0, False)
    assert rough.expectation == one_of_two.expectation


def test_gains_are_estimated_from_the_sizes(tiny_path, tiny_draft_path, own_cache):
    """The pair of the benchmarks, 0.5B in Q4_0 for 1.5B in Q4_K_M, has a share of 0.32."""
    conditions = [Conditions(path, ON_CPU, 1, 256) for path in (tiny_path, tiny_draft_path)]

    def gain(share):
        found = pairs.expectation(*conditions, share, [0.7])
        assert not found.is_measured
        assert not found.cannot_pay
        return found.speedups[0].speedup

    assert gain(0.32) == pytest.approx(1.7 / (1.2 + 0.32))
    assert gain(0.1) > 1.4
    assert gain(0.9) == 1.0
    assert pairs.expectation(*conditions, None, [0.7]) is None


def test_conditions_have_the_path_of_their_context(tiny_path, tiny_model, make_context):
    for n_ctx, branches in ((256, 1), (64, 1), (256, 8)):
        context = make_context(tiny_model, n_ctx=n_ctx, max_tokens=96, max_branches=branches)
        conditions = Conditions(tiny_path, OFFLOADED, 1, n_ctx, branching=branches > 1)
        assert cost_store.path_of(conditions) == cost_store.path_of(context)
    assert cost_store.path_of(Conditions(tiny_path, OFFLOADED, 2, 256)) != cost_store.path_of(
        Conditions(tiny_path, OFFLOADED, 1, 256)
    )
