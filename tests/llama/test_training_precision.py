"""The fastest copy of the main model is kept if there is room for it; the others are deleted."""

import shutil
from types import SimpleNamespace

import pytest

from spec_local.llama.devices import ON_CPU
from spec_local.llama.model import Model
from spec_local.llama.quantize import quantize, quantized_size
from spec_local.training import precision
from spec_local.training.precision import KINDS, fastest_copy, rate


@pytest.fixture(scope="module")
def copies(tiny_path, tmp_path_factory):
    """Path of a quantized copy, and what the child process that makes it reports, by kind."""
    folder = tmp_path_factory.mktemp("copies")
    return {
        kind: (quantize(tiny_path, folder / kind, kind, threads=1), {"size": quantized_size(tiny_path, kind)})
        for kind in KINDS
    }


@pytest.fixture
def rates(copies, monkeypatch):
    """Tokens per second by kind of copy; 100 for the main model's own file."""
    found = {"BF16": 90.0, "F16": 90.0, "Q8_0": 90.0}

    def copy(main, kind, target=None, threads=None):
        path, size = copies[kind]
        if target:
            shutil.copy(path, target)
        return size

    monkeypatch.setattr(precision, "quantize", copy)
    return found


def measured_as(rates):
    return lambda path, *_: rates.get(path.stem.removeprefix("main-"), 100.0)


@pytest.mark.parametrize(
    ("fast", "chosen"),
    [
        ({}, "tiny.gguf"),
        ({"BF16": 114.0}, "tiny.gguf"),
        ({"BF16": 250.0}, "main-BF16.gguf"),
        ({"BF16": 150.0, "Q8_0": 200.0}, "main-Q8_0.gguf"),
        ({"BF16": 250.0, "F16": 200.0, "Q8_0": 240.0}, "main-BF16.gguf"),
    ],
)
def test_only_the_fastest_is_kept(tiny_path, tmp_path, rates, fast, chosen):
    rates |= fast
    seen = {}
    path = fastest_copy(
        tiny_path, tmp_path, n_parallel=4, measured=measured_as(rates), on_progress=seen.__setitem__
    )
    assert path.name == chosen
    assert [p.name for p in tmp_path.iterdir()] == [chosen] * (path != tiny_path)
    assert seen == {"main": 100.0} | rates
    if path != tiny_path:
        assert chosen[5:-5] in Model(path, weights=False).description


def test_copies_leave_room_in_memory_and_on_disk(tiny_path, tmp_path, rates, monkeypatch):
    rates |= dict.fromkeys(KINDS, 500.0)
    size = tiny_path.stat().st_size
    for what, little in (
        ("psutil.virtual_memory", SimpleNamespace(available=size)),
        ("shutil.disk_usage", SimpleNamespace(free=size)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(what, lambda *_, little=little: little)
            assert fastest_copy(tiny_path, tmp_path, n_parallel=4, measured=measured_as(rates)) == tiny_path
    assert list(tmp_path.iterdir()) == []


def test_the_rate_of_a_real_model_is_measured(tiny_path):
    assert rate(tiny_path, 4, 1, ON_CPU) > 100
