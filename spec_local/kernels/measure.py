"""Time products with the kernels and with llama.cpp's own, to choose between them on this machine (`choice`).

``specdec doctor --fix`` calls `measure` once per machine, after the kernels were compiled. The result is
stored next to the library. Products are timed in a child process,
``python -m spec_local.kernels.measure LIBRARY INSTRUCTION_SET TYPES CORES OTHER_READING``.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_local.kernels import records
from spec_local.kernels.choice import FLOAT_SIZES, FLOATS, PACKED, SIZES, OtherReading, Times, is_clear
from spec_local.kernels.native import Native
from spec_local.system import json_file, machine
from spec_local.system.child_process import child_main, run_child

TYPES = (*PACKED, *FLOATS)
UNMEASURED = {"F16": 8, "F32": 32}
"""The limits before a measurement: those of a Zen 3 with two cores."""

_REPEATS = 8  # of disturbed measurements, for all types together: half a minute becomes a minute at most
_FEW_ROUNDS, _MORE_ROUNDS, _MOST_ROUNDS = 3, 4, 15  # more until all rounds agree, or there are so many

# By length of a row. Of a layer's weights, the greater part have rows as long as a hidden state; those of the
# second feed-forward matrix have longer ones. Each is timed in turns with llama.cpp's copy of it. Both copies
# are more than the caches of most processors hold, as a model's weights are: 13 MB were read from the
# third-level cache of a Zen 3 (32 MB), at 42 GB/s where its memory delivers 29.
_BYTES = {2048: 54 << 20, 8192: 40 << 20}
# From so many tokens on, computing takes longer than reading, and fewer rows are enough.
_MANY_TOKENS, _ROWS_FOR_MANY = 64, {2048: 1024, 8192: 256}
# The number of rows, as in models: llama.cpp has no fast code for odd ones.
_MULTIPLE = 256

_LASTS = 86_400.0  # seconds for which a measurement is not repeated, whatever sessions find

# Two ways of reading weights from memory, of packed and of floating-point ones. Processors differ in which is
# faster, and nothing they report says so: both are tried, with sizes that take as long as reading does.
_READ_TYPES, _READ_SIZES = {"packed": ("Q4_K", "Q8_0"), "floats": ("F16", "F32")}, (1, 2, 3)
_READ_ROUNDS = 16

Timer = Callable[[str, Sequence[int], int], NDArray[np.float64]]
"""(type, sizes, rounds) -> seconds (rounds, sizes, 2): with the kernels, and with llama.cpp's own; or with
kernels that read weights in the first way, and in the second."""


class MeasuredTimes(json_file.JsonRecord):
    """What was measured on one machine.

    times: by type; a type is missing if other programs disturbed it. when: seconds since 1970.
    other_reading: of weights, in another way. doubts: types whose calls took another time in a later session.
    """

    times: dict[str, Times]
    when: float
    other_reading: OtherReading = OtherReading()
    doubts: tuple[str, ...] = ()


def recorded(library: Path, instruction_set: str) -> MeasuredTimes | None:
    """Return what was measured on this machine, or None if nothing was."""
    found = records.read(library, MeasuredTimes, _name(instruction_set))
    return next((record for record in found if record.times.keys() <= set(TYPES)), None)


def measure(library: Path, instruction_set: str, types: Collection[str], most_others: float) -> str | None:
    """Time products with some types and store the times; all types take half a minute, and several cores.

    How weights are read is chosen when all types are timed.

    Args:
        most_others: see `timed`.

    Returns None on success, otherwise the reason for the failure in one line.
    """
    known = recorded(library, instruction_set)
    read = known.other_reading.model_dump_json() if known and set(types) < set(TYPES) else ""
    arguments = [str(library), instruction_set, ",".join(types), str(most_others), read]
    result = run_child("spec_local.kernels.measure", *arguments)
    if not result.works:
        return result.error or f"the measurement crashed: {result.crash}"
    times = {name: Times.model_validate(each) for name, each in result.facts["times"].items()}
    if times or known:  # without its doubts: sessions on a busy machine do not try again and again
        all_times = {**(known.times if known else {}), **times}
        other = OtherReading.model_validate(result.facts["other"])
        found = MeasuredTimes(times=all_times, when=time.time(), other_reading=other)
        if reason := _write(library, instruction_set, found):
            return reason
    if disturbed := [name for name in types if name not in times]:
        return f"other programs used the cores: try again when they are idle ({', '.join(disturbed)})"
    return None


def doubt(library: Path, instruction_set: str, types: Collection[str]) -> None:
    """Have these types measured again when the next session begins, but at most once a day."""
    known = recorded(library, instruction_set)
    if known and time.time() - known.when > _LASTS and known.times.keys() & set(types):
        doubts = tuple(sorted(known.times.keys() & set(types)))
        _write(library, instruction_set, known.model_copy(update={"doubts": doubts}))


def _write(library: Path, instruction_set: str, record: MeasuredTimes) -> str | None:
    try:
        records.write(library, record, _name(instruction_set))
    except OSError as error:
        return f"{records.paths(library)[-1].parent} cannot be written: {error.strerror}"
    return None


def _name(instruction_set: str) -> str:
    return f"-{instruction_set}-{records.machine_digest()}-{machine.default_threads()}-threads"


def timed(
    timer: Timer,
    types: Collection[str],
    most_others: float,
    others: Callable[[], machine.OtherPrograms] = machine.OtherPrograms,
) -> dict[str, Times]:
    """Time products with some types, in rounds, until it is clear whose kernels are faster.

    A type is timed again if other programs used more than `most_others` cores meanwhile. Without a type: it
    was disturbed too often.
    """
    found: dict[str, Times] = {}
    repeats = 0
    for name in types:
        while name not in found and repeats <= _REPEATS:
            programs = others()
            times = _timed(timer, name)
            if programs.cores() > most_others:
                repeats += 1
            else:
                found[name] = times
    return found


def _timed(timer: Timer, name: str) -> Times:
    """The median times of a type, of as many rounds as are necessary."""
    sizes = FLOAT_SIZES if name in FLOATS else SIZES
    rounds = timer(name, sizes, _FEW_ROUNDS)
    while len(rounds) < _MOST_ROUNDS and not is_clear(name, [_times(sizes, each) for each in rounds]):
        rounds = np.concatenate([rounds, timer(name, sizes, _MORE_ROUNDS)])
    return _times(sizes, np.median(rounds, axis=0))


def _times(sizes: Sequence[int], seconds: NDArray[np.float64]) -> Times:
    return Times(sizes=tuple(sizes), kernels=tuple(seconds[:, 0]), llama_cpp=tuple(seconds[:, 1]))


def relative_time(timer: Timer, types: Collection[str]) -> float:
    """The time of products that read weights in the second way, relative to the first: a median of rounds."""
    seconds = np.array([timer(name, _READ_SIZES, _READ_ROUNDS) for name in types])
    return float(np.median(np.mean(seconds[..., 1] / seconds[..., 0], axis=-1)))


def timer_of(native: Native, threads: int, readings: bool = False) -> Timer:
    """Return a function that times products of matrices of a model's size, with an installed library.

    readings: time two ways of reading weights.
    """

    import gguf

    def timer(name: str, sizes: Sequence[int], rounds: int) -> NDArray[np.float64]:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        found: list[NDArray[np.float64]] = []
        for is_many in (False, True):
            some = [n for n in sizes if (n >= _MANY_TOKENS) == is_many]
            if not some:
                continue
            total = np.zeros((rounds, len(some), 2))
            for length, n_bytes in _BYTES.items():
                fitting = n_bytes // (length // block * size) // _MULTIPLE * _MULTIPLE
                n_rows = min(fitting, _ROWS_FOR_MANY[length]) if is_many else fitting
                # As if there were as many rows as for few tokens, so that all times are of the same matrices.
                seconds = native.time(name, n_rows, length, some, threads, rounds, readings)
                total += seconds * (fitting / n_rows)
            found.append(total)
        return np.concatenate(found, axis=1)

    return timer


def _measure(library: str, instruction_set: str, types: str, most_others: str, read: str) -> dict[str, Any]:
    import llama_cpp  # noqa: F401  (the kernels link to the libraries it loads)

    native = Native(Path(library))
    if reason := native.install(instruction_set):
        return {"error": reason}
    threads = machine.default_threads()
    if read:
        other = OtherReading.model_validate_json(read)
    else:
        both = timer_of(native, threads, readings=True)
        other = OtherReading(**{kind: relative_time(both, names) for kind, names in _READ_TYPES.items()})
    native.read_as(*other.chosen)
    found = timed(timer_of(native, threads), types.split(","), float(most_others))
    return {"other": other.model_dump(), "times": {name: times.model_dump() for name, times in found.items()}}


if __name__ == "__main__":
    child_main(lambda: _measure(*sys.argv[1:]))
