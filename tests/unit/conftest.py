"""Caches that make exact enumeration fast enough for a test."""

import pytest

from spec_local.core.fake import FakeModel
from spec_local.verifiers import spectr


@pytest.fixture(scope="module")
def cached_logits():
    """Cache the logits of fake models by context: enumeration needs each of them thousands of times."""
    known = {}

    def logits(model, history, find=FakeModel.logits):
        order = model._order
        kind = (model.n_vocab, model._seed, model._noise, model._scale, order)
        key = (*kind, min(len(history), order), *history[-order:])
        if key not in known:
            known[key] = find(model, history)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeModel, "logits", logits)
        yield


@pytest.fixture
def cached_rho(monkeypatch):
    """Cache SpecTr's ρ by its arguments: enumeration needs this bisection thousands of times."""
    known = {}

    def rho(p, q, k, find=spectr._rho):
        key = (p.tobytes(), q.tobytes(), k)
        if key not in known:
            known[key] = find(p, q, k)
        return known[key]

    monkeypatch.setattr(spectr, "_rho", rho)
