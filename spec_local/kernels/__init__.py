"""Matrix kernels for small batches on x86-64 and Arm64 that replace those of llama.cpp.

The C++ sources are in this folder. ``specdec doctor --fix`` compiles them (`spec_local.kernels.build`), and a
self-test selects the instruction set (`spec_local.kernels.check`). This module loads the library once per
process, before the first model. The kernels are optional: if they cannot be used, `status` gives the reason,
and llama.cpp uses its own.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from spec_local.text import counted

if TYPE_CHECKING:
    from spec_local.kernels.choice import OtherReading, Times
    from spec_local.kernels.native import Native

Mode = Literal["auto", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)
VARIABLE = "SPECDEC_KERNELS"
"""The environment variable that holds the mode; child processes inherit it."""
INSTRUCTION_SET = "SPECDEC_INSTRUCTION_SET"
"""The environment variable that names the instruction set to use, for measurements; else the best one."""

_OFF = "`kernels=off`"
_NO_LIMIT = 1 << 40  # tokens
_FIX = "run specdec doctor --fix"


@dataclass(frozen=True, slots=True)
class Status:
    """The instruction set whose kernels are used, or None and a one-line reason.

    limits: the most tokens per call of products that the kernels compute, for types of weights that have such
    a limit. times: what they were chosen from, by type; empty if nothing was measured on this machine.
    other_reading: of reading weights in another way; None if that was not measured.
    doubts: types whose calls took another time in a session.
    """

    instruction_set: str | None
    reason: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    times: "Mapping[str, Times]" = field(default_factory=dict)
    other_reading: "OtherReading | None" = None
    doubts: Sequence[str] = ()

    @property
    def measured(self) -> bool:
        """Whether all types were measured on this machine."""
        from spec_local.kernels.measure import TYPES

        return self.times.keys() >= set(TYPES)

    def varying(self, types: Collection[str], cache_type: str) -> list[str]:
        """What makes a model's logits depend on the number of tokens in a call; empty: its bits are the same.

        Args:
            types: of its weights, but for those that take next to no memory, such as norms.
            cache_type: of its KV cache.
        """
        from spec_local.kernels.choice import FLOATS, MOST_FLOAT_TOKENS, PACKED

        if not self.instruction_set:
            return ["llama.cpp's kernels"]
        found = []
        for kind in sorted(types):
            if kind in FLOATS:
                most = min(self.limits.get(kind, MOST_FLOAT_TOKENS), MOST_FLOAT_TOKENS)
                calls = f"in calls of more than {counted(most, 'token')}" if most else "weights"
                found.append(f"{kind} {calls}")
            elif kind not in PACKED or self.limits.get(kind) == 0:
                found.append(f"{kind} weights")
        return found + [f"a {cache_type} cache"] * (cache_type not in ("f16", "q8_0"))

    def __str__(self) -> str:
        return self.instruction_set or f"not used ({self.reason})"


@dataclass(slots=True)
class _State:
    """State of the kernels in this process.

    found: the status and library that `_look` returned. loaded: the result of `load`, after it has run.
    native: the library, if it is installed in llama.cpp. used: the same, while the kernels are enabled.
    """

    found: tuple[Status, Path | None] | None = None
    loaded: Status | None = None
    native: "Native | None" = None
    used: "Native | None" = None


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
        _state.used = _state.native if mode == "auto" else None


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
                _state.native = _state.used = native
                _configure(native, found)
        except Exception as error:  # the library cannot be opened or lacks a function
            found = Status(None, _one_line(error))
    _state.loaded = found


def installed() -> "Native | None":
    """Return the library if this process uses it."""
    return _state.used


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
    """Return an identifier of the kernels in use and what is left to llama.cpp, or an empty string.

    For example, ``avx2:0123456789abcdef:F16-8``: calls of more than 8 tokens with F16 weights are left to it.
    """
    used = status().instruction_set
    if not used:
        return ""
    library = _found()[1]
    assert library
    left = "".join(f":{kind}-{most}" for kind, most in sorted(status().limits.items()))
    return f"{used}:{library.stem.rpartition('-')[2]}{left}"


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


def compare(types: Collection[str] | None = None, most_others: float = 0.5) -> str | None:
    """Measure whose kernels are faster, for some types (by default all), and use the result from now on.

    Models that are open keep theirs. Returns None on success, otherwise the reason for the failure.

    Args:
        most_others: cores that other programs may use meanwhile; with more, a type is measured again.
    """
    from spec_local.kernels import measure

    if mode() == "off":
        return _OFF
    found, library = _found()
    if not found.instruction_set or not library:
        return found.reason
    try:
        return measure.measure(library, found.instruction_set, types or measure.TYPES, most_others)
    finally:
        _state.found = None
        if _state.native and _state.loaded and _state.loaded.instruction_set:
            _state.loaded = _with_limits(_state.loaded.instruction_set, library)
            _configure(_state.native, _state.loaded)


def doubt(types: Collection[str]) -> None:
    """Have these types measured again, since their calls took another time; see `measure.doubt`."""
    from spec_local.kernels import measure

    found, library = _found()
    if found.instruction_set and library:
        measure.doubt(library, found.instruction_set, types)


def _configure(native: "Native", status: Status) -> None:
    from spec_local.kernels.measure import TYPES

    native.read_as(*(status.other_reading.chosen if status.other_reading else (0, 0)))
    for kind in TYPES:
        native.limit(kind, status.limits.get(kind, _NO_LIMIT))


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
    from spec_local.kernels import choice, measure

    known = measure.recorded(library, instruction_set)
    if known is None:
        return Status(instruction_set, None, measure.UNMEASURED)
    before = {kind: most for kind, most in measure.UNMEASURED.items() if kind not in known.times}
    limits = before | choice.limits(known.times)
    return Status(instruction_set, None, limits, known.times, known.other_reading, known.doubts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
