"""Models that load in other threads while this one imports, and what is kept for the next start."""

import ctypes
import re

import numpy as np
import pytest

from spec_local.errors import ModelFileError
from spec_local.llama import runtime
from spec_local.llama.devices import OFFLOADED, ON_CPU
from spec_local.llama.model import Model
from spec_local.llama.tiny import write_tiny_model
from spec_local.opening.preload import preload, take
from spec_local.opening.vocabulary_store import vocabulary_map

pytestmark = pytest.mark.usefixtures("unchecked")

AS_USUAL = {"offload": OFFLOADED, "load_mtp": False}


def test_models_are_taken_once_and_only_with_the_same_arguments(tiny_path, tiny_draft_path):
    with preload([tiny_path, tiny_draft_path, tiny_path], **AS_USUAL, log=print):
        assert take(tiny_path, offload=ON_CPU, load_mtp=False) is None
        models = [take(path, **AS_USUAL) for path in (tiny_path, tiny_draft_path)]
        assert [model.path for model in models] == [tiny_path, tiny_draft_path]
        assert take(tiny_path, **AS_USUAL) is None
    assert all(model.is_open for model in models)  # whoever took them closes them
    assert take(tiny_draft_path, **AS_USUAL) is None


def test_models_that_nobody_takes_are_freed(tiny_path, monkeypatch):
    lib, freed = runtime.library(), []
    free = lib.llama_model_free
    monkeypatch.setattr(lib, "llama_model_free", lambda handle: (freed.append(handle), free(handle)))
    with preload([tiny_path], **AS_USUAL, log=print):
        pass
    assert len(freed) == 1


def test_a_failure_is_reported_where_the_model_is_taken(tmp_path, tiny_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_path.read_bytes()[:5000])
    with preload([damaged, tiny_path], **AS_USUAL, log=print):
        with pytest.raises(ModelFileError, match=re.escape(str(damaged)) + r" cannot be loaded \((?!llama)"):
            take(damaged, **AS_USUAL)
        assert take(tiny_path, **AS_USUAL)


def test_a_model_is_loaded_without_its_log(tiny_path, monkeypatch):
    """llama.cpp gets another function than the usual one until the model is loaded."""
    lib, happened = runtime.library(), []
    load, log_to = lib.llama_model_load_from_file, lib.llama_log_set
    usual = ctypes.cast(runtime.log_callback(), ctypes.c_void_p).value

    def record(callback, data):
        happened.append(ctypes.cast(callback, ctypes.c_void_p).value == usual)
        log_to(callback, data)

    def loads(*arguments):
        happened.append("loads")
        return load(*arguments)

    monkeypatch.setattr(lib, "llama_log_set", record)
    monkeypatch.setattr(lib, "llama_model_load_from_file", loads)
    Model(tiny_path).close()
    assert happened == [False, "loads", True]


@pytest.fixture
def models(tiny_path, tmp_path):
    both = [Model(tiny_path), Model(write_tiny_model(tmp_path / "other.gguf", extra_tokens=["once upon"]))]
    yield both
    for model in both:
        model.close()


def test_vocabularies_are_compared_once(models, own_cache):
    first, again = (vocabulary_map(*models) for _ in range(2))
    assert (first.is_new, again.is_new) == (True, False)
    tokens = range(models[0].vocabulary.n_tokens)
    assert [first.to_draft(token) for token in tokens] == [again.to_draft(token) for token in tokens]
    assert np.array_equal(first.draft_ids, again.draft_ids)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 16, b"\0" * 16])
def test_a_damaged_comparison_is_repeated(models, own_cache, content):
    first = vocabulary_map(*models)
    (path,) = (own_cache / "vocabularies").iterdir()
    whole = path.read_bytes()
    path.write_bytes(content)
    assert np.array_equal(first.main_ids, vocabulary_map(*models).main_ids)
    assert path.read_bytes() == whole
