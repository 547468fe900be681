"""Matrix kernels for small batches on x86-64 and Arm64 that replace those of llama.cpp.

The C++ sources are in this folder. ``specdec doctor --fix`` compiles them (`spec_local.kernels.build`), and a
self-test selects the instruction set (`spec_local.kernels.check`). This module loads the library once per
process, before the first model. The kernels are optional: if they cannot be used, `status` gives the reason,
and llama.cpp uses its own.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from spec_local.kernels.native import Native

Mode = Literal["auto", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)
VARIABLE = "SPECDEC_KERNELS"
"""The environment variable that holds the mode; child processes inherit it."""
INSTRUCTION_SET = "SPECDEC_INSTRUCTION_SET"
"""The environment variable that names the instruction set to use, for measurements; else the best one."""

_OFF = "--kernels off"
_FIX = "run specdec doctor --fix"


@dataclass(frozen=True, slots=True)
class Status:
    """The instruction set whose kernels are used, or None and a one-line reason.

    limits: the most tokens per call of products that the kernels compute, for types of weights that have such
    a limit. measured: whether the limits were measured on this machine.
    """

    instruction_set: str | None
    reason: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    measured: bool = False

    def __str__(self) -> str:
        return self.instruction_set or f"not used ({self.reason})"


@dataclass(slots=True)
class _State:
    """State of the kernels in this process.

    found: the status and library that `_look` returned. loaded: the result of `load`, after it has run.
    native: the library, if it is installed in llama.cpp.
    """

    found: tuple[Status, Path | None] | None = None
    loaded: Status | None = None
    native: "Native | None" = None


_state = _State()


def mode() -> Mode:
    """Return whether the kernels may be used in this process and its children."""
    return "off" if os.environ.get(VARIABLE) == "off" else "auto"


def use(mode: Mode) -> None:
    """Enable the kernels where they work, or disable them, in this process and its children.

    Call this before the first model is opened. A later call determines whether the weights of models opened
    afterwards are packed, and whether all models use the kernels for F16 weights and attention. Do not call
    it while a model is computing. Kernels that were off when llama.cpp was loaded stay off.
    """
    os.environ[VARIABLE] = mode
    if _state.native:
        _state.native.enable(mode == "auto")


def load() -> None:
    """Install the kernels if they are enabled and work. Called once, by `runtime.library`. Never raises."""
    found, library = (Status(None, _OFF), None) if mode() == "off" else _found()
    if found.instruction_set and library:
        from spec_local.kernels.native import Native

        try:
            native = Native(library)
            if reason := native.install(found.instruction_set):
                found = Status(None, reason)
            else:
                _state.native = native
                for kind, most in found.limits.items():
                    native.limit(kind, most)
        except Exception as error:  # the library cannot be opened or lacks a function
            found = Status(None, _one_line(error))
    _state.loaded = found


def installed() -> "Native | None":
    """Return the library if this process uses it."""
    return _state.native if mode() == "auto" else None


def status() -> Status:
    """Return which kernels this process uses, or would use if it loaded llama.cpp now. Never raises."""
    if mode() == "off":
        return Status(None, _OFF)
    return _state.loaded or _found()[0]


def missing() -> str | None:
    """Return why enabled kernels are not used on a machine that could run them, or None."""
    from spec_local.kernels.build import unsupported

    return None if mode() == "off" or unsupported() else status().reason


def identity() -> str:
    """Return an identifier of the kernels in use, such as ``avx2:0123456789abcdef``, or an empty string."""
    used = status().instruction_set
    if not used:
        return ""
    library = _found()[1]
    assert library
    return f"{used}:{library.stem.rpartition('-')[2]}"


def rebuild() -> str | None:
    """Compile the kernels for processes that have not loaded them yet: the best that work on this machine.

    Returns None on success, otherwise the reason for the failure.
    """
    from spec_local.kernels import build

    try:
        for name in build.reported():
            _state.found = None
            if (reason := build.build((name,))) or _found()[0].instruction_set:
                return reason  # else the processor lacks what it reports
        return build.unsupported()
    except Exception as error:  # for example, CXX cannot be parsed
        return _one_line(error)


def measure_limits() -> str | None:
    """Measure which products llama.cpp's kernels compute faster, for processes that have not loaded them yet.

    Returns None on success, otherwise the reason for the failure.
    """
    from spec_local.kernels import measure

    if mode() == "off":
        return _OFF
    found, library = _found()
    if not found.instruction_set or not library:
        return found.reason
    try:
        return measure.measure(library, found.instruction_set)
    finally:
        _state.found = None


def _found() -> tuple[Status, Path | None]:
    if _state.found is None:
        try:
            _state.found = _look()
        except Exception as error:  # for example, llama.cpp is not installed
            _state.found = Status(None, _one_line(error)), None
    return _state.found


def _look() -> tuple[Status, Path | None]:
    from spec_local.kernels import build, check

    if reason := build.unsupported():
        return Status(None, reason), None
    library = build.built()
    if library is None:
        what = "built for another version of specdec or llama.cpp" if build.outdated() else "not built"
        return Status(None, f"{what}: {_FIX}"), None
    if forced := os.environ.get(INSTRUCTION_SET):
        if forced not in build.instruction_sets():
            return Status(None, f"{INSTRUCTION_SET} is none of {', '.join(build.instruction_sets())}"), None
        if reason := check.failure(library, forced):
            return Status(None, f"the self-test failed with {forced}: {reason}"), None
        return _with_limits(forced, library), library
    record = check.verdict(library)
    if record.instruction_set is None:
        tests = "; ".join(f"{name}: {result}" for name, result in record.self_tests.items())
        return Status(None, f"the self-test failed with {tests}"), None
    return _with_limits(record.instruction_set, library), library


def _with_limits(instruction_set: str, library: Path) -> Status:
    from spec_local.kernels import measure

    limits = measure.recorded(library, instruction_set)
    if limits is None:
        return Status(instruction_set, None, measure.UNMEASURED)
    return Status(instruction_set, None, limits, measured=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
