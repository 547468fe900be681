"""Fixtures and settings of all tests.

Property tests try the same examples in every run: a new defect must not stop an unrelated change. To search
with other examples: ``pytest --hypothesis-profile=default``.

Threads of llama.cpp that wait for each other sleep. By default they spin, and where several tests share the
cores, each spins through the time that the others need: tests of two threads took 80 times as long.
"""

import os
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import settings

from spec_local.system import machine

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the OpenMP library is loaded

settings.register_profile("repeatable", derandomize=True, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture
def pretend(monkeypatch):
    """A function that changes facts of this machine, by the names of the functions of `machine`."""

    def change(**facts):
        for name, fact in facts.items():
            monkeypatch.setattr(machine, name, lambda fact=fact: fact)

    return change


@pytest.fixture
def devices(monkeypatch):
    """A function that sets llama.cpp's devices: each one's backend and ``ggml_backend_dev_type``.

    Models run on the CPU all the same.
    """
    from spec_local.llama import runtime

    def change(*backends):
        functions = {
            "ggml_backend_dev_count": lambda: len(backends),
            "ggml_backend_dev_get": lambda i: i + 1,
            "ggml_backend_dev_type": lambda device: backends[device - 1][1],
            "ggml_backend_dev_backend_reg": lambda device: device,
            "ggml_backend_reg_name": lambda device: backends[device - 1][0].encode(),
        }
        for name, function in functions.items():
            monkeypatch.setattr(runtime.ggml(), name, function)

    return change


@pytest.fixture
def a_mac(devices, pretend):
    """As if this were a Mac with Apple silicon; a function that sets whether the build has Metal."""

    def build(has_metal):
        devices(*[("MTL", 1)] * has_metal, ("BLAS", 3), ("CPU", 0))

    pretend(is_apple_silicon=True)
    build(True)
    return build


@pytest.fixture
def others_use(monkeypatch):
    """A function that sets how many cores other programs use."""

    def use(cores):
        def cpu_times():
            return SimpleNamespace(user=cores * time.monotonic() + sum(os.times()[:4]))

        monkeypatch.setattr(psutil, "cpu_times", cpu_times)

    return use


@pytest.fixture
def free_memory(monkeypatch):
    """A function that sets how many bytes of memory are free."""

    def change(n_bytes):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=n_bytes))

    return change


@pytest.fixture
def unchecked_headers(tmp_path, monkeypatch):
    """Files are not read in a child process first, which takes half a second: a script finds them valid."""
    python, script = sys.executable, tmp_path / "unchecking" / "python"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\ncase $3 in\n"
        "    spec_local.llama.headers | spec_local.llama.setup.probe) echo '{}' ;;\n"
        f'    *) exec {python} "$@" ;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
