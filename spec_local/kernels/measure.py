"""Measure which products are left to llama.cpp, because its own kernels are faster on this machine.

``specdec doctor --fix`` calls `measure` once per machine, after the kernels were compiled. The result is
stored next to the library. Products are timed in a child process,
``python -m spec_local.kernels.measure LIBRARY INSTRUCTION_SET``.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from spec_local.kernels import records
from spec_local.kernels.native import Native
from spec_local.system import machine
from spec_local.system.child_process import child_main, run_child

PACKED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)
FLOATS = ("F16", "BF16", "F32")
PACKED_SIZES = (1, 2, 4, 8, 16, 64, 512)
FLOAT_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
UNMEASURED = {"F16": 8, "F32": 32}
"""The limits before a measurement: those of a Zen 3 with two cores."""

LEAST_SPEED = 0.98
"""Of llama.cpp's, in the median. Medians of repeated measurements differ by about a hundredth."""
_MOST_OTHERS = 0.5  # cores that other programs use: with more, rounds disagree, and losses are not seen
_FEW_ROUNDS, _MANY_ROUNDS = 3, 15  # the latter for sizes at which the former found less than a clear gain
_CLEAR = 1.05
_MANY_LOST = 0.8  # of the many rounds, each slower than llama.cpp's; by chance half of them are

# By length of a row. Of a layer's weights, two thirds have rows as long as a hidden state; a third, those of
# the second feed-forward matrix, have longer ones. Together they are more than the caches of most processors
# hold, as a model's weights are.
_BYTES = {2048: 27 << 20, 8192: 13 << 20}
# From so many tokens on, computing takes longer than reading, and fewer rows are enough.
_MANY_TOKENS, _ROWS_FOR_MANY = 64, {2048: 1024, 8192: 256}
# The number of rows, as in models: llama.cpp has no fast code for odd ones.
_MULTIPLE = 256

Speeds = Callable[[str, Sequence[int], int], Sequence[Sequence[float]]]
"""(type, sizes, rounds) -> for each size, the speed as a multiple of llama.cpp's in each round."""


class _Record(BaseModel):
    """The stored result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: dict[str, int]


def recorded(library: Path, instruction_set: str) -> dict[str, int] | None:
    """Return the limits that were measured on this machine (see `decide`), or None if none were."""
    found = (record.limits for record in records.read(library, _Record, _name(instruction_set)))
    return next((limits for limits in found if limits.keys() <= {*PACKED, *FLOATS}), None)


def measure(library: Path, instruction_set: str) -> str | None:
    """Measure the limits and store them; this takes about half a minute, and several cores.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    others = machine.OtherPrograms()
    result = run_child("spec_local.kernels.measure", str(library), instruction_set)
    if not result.works:
        return result.error or f"the measurement crashed: {result.crash}"
    if (cores := others.cores()) > _MOST_OTHERS:
        return f"other programs used {cores:.1f} cores meanwhile: try again when the machine is idle"
    try:
        records.write(library, _Record(limits=result.facts["limits"]), _name(instruction_set))
    except OSError as error:
        return f"{records.paths(library)[-1].parent} cannot be written: {error.strerror}"
    return None


def _name(instruction_set: str) -> str:
    return f"-{instruction_set}-{records.machine_digest()}-{machine.default_threads()}-threads"


def decide(speeds: Speeds) -> dict[str, int]:
    """Return the most tokens per call for which the kernels are used, for each type that has a limit.

    A type that is packed when a model is loaded is used for all sizes or, if it is slower for any, for none:
    0. A floating-point type is used up to the largest size below the first that is slower.
    """
    found = {name: 0 for name in PACKED if _lost(speeds, name, PACKED_SIZES)}
    for name in FLOATS:
        if lost := _lost(speeds, name, FLOAT_SIZES):
            found[name] = max((n for n in FLOAT_SIZES if n < min(lost)), default=0)
    return found


def _lost(speeds: Speeds, name: str, sizes: Sequence[int]) -> list[int]:
    """Return the sizes at which a type is slower than with llama.cpp's kernels."""
    few = speeds(name, sizes, _FEW_ROUNDS)
    unclear = [n for n, found in zip(sizes, few, strict=True) if statistics.median(found) < _CLEAR]
    many = speeds(name, unclear, _MANY_ROUNDS) if unclear else []
    return [
        n
        for n, found in zip(unclear, many, strict=True)
        if statistics.median(found) < LEAST_SPEED and sum(f < 1 for f in found) >= _MANY_LOST * len(found)
    ]


def measured(native: Native, threads: int) -> Speeds:
    """Return a function that times products of matrices of a model's size, with an installed library."""

    import gguf

    def speeds(name: str, sizes: Sequence[int], rounds: int) -> list[list[float]]:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        found: list[list[float]] = []
        for is_many in (False, True):
            some = [n for n in sizes if (n >= _MANY_TOKENS) == is_many]
            if not some:
                continue
            total = np.zeros((rounds, len(some), 2))  # seconds with the kernels, and without
            for length, n_bytes in _BYTES.items():
                fitting = n_bytes // (length // block * size) // _MULTIPLE * _MULTIPLE
                n_rows = _ROWS_FOR_MANY[length] if is_many else fitting
                total += native.time(name, n_rows, length, some, threads, rounds)
            found += (total[..., 1] / total[..., 0]).T.tolist()
        return found

    return speeds


def _measure(library: str, instruction_set: str) -> dict[str, Any]:
    import llama_cpp  # noqa: F401  (the kernels link to the libraries it loads)

    native = Native(Path(library))
    if reason := native.install(instruction_set):
        return {"error": reason}
    return {"limits": decide(measured(native, machine.default_threads()))}


if __name__ == "__main__":
    child_main(lambda: _measure(*sys.argv[1:]))
