"""Fixtures and settings of all tests.

Property tests try the same examples in every run: a new defect must not stop an unrelated change. To search
with other examples: ``pytest --hypothesis-profile=default``.

Threads of llama.cpp that wait for each other sleep. By default they spin, and where several tests share the
cores, each spins through the time that the others need: tests of two threads took 80 times as long.
"""

import os

import pytest
from hypothesis import settings

from spec_local.system import machine

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the OpenMP library is loaded

settings.register_profile("repeatable", derandomize=True, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture
def pretend(monkeypatch):
    """A function that changes facts of this machine, by the names of `machine`'s functions that return them."""

    def change(**facts):
        for name, fact in facts.items():
            monkeypatch.setattr(machine, name, lambda fact=fact: fact)

    return change
