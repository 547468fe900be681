"""Fixtures and settings of all tests.

Property tests try the same examples in every run: a new defect must not stop an unrelated change. To search
with other examples: ``pytest --hypothesis-profile=default``.

Threads of llama.cpp that wait for each other sleep. By default they spin, and where several tests share the
cores, each spins through the time that the others need: tests of two threads took 80 times as long.
"""

import asyncio
import inspect
import os
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import settings

from spec_local.models import catalog
from spec_local.system import machine

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the OpenMP library is loaded

# No deadline: an example of milliseconds takes a second where other programs use the processor.
settings.register_profile("default", deadline=None)
settings.register_profile("repeatable", derandomize=True, max_examples=50, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def starter_path():
    """The file of the starter model."""
    path = catalog.find("starter")
    if not path:
        pytest.fail("the starter model is missing: run specdec models pull starter")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def pretend(monkeypatch):
    """A function that changes facts of this machine, by the names of the functions of `machine`."""

    def change(**facts):
        for name, fact in facts.items():
            monkeypatch.setattr(machine, name, lambda fact=fact: fact)

    return change


@pytest.fixture
def a_gpu(monkeypatch):
    """As if this machine had a GPU, in whose place the CPU computes; a function that sets its bytes."""
    from spec_local.llama import devices, runtime

    cpu = runtime.ggml().ggml_backend_dev_by_type(0)

    def have(*, free=1 << 40, **facts):
        facts = {"name": "metal", "description": "a GPU", "is_integrated": True, "total": free} | facts
        monkeypatch.setattr(devices, "gpus", lambda: [devices.Gpu(**facts, free=free, pointer=cpu)])

    have()
    return have


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
