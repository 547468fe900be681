"""What makes exact enumeration quick enough for a test."""

import pytest

from spec_local.verifiers import node


@pytest.fixture
def remember_rho(monkeypatch):
    """Enumeration asks for the same ρ thousands of times, and each is a bisection."""
    known = {}

    def rho(p, q, k, find=node._rho):
        key = (p.tobytes(), q.tobytes(), k)
        if key not in known:
            known[key] = find(p, q, k)
        return known[key]

    monkeypatch.setattr(node, "_rho", rho)
