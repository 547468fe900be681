"""Caches that make exact enumeration fast enough for a test, a server in place of the Hub, an empty home."""

from types import SimpleNamespace

import pytest

from spec_local.core.sampling import Sampler
from spec_local.models import catalog, program_folders
from spec_local.verifiers import tree
from tests.hub_server import HubServer


@pytest.fixture(scope="module")
def cached_distributions():
    """Cache distributions by settings, logits and history; not under a constraint, which has a state."""
    known = {}

    def distribution(sampler, logits, history=(), tokens=None, find=Sampler.distribution):
        if sampler.constraint or tokens is not None:
            return find(sampler, logits, history, tokens)
        settings = sampler.settings
        key = (id(settings), sampler._first_penalized, logits.tobytes(), *history)
        if key not in known:
            known[key] = find(sampler, logits, history), settings  # kept, as its id must stay its own
        return known[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "distribution", distribution)
        yield


@pytest.fixture
def cached_rho(monkeypatch):
    """Cache SpecTr's ρ by its arguments: enumeration needs this bisection thousands of times."""
    known = {}

    def rho(p, q, k, find=tree._rho):
        key = (p.tobytes(), q.tobytes(), k)
        if key not in known:
            known[key] = find(p, q, k)
        return known[key]

    monkeypatch.setattr(tree, "_rho", rho)


@pytest.fixture
def hub_server(tmp_path, monkeypatch):
    """An empty Hub instead of the real one; an empty cache in `tmp_path / "cache"`, no token."""
    import huggingface_hub
    from huggingface_hub import constants

    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        no_pause = SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.file_download.time", no_pause)
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()


@pytest.fixture
def empty_home(tmp_path, monkeypatch):
    """An empty home folder, without anything of this machine's own."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(program_folders, "_OLLAMA_SERVICE", tmp_path / "service")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for kind in ("data", "cache", "config"):
        monkeypatch.setattr(f"platformdirs.user_{kind}_dir", lambda name, kind=kind: str(tmp_path / kind))
    catalog._catalog.cache_clear()
    yield tmp_path
    catalog._catalog.cache_clear()
