"""The compiler keeps what the kernels multiply in registers, which the code shows without measuring."""

import bisect
import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spec_local.kernels import build

# Totals of simple types lie in memory: a load and a store for each eight dot products. With up to four
# columns, those of K-quants do, too, since both halves of a line are multiplied together: for each four.
LIMIT, LIMIT_OF_BOTH_HALVES = 0.5, 0.75
SEVERAL = 32  # dot products in a loop: more than in those that add up sums
FEW_COLUMNS = re.compile(r"multiply_\w+<.*, [1-4]>")


@pytest.fixture
def loops(monkeypatch):
    """The loops of the compiled library that multiply, by the source file of the instruction set."""
    library = build.built()
    if not library or not shutil.which("objdump"):
        pytest.skip("needs the compiled kernels and objdump")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    kernel_code = importlib.import_module("kernel_code")
    symbols = subprocess.run(["objdump", "-t", str(library)], capture_output=True, text=True, check=True)
    functions, file = [], ""
    for line in symbols.stdout.splitlines():
        match line.split():
            case [_, "l", "df", "*ABS*", _, file]:
                pass
            case [address, "l", "F", ".text", *_]:
                functions.append((int(address, 16), file))
    functions.sort()
    found = {}
    for loop in kernel_code.loops("", library):
        if "::multiply_" in loop.function and loop.n_dots >= SEVERAL:
            _, file = functions[bisect.bisect(functions, (loop.dot, "~")) - 1]
            found.setdefault(file, []).append(loop)
    return found


def test_kernels_do_not_spill(loops):
    assert set(loops) == {"avx2.cpp", "avxvnni.cpp", "avx512.cpp"}
    for file, found in loops.items():
        assert len(found) > 30  # most types, for several numbers of columns
        for loop in found:
            is_few = FEW_COLUMNS.search(loop.function) and file != "avx512.cpp"
            assert loop.stack_per_dot <= (LIMIT_OF_BOTH_HALVES if is_few else LIMIT), (file, loop)
