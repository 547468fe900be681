"""Test which processors may be used: a mask, and the limits of containers, with fake control groups."""

import os

import pytest

from spec_local.system import machine
from spec_local.system.processors import Processors, container_limit, usable_processors


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),  # around it
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "200000 100000\n"}, 0.5),
        ("0::/docker/123\n", {"cpu.max": "300000 100000\n"}, 3),  # the path is the host's
        ("0::/../x\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        ("0::/\n", {"cpu.max": "100000 0\n"}, None),
        (
            "3:memory:/m\n2:cpu,cpuacct:/a\n1:name=systemd:/\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("2:cpu:/a\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ("2:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 2),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("2:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "1\n", "cpuset/cpu.cfs_period_us": "1\n"}, None),
        ("5:memory:/\n0::/a\n", {"unified/a/cpu.max": "100000 100000\n"}, 1),  # both versions mounted
    ],
)
def test_the_limit_of_a_container(tmp_path, groups, files, limit):
    write(tmp_path, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": t for name, t in files.items()})
    assert container_limit(tmp_path) == limit


def test_no_control_groups(tmp_path):
    assert container_limit(tmp_path) is None


@pytest.fixture
def eight_threads(tmp_path, monkeypatch):
    """A machine with four cores of two hardware threads each, where n and n + 4 are a core; its root."""
    for number in range(8):
        topology = f"sys/devices/system/cpu/cpu{number}/topology"
        write(tmp_path, {f"{topology}/thread_siblings_list": f"{number % 4},{number % 4 + 4}\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def test_without_limits_all_is_used(eight_threads):
    assert usable_processors(eight_threads, Processors(4, 8)) == Processors(4, 8)


@pytest.mark.parametrize(
    ("mask", "cores"), [({0}, 1), ({0, 4}, 1), ({0, 1}, 2), ({0, 1, 4, 5}, 2), ({0, 1, 2, 3}, 4)]
)
def test_a_mask_leaves_its_cores(eight_threads, monkeypatch, mask, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mask, raising=False)
    found = usable_processors(eight_threads, Processors(4, 8))
    assert (found.cores, found.hardware_threads) == (cores, len(mask))
    assert f"{len(mask)} of 8" in found.limit


@pytest.mark.parametrize(
    ("quota", "cores", "threads"),
    [(20_000, 1, 1), (100_000, 1, 1), (150_000, 2, 2), (400_000, 4, 4), (600_000, 4, 6), (900_000, 4, 8)],
)
def test_a_quota_is_used_up(eight_threads, quota, cores, threads):
    write(eight_threads, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
    found = usable_processors(eight_threads, Processors(4, 8))
    assert (found.cores, found.hardware_threads) == (cores, threads)
    assert bool(found.limit) == (cores < 4)
    assert not found.limit or f"limit is {quota / 100_000:g}" in found.limit


def test_the_smaller_limit_is_named(eight_threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    write(eight_threads, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"})
    assert usable_processors(eight_threads, Processors(4, 8)) == Processors(
        1, 1, "a container's CPU limit is 1"
    )
    write(eight_threads, {"sys/fs/cgroup/cpu.max": "300000 100000\n"})
    assert "taskset" in usable_processors(eight_threads, Processors(4, 8)).limit


def test_without_masks_as_on_macos(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_processors(tmp_path, Processors(4, 8)) == Processors(4, 8)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no masks")
def test_a_real_mask_decides_the_default_number_of_threads():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.default_threads() == 1
    finally:
        os.sched_setaffinity(0, before)
