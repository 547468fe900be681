"""Which copy of main writes: the quickest, if there is room for it; the others go."""

from types import SimpleNamespace

import pytest

from spec_local.llama.model import Model
from spec_local.training import precision
from spec_local.training.precision import KINDS, quickest


@pytest.fixture
def rates(monkeypatch):
    """Tokens a second by the kind of the copy; main's own is 100."""
    found = {"BF16": 90.0, "F16": 90.0, "Q8_0": 90.0}
    monkeypatch.setattr(
        precision, "_rate", lambda path, *_: found.get(path.stem.removeprefix("main-"), 100.0)
    )
    return found


@pytest.mark.parametrize(
    ("quick", "chosen"),
    [
        ({}, "tiny.gguf"),
        ({"BF16": 114.0}, "tiny.gguf"),
        ({"BF16": 250.0}, "main-BF16.gguf"),
        ({"BF16": 150.0, "Q8_0": 200.0}, "main-Q8_0.gguf"),
        ({"BF16": 250.0, "F16": 200.0, "Q8_0": 240.0}, "main-BF16.gguf"),
    ],
)
def test_the_quickest_is_kept_alone(tiny_path, tmp_path, rates, quick, chosen):
    rates |= quick
    told = {}
    path = quickest(tiny_path, tmp_path, n_texts=4, told=told.__setitem__)
    assert path.name == chosen
    assert [p.name for p in tmp_path.iterdir()] == [chosen] * (path != tiny_path)
    assert told == {"main": 100.0} | rates
    if path != tiny_path:
        assert chosen[5:-5] in Model(path, weights=False).description


def test_no_copy_takes_most_of_the_memory_or_of_the_disk(tiny_path, tmp_path, rates, monkeypatch):
    rates |= dict.fromkeys(KINDS, 500.0)
    size = tiny_path.stat().st_size
    for what, little in (
        ("psutil.virtual_memory", SimpleNamespace(available=size)),
        ("shutil.disk_usage", SimpleNamespace(free=size)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(what, lambda *_, little=little: little)
            assert quickest(tiny_path, tmp_path, n_texts=4) == tiny_path
    assert list(tmp_path.iterdir()) == []


def test_a_rate_is_measured_on_the_model(tiny_path):
    assert precision._rate(tiny_path, 4, 1, 0) > 100
