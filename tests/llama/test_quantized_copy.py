"""Quantized copies: expected size and speed-up, refusals, and cleaning up after failures."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import gguf
import pytest

from spec_local.calibration import cost_store
from spec_local.calibration.cost_store import Conditions
from spec_local.errors import BackendError, InvalidRequest, ModelError, ModelFileError, SpecLocalError
from spec_local.llama.devices import OFFLOADED
from spec_local.llama.model import Model
from spec_local.llama.quantize import KINDS, quantize, quantize_into, quantized_size
from spec_local.llama.tiny import write_tiny_model
from spec_local.models import quantized_copy
from spec_local.policies.cost_model import CostModel
from spec_local.system.child_process import ChildResult, run_child


@pytest.fixture(scope="module")
def main(tmp_path_factory):
    """Wide enough for K-quants, and large enough for measurable sizes."""
    return write_tiny_model(tmp_path_factory.mktemp("self") / "main.gguf", n_embd=256, n_layers=4)


@pytest.fixture
def in_process(unchecked_headers, monkeypatch):
    """Quantize in this process: a child takes a second to start."""

    def run_child(module, source, kind, target=None, threads=None, deadline=None):
        if target:
            quantize_into(Path(source), Path(target), kind, threads=int(threads))
        return ChildResult(None, None, {} if target else {"size": quantized_size(Path(source), kind)})

    monkeypatch.setattr(quantized_copy, "run_child", run_child)


def best_speedup(costs, step):
    """At an acceptance rate of 0.9, with the best number of draft tokens, of which each costs one step."""
    return max(
        sum(0.9**i for i in range(k + 1)) / (CostModel(costs).seconds(k + 1) + k * step) for k in range(17)
    )


def files(path):
    return sorted(p.name for p in path.iterdir())


def test_a_copy_has_the_expected_size(main, tmp_path, own_cache):
    copy = quantized_copy.plan(main, "Q4_0", tmp_path / "copies" / "copy.gguf")
    assert not copy.expectation.is_measured
    assert not copy.expectation.cannot_pay
    assert files(tmp_path) == []
    path = quantized_copy.make(copy, threads=1)
    assert path == tmp_path / "copies" / "copy.gguf"
    assert path.stat().st_size == pytest.approx(copy.size, abs=8000)
    assert copy.size_ratio == pytest.approx(path.stat().st_size / main.stat().st_size, rel=0.01)
    assert 0.2 < copy.size_ratio < 0.4
    assert files(path.parent) == ["copy.gguf"]
    assert path.stat().st_mode == main.stat().st_mode
    ours, theirs = Model(main), Model(path)
    assert ours.vocabulary.tokenize("the one") == theirs.vocabulary.tokenize("the one")


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_sizes_are_computed_without_quantizing(main, tmp_path, kind):
    """The output tensor has the bits of the rest: by default, llama.cpp uses more for it, also in Q4_0."""
    path = quantize(main, tmp_path / "copy.gguf", kind, threads=1)
    assert Model(path, weights=False).size == pytest.approx(quantized_size(main, kind), abs=6000)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    if "_K" in kind:
        assert kinds["output.weight"] == "Q6_K"
    else:
        assert set(kinds.values()) == {kind, "F32"}  # the norms


@pytest.mark.usefixtures("in_process")
def test_the_copy_is_beside_the_main_model(main):
    assert quantized_copy.plan(main, "Q2_K").target == main.parent / "main-Q2_K.gguf"
    part = main.with_name("large-00001-of-00003.gguf")
    part.symlink_to(main)
    assert quantized_copy.plan(part, "Q2_K").target == main.parent / "large-Q2_K.gguf"


@pytest.mark.usefixtures("in_process")
def test_no_copy_is_written_beside_the_files_of_ollama(main, tmp_path):
    blob = tmp_path / "blobs" / f"sha256-{'a' * 64}"
    blob.parent.mkdir()
    blob.hardlink_to(main)
    with pytest.raises(InvalidRequest, match="belongs to ollama: give the copy another place with `target`"):
        quantized_copy.plan(blob, "Q4_0")
    assert quantized_copy.plan(blob, "Q4_0", tmp_path / "copy.gguf").target == tmp_path / "copy.gguf"


@pytest.mark.usefixtures("in_process")
def test_a_source_that_is_small_already(main, tmp_path):
    small = quantize(main, tmp_path / "small.gguf", "Q4_0", threads=1)
    for kind in ("Q4_0", "Q8_0", "F16"):
        with pytest.raises(ModelError, match=f"small.gguf has .* MB and a {kind} copy would have"):
            quantized_copy.plan(small, kind)
    assert quantized_copy.plan(small, "Q2_K").size_ratio < 1


@pytest.mark.usefixtures("in_process")
def test_existing_files_are_kept_without_force(main, tmp_path):
    target = tmp_path / "existing.gguf"
    target.write_text("mine")
    with pytest.raises(InvalidRequest, match=r"exists.*`force`"):
        quantized_copy.plan(main, "Q4_0", target)
    assert target.read_text() == "mine"
    quantized_copy.make(quantized_copy.plan(main, "Q4_0", target, force=True), threads=1)
    assert target.read_bytes()[:4] == b"GGUF"


@pytest.mark.usefixtures("in_process")
def test_the_source_itself_is_never_replaced(main, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(main)
    for target in (main, link):
        with pytest.raises(InvalidRequest, match="is the source model itself"):
            quantized_copy.plan(main, "Q4_0", target, force=True)
    with pytest.raises(InvalidRequest, match="is a folder"):
        quantized_copy.plan(main, "Q4_0", tmp_path, force=True)


@pytest.mark.usefixtures("in_process")
def test_missing_models_are_refused(main, tmp_path):
    absent = tmp_path / "absent.gguf"
    for source, other in ((absent, None), (main, absent)):
        with pytest.raises(ModelFileError, match="does not exist"):
            quantized_copy.plan(source, "Q4_0", tmp_path / "copy.gguf", main=other)


@pytest.mark.usefixtures("in_process")
def test_a_full_disk_is_found_before_writing(main, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    need = quantized_copy.plan(main, "Q4_0", tmp_path / "copy.gguf").size
    requested = []

    def disk_usage(folder):
        requested.append(folder)
        return usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = need
    quantized_copy.plan(main, "Q4_0", tmp_path / "new" / "folder" / "copy.gguf")
    free = need - 1
    with pytest.raises(SpecLocalError, match="MB free: free some space"):
        quantized_copy.plan(main, "Q4_0", tmp_path / "copy.gguf")
    assert requested == [tmp_path, tmp_path]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("seconds", "loses"),
    [({1: 1.0, 2: 1.0, 64: 1.1}, False), ({1: 1.0, 2: 2.0, 64: 64.0}, True)],
    ids=["reads", "computes"],
)
def test_costs_of_the_main_model_give_expected_speedups(main, tmp_path, own_cache, seconds, loses):
    cost_store.save(Conditions(main, OFFLOADED, 1, 512), CostModel(seconds))
    settings = {"n_ctx": 512, "threads": 1}
    copy = quantized_copy.plan(main, "Q4_0", tmp_path / "copy.gguf", **settings)
    assert [p.acceptance_rate for p in copy.expectation.speedups] == list(quantized_copy.ACCEPTANCE_RATES)
    assert copy.expectation.cannot_pay is loses
    if not loses:
        best = best_speedup(seconds, copy.size_ratio)
        assert copy.expectation.speedups[1].speedup == pytest.approx(best, rel=0.01)
    other = quantized_copy.plan(main, "Q4_0", tmp_path / "copy.gguf", n_ctx=256, threads=1)
    assert (other.expectation.is_measured, other.expectation.cannot_pay) == (False, False)
    cost_store.save(
        Conditions(main, OFFLOADED, 1, 512), CostModel(seconds), others=64.0
    )  # other programs were busy
    rough = quantized_copy.plan(main, "Q4_0", tmp_path / "copy.gguf", **settings)
    assert (rough.expectation.is_measured, rough.expectation.cannot_pay) == (False, False)


@pytest.mark.usefixtures("in_process")
def test_a_copy_that_drafts_for_another_model(main, tiny_draft_path, tmp_path, own_cache):
    """The speed-up is from the costs of both models, and estimated if one is unknown."""
    settings = {"n_ctx": 512, "threads": 1, "main": main}

    def planned():
        return quantized_copy.plan(tiny_draft_path, "Q4_0", tmp_path / "copy.gguf", **settings)

    cost_store.save(Conditions(main, OFFLOADED, 1, 512), CostModel({1: 1.0, 64: 1.1}))
    assert not planned().expectation.is_measured
    found = []
    for seconds in (0.5, 50.0):
        cost_store.save(Conditions(tiny_draft_path, OFFLOADED, 1, 512), CostModel({1: seconds}))
        found.append(planned())
    assert [copy.expectation.cannot_pay for copy in found] == [False, True]
    assert found[0].source == tiny_draft_path
    # without the header, which is large in a tiny file
    step = 0.5 * quantized_size(tiny_draft_path, "Q4_0") / Model(tiny_draft_path, weights=False).size
    best = best_speedup({1: 1.0, 64: 1.1}, step)
    assert found[0].expectation.speedups[1].speedup == pytest.approx(best, rel=0.01)


def test_a_failed_or_crashed_quantization_leaves_no_file(main, tmp_path, monkeypatch):
    copy = quantized_copy.plan(main, "Q4_0", tmp_path / "copy.gguf")
    result = run_child("spec_local.llama.quantize", str(main), "Q9")
    assert "quantization 'Q9' is unknown" in result.error
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    for line, what in [
        ("lambda *a: 1", r"main\.gguf cannot be quantized \(llama.cpp gave no reason\)"),
        ("lambda *a: os.abort()", r"crashed while quantizing .*main\.gguf \(SIGABRT\)"),
    ]:
        (site / "sitecustomize.py").write_text(
            f"import os\nfrom llama_cpp import llama_cpp\nllama_cpp.llama_model_quantize = {line}\n"
        )
        with pytest.raises(BackendError, match=what):
            quantized_copy.make(copy)
        assert files(tmp_path) == ["site"]
    assert os.path.exists(main)
