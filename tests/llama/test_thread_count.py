"""The number of threads of real calls, and OpenMP's threads that make the others wait briefly."""

import time

import numpy as np
import psutil
import pytest

from spec_local.core.calls import run
from spec_local.llama import openmp, runtime, thread_count


@pytest.fixture
def unconfigured(monkeypatch):
    """As if the environment did not determine how long threads wait."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    thread_count.adaptive.cache_clear()
    yield
    thread_count.adaptive.cache_clear()


def n_threads_become(expected):
    """Wait until the process has as many threads, or ten seconds; returns their number."""
    for _ in range(1000):
        if (n := psutil.Process().num_threads()) == expected:
            break
        time.sleep(0.01)
    return n


def test_calls_have_the_chosen_number_of_threads(unconfigured, tiny_model, make_context):
    row = make_context(tiny_model, threads=3)
    count = thread_count.adaptive(3).count
    logits = {}
    for state, n in (("own", 3), ("fewer", 2), ("shared", 3)):
        count.state, count.n, count._last_call = state, n, time.monotonic()
        row.truncate(0)
        logits[state] = run(row.call([1, 2, 3], n_logits=1)).copy()
        assert row.context.lib.llama_n_threads(row.handle) == n
    assert all(np.array_equal(each, logits["own"]) for each in logits.values())


def test_observations_have_the_time_of_calls(unconfigured, tiny_model, make_context, monkeypatch):
    row = make_context(tiny_model, threads=2)
    seen = []
    monkeypatch.setattr(thread_count.adaptive(2).count, "observe", lambda *times: seen.append(times))
    start, used = time.monotonic(), time.process_time()
    run(row.call([1, 2, 3], n_logits=1))
    ((now, seconds, processor_seconds),) = seen
    assert start < now <= time.monotonic()
    assert 0 < seconds <= now - start
    assert 0 <= processor_seconds <= time.process_time() - used


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_number_is_fixed_where_the_environment_configures_waits(unconfigured, name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert thread_count.adaptive(2) is None


def test_reproducible_calls_have_a_fixed_number(unconfigured, tiny_model, make_context):
    assert make_context(tiny_model, threads=2, pad_to=8).context._thread_count is None


def test_brief_waits_add_threads_that_sleep_until_they_end(tiny_model, make_context):
    run(make_context(tiny_model).call([1], n_logits=1))  # llama.cpp's own threads exist
    if not hasattr(runtime.library()._lib, "GOMP_parallel"):
        pytest.skip("llama.cpp was built without GNU's OpenMP")
    before = psutil.Process().num_threads()
    waits = openmp.BriefWaits()
    waits.apply(True)
    waits.apply(True)
    assert n_threads_become(before + psutil.cpu_count() + 1) == before + psutil.cpu_count() + 1
    waits.apply(False)
    assert n_threads_become(before) == before
