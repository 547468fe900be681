"""Tiny models, written once per test session, and contexts of them."""

import os
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from spec_local import kernels
from spec_local.core.calls import run
from spec_local.kernels import Status
from spec_local.llama import runtime
from spec_local.llama.devices import AUTO, fixed_offload
from spec_local.llama.model import Model
from spec_local.llama.open import open_sequence
from spec_local.llama.tiny import write_tiny_model

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would start a debugger


@pytest.fixture(scope="session", autouse=True)
def all_sizes():
    """Our kernels compute calls of all sizes alike, whatever was measured to be slower on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_with_limits", lambda instruction_set, library: Status(instruction_set))
        yield


@pytest.fixture(scope="session", autouse=True)
def device():
    """With SPECDEC_TEST_DEVICE=gpu, sessions that do not name a device run there, and none is measured.

    SPECDEC_TEST_FLASH=0: no context uses flash attention, unless its cache needs it.
    """
    lib = runtime.library()
    context_params = lib.llama_context_default_params

    def without_flash_attention():
        params = context_params()
        params.flash_attn_type = 0
        return params

    def fixed(device, gpu_layers=None, *more, **options):
        if device == AUTO and gpu_layers is None and not options:
            device = wanted
        return fixed_offload(device, gpu_layers, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        if wanted := os.environ.get("SPECDEC_TEST_DEVICE"):
            patch.setattr("spec_local.opening.open_models.fixed_offload", fixed)
        if os.environ.get("SPECDEC_TEST_FLASH") == "0":
            patch.setattr(lib, "llama_context_default_params", without_flash_attention)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache folder for all tests: costs and experience of their models are of no use later."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("cache"))
        patch.setattr("platformdirs.user_cache_dir", lambda name: folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def quiet():
    """Other tests, which run at the same time, do not make costs uncertain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=0.0))
        yield


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty user cache folder, so that no results of checks and measurements are shared."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(folder))
    return folder


@pytest.fixture(scope="module")
def unchecked():
    """Open models without their check in a child process, which takes a second for each file."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "loading.check_model_files",
            "loading.check_projector_file",
            "preload.check_model_files",
        ):
            patch.setattr(f"spec_local.opening.{name}", lambda *args, **kwargs: None)
        yield


@pytest.fixture
def pretend_kernels(monkeypatch):
    """A function that sets the identity of the CPU kernels in use, such as ``avx2:1``; empty: none are."""

    def change(identity):
        used = Status(identity.partition(":")[0]) if identity else Status(None, "not built")
        monkeypatch.setattr(kernels, "identity", lambda: identity)
        monkeypatch.setattr(kernels, "status", lambda: used)

    return change


@pytest.fixture
def measure_calls(monkeypatch):
    """A function that sets what times the calls of a session whose costs are unknown."""
    return lambda measure: monkeypatch.setattr("spec_local.calibration.known_costs.measure", measure)


@pytest.fixture
def f32_caches(monkeypatch):
    """Contexts with caches in F32, whose logits are the same however tokens are divided into calls.

    The library has no such option: it improves no answer.
    """
    lib = runtime.library()
    monkeypatch.setattr(lib, "GGML_TYPE_F16", lib.GGML_TYPE_F32)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def extra_tokens():
    """The last tokens of the vocabulary: one longer than the buffers, one with multi-byte characters."""
    return ["<long>" + "0123456789" * 30, "ญี่ปุ่น"]


@pytest.fixture(scope="session")
def tiny_path(folder, extra_tokens):
    return write_tiny_model(folder / "tiny.gguf", extra_tokens=extra_tokens)


@pytest.fixture(scope="session")
def tiny_draft_path(folder, extra_tokens):
    """A model with the same greedy token as the tiny model in two of three positions."""
    return write_tiny_model(folder / "draft.gguf", extra_tokens=extra_tokens, noise=0.05)


@pytest.fixture(scope="session")
def recurrent_path(folder):
    return write_tiny_model(folder / "mamba.gguf", architecture="mamba")


@pytest.fixture(scope="session")
def window_path(folder):
    """A model with a sliding window of 8 tokens in every other layer."""
    return write_tiny_model(folder / "gemma3.gguf", architecture="gemma3")


@pytest.fixture(scope="session")
def tiny_model(tiny_path):
    return Model(tiny_path)


@pytest.fixture(scope="session")
def closing_path(tiny_path, tmp_path_factory):
    """The tiny model with ``add_eos_token``."""
    key = b"tokenizer.ggml.add_eos_token" + b"\x07\0\0\0"  # a truth value
    data = tiny_path.read_bytes()
    assert data.count(key + b"\0") == 1
    path = tmp_path_factory.mktemp("closing") / "closing.gguf"
    path.write_bytes(data.replace(key + b"\0", key + b"\1"))
    return path


@pytest.fixture(scope="session")
def tiny_draft(tiny_draft_path):
    return Model(tiny_draft_path)


@pytest.fixture(scope="session")
def recurrent_model(recurrent_path):
    return Model(recurrent_path)


@pytest.fixture(scope="session")
def window_model(window_path):
    return Model(window_path)


@pytest.fixture
def make_context():
    """A function that creates small contexts; they are closed after the test."""
    made = []

    def make(model, **kwargs):
        made.append(
            open_sequence(model, **{"n_ctx": 256, "max_tokens": 64, "max_logits": 64, "threads": 1} | kwargs)
        )
        return made[-1]

    yield make
    for context in made:
        context.close()


@pytest.fixture
def fresh_logits(make_context):
    """A function that evaluates tokens in a new context and returns the logits of each."""

    def evaluate(model, tokens):
        context = make_context(model)
        rows = []
        for start in range(0, len(tokens), context.limits.max_tokens):
            chunk = tokens[start : start + context.limits.max_tokens]
            rows.append(run(context.call(chunk)).copy())
        context.close()
        return np.concatenate(rows)

    return evaluate


@pytest.fixture
def check_next(fresh_logits):
    """A function that checks that a context holds the tokens in `cached`, by the logits after more tokens.

    Calls of different sizes sum in a different order, and the cache is f16: the logits (standard deviation
    3) differ by at most 0.02 in these tests. Changing one of 90 tokens moves some logit by 0.09 to 10,
    losing one by more than 1.
    """

    def check(context, new=(33,)):
        expected = fresh_logits(context.model, [*context.cached, *new])[-len(new) :]
        np.testing.assert_allclose(run(context.call(new)), expected, atol=0.05, rtol=0)

    return check


@pytest.fixture(scope="session")
def starter(starter_path):
    model = Model(starter_path)
    yield model
    model.close()
