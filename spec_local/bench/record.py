"""Record what a measurement depends on: the machine, the build and the model files."""

import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import spec_local
from spec_local import kernels
from spec_local.kernels import choice
from spec_local.llama import runtime
from spec_local.session import Session
from spec_local.system import machine
from spec_local.system.files import format_size, sha256
from spec_local.system.machine import default_threads


def record(
    session: Session, threads: int | None, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Describe the machine, the build and the models; hashing large model files takes seconds.

    Args:
        threads: as given to the session; None: the default.
        log: receives a line before a slow operation.
    """
    models: dict[str, dict[str, Any]] = {}
    types: set[str] = set()
    for role, row in (("main", session.main), ("draft", session.draft)):
        if row:
            path = row.model.path
            types |= row.model.types
            size = path.stat().st_size
            if size > 500_000_000:
                log(f"hashing {path.name} ({format_size(size)})")
            models[role] = {
                "file": row.model.name,
                "description": row.model.description,
                "bytes": size,
                "sha256": sha256(path),
            }
    return {
        "specdec": spec_local.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "models": models,
        "context": session.main.n_ctx,
        "processor": processor(),
        "cores": psutil.cpu_count(logical=False),
        "hardware_threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "threads": threads or default_threads(),
        "device": session.device,
        "llama_cpp": machine.llama_cpp_build(),
        "llama_cpp_system": runtime.system_info().strip(),
        "cpu_kernels": str(kernels.status()),
        "kernel_choice": kernel_choice(types),
        "logits_vary": session.logits_vary,
    }


def kernel_choice(types: Collection[str]) -> dict[str, Any]:
    """What was chosen for types of weights, and from which speeds; empty if nothing was measured.

    Returns for each type: most_tokens (of calls that specdec's kernels compute; None: no limit), speeds
    (relative to llama.cpp's, by number of tokens), and both in one line.
    """
    status = kernels.status()
    found = {}
    for kind, times in status.times.items():
        if kind in types:
            most = status.limits.get(kind)
            found[kind] = {
                "most_tokens": most,
                "speeds": {str(n): round(times.speed(n), 3) for n in times.sizes},
                "summary": choice.describe(times, most),
            }
    return found


def processor() -> str:
    """The model name of the processor, or its architecture if the system does not report a name."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor() or platform.machine()


def peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
