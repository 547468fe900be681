"""This machine: its processor, what other programs use of it, and the installed build of llama.cpp."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from spec_local.system.processors import usable_processors
from spec_local.text import counted

# A share of the cores. A call waits for its slowest thread, so that other programs on a tenth of the cores
# slow it down by about a tenth, which is more than many differences that are measured.
_BUSY = 0.1
_PRIVATE_DOMAINS = (".local", ".internal", ".home.arpa")  # RFC 6762, ICANN 2024, RFC 8375


# Features of Arm processors as Linux spells them: the word in the auxiliary vector (AT_HWCAP, AT_HWCAP2) and
# the bit in it, and the name on macOS.
_ARM_FEATURES = {
    "asimd": (16, 1, "AdvSIMD"),
    "asimddp": (16, 20, "FEAT_DotProd"),
    "i8mm": (26, 13, "FEAT_I8MM"),
}


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the instruction sets that the processor reports, spelled as on Linux; empty if unknown."""
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    if sys.platform == "darwin":
        return _macos_features(is_arm)
    if is_arm:  # not from /proc/cpuinfo, which may be that of the machine that emulates this one
        with contextlib.suppress(OSError):
            vector = memoryview(Path("/proc/self/auxv").read_bytes()).cast("L")
            return arm_features(dict(zip(vector[::2], vector[1::2], strict=True)))
        return frozenset()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def arm_features(auxiliary: Mapping[int, int]) -> frozenset[str]:
    """Return those features of an Arm processor that matter here.

    Args:
        auxiliary: words of Linux's auxiliary vector, by their number.
    """
    return frozenset(
        name for name, (word, bit, _) in _ARM_FEATURES.items() if auxiliary.get(word, 0) >> bit & 1
    )


def _macos_features(is_arm: bool) -> frozenset[str]:
    names = ["hw.optional.arm"] if is_arm else ["-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        output = subprocess.run(["sysctl", *names], capture_output=True, text=True, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    if is_arm:
        return frozenset(
            name for name, (_, _, theirs) in _ARM_FEATURES.items() if re.search(rf"\b{theirs}: 1\b", output)
        )
    return frozenset(re.sub(r"sse4\.2", "sse4_2", output.lower()).split())


def default_threads() -> int:
    """Return the number of physical cores that may be used: most machines decode more slowly with more."""
    return usable_processors().cores


def llama_cpp_folder() -> Path:
    """Return the folder of the installed ``llama_cpp`` package, without importing it.

    Raises:
        ModuleNotFoundError: llama-cpp-python is not installed.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if not spec or not spec.origin:
        raise ModuleNotFoundError("llama-cpp-python is not installed")
    return Path(spec.origin).parent


def llama_cpp_build() -> str:
    """Identify the installed build by the binding's version and the size and time of its ggml libraries."""
    stamp = [
        f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}"
        for f in sorted((llama_cpp_folder() / "lib").glob("libggml*"))
    ]
    return f"{binding_version()} {' '.join(stamp)}"


@functools.cache  # reading it takes 4 ms
def binding_version() -> str:
    """Return the version of the installed llama-cpp-python."""
    return importlib.metadata.version("llama-cpp-python")


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name localhost, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names() -> list[str]:
    """Return the names of this machine that nobody can register: without a domain, and in private ones.

    Its full name may have been given by the network that it is in.
    """
    full = socket.gethostname().lower().removesuffix(".")
    short = full.partition(".")[0]
    return [short, f"{short}.local", *([full] if full.endswith(_PRIVATE_DOMAINS) else [])]


class OtherPrograms:
    """The processor time that other programs have used since this object was created."""

    def __init__(self) -> None:
        self._start, self._used = time.monotonic(), _used_by_others()

    def cores(self) -> float:
        """Number of cores that they used on average."""
        return max(0.0, _used_by_others() - self._used) / max(time.monotonic() - self._start, 1e-3)

    @classmethod
    def now(cls, seconds: float = 0.3) -> float:
        """Number of cores that they use now, in a pause of so many seconds: systems count in hundredths."""
        programs = cls()
        time.sleep(seconds)
        return programs.cores()


def is_busy(other_programs: float) -> bool:
    """Return whether other programs use so many cores that they disturb measurements."""
    return other_programs > _BUSY * default_threads()


def used_by_others(cores: float) -> str:
    """Return in words how many cores other programs used on average."""
    return f"other programs used {cores:.1f} of {counted(default_threads(), 'core')}"


def _used_by_others() -> float:
    """Seconds of all cores since the system started, without those of this process and its children."""
    whole = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # macOS has the first three
    own = os.times()
    return sum(getattr(whole, name, 0.0) for name in names) - sum(own[:4])
