"""The processors that this process may use, where masks (`taskset`) and limits of containers count."""

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Processors:
    """Numbers of physical cores, at least one, and of their threads; limit: why these are not all, or ""."""

    cores: int
    hardware_threads: int
    limit: str = ""


def usable_processors(root: Path = Path("/"), machine: Processors | None = None) -> Processors:
    """Return what this process may use of the machine.

    A container's quota is a share of time on any processors, such as 1.5. It is rounded up, as Java, Go and
    .NET do: so many threads at once use up all of it.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
        machine: all that it has; by default, as the system reports it.
    """
    found = machine or _machine()
    if hasattr(os, "sched_getaffinity"):  # Linux
        mask = os.sched_getaffinity(0)
        cores = len({_core(root, number) for number in mask})
        if cores < found.cores or len(mask) < found.hardware_threads:
            limit = f"taskset or a cpuset allows {len(mask)} of {found.hardware_threads} CPUs"
            found = Processors(min(cores, found.cores), len(mask), limit)
    quota = container_limit(root)
    if quota is not None and math.ceil(quota) < found.hardware_threads:
        most = max(1, math.ceil(quota))
        if most < found.cores:
            return Processors(most, most, f"a container's CPU limit is {quota:g}")
        return Processors(found.cores, most, found.limit)
    return found


@functools.cache  # reading takes 1 ms; the machine does not change
def _machine() -> Processors:
    n_threads = psutil.cpu_count() or 1
    return Processors(psutil.cpu_count(logical=False) or n_threads, n_threads)


@functools.cache
def _core(root: Path, number: int) -> str:
    """Return a name of a hardware thread's core, the same for all of its threads."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older one
        with contextlib.suppress(OSError):
            return (root / f"sys/devices/system/cpu/cpu{number}/topology" / name).read_text()
    return str(number)


def container_limit(root: Path = Path("/")) -> float | None:
    """Return the processors whose time the control groups of this process allow; None: all.

    The smallest quota counts, of this group and those around it; version 2 (``cpu.max``) and version 1
    (``cpu.cfs_quota_us``).
    """
    quotas = []
    for folder in control_groups(root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:  # -1: none
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def control_groups(root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process: its own, and those around them.

    Those of version 2, and of version 1 those of the processors.

    In a container, the process often has a path that only the machine around it has: then its own group is
    at the top.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # macOS
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [controllers, "cpu"] if controllers else ["", "unified"]
        for mount in dict.fromkeys(mounts):
            top = root / "sys/fs/cgroup" / mount
            inner = Path(path.lstrip("/"))
            for part in (inner, *inner.parents):
                yield top / part
