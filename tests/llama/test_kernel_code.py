"""The compiler keeps what the kernels multiply in registers, which the code shows without measuring."""

import bisect
import importlib
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spec_local.kernels import build

# Totals of simple types lie in memory: a load and a store for each eight dot products. With up to four
# columns, those of K-quants do, too, since both halves of a line are multiplied together: for each four. With
# one column, a Q6_K also stores lines whose upper bits are used later: 1.27 times as fast as without (Zen 3).
LIMIT, LIMIT_OF_BOTH_HALVES = 0.5, 1.0
SEVERAL = 32  # dot products in a loop: more than in those that add up sums
FEW_COLUMNS = re.compile(r"multiply_\w+<.*, [1-4]>")
# Kernels whose weights are in the cache, unpacked or read by another one before.
FROM_CACHE = re.compile(r"::multiply_(super_block|blocks|two_tiles)<")


def own_architecture():
    disassembly = importlib.import_module("disassembly")
    return next(a for a in (disassembly.X86, disassembly.ARM) if platform.machine().lower() in a.names)


@pytest.fixture
def library(monkeypatch):
    """The compiled library."""
    path = build.built()
    if not path or not shutil.which("objdump"):
        pytest.skip("needs the compiled kernels and objdump")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return path


@pytest.fixture
def loops(library):
    """The loops of the compiled library that multiply, by the source file of the instruction set."""
    kernel_code = importlib.import_module("kernel_code")
    architecture = own_architecture()
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
    for loop in kernel_code.loops("", library, architecture=architecture):
        if "::multiply_" in loop.function and loop.n_dots >= SEVERAL:
            _, file = functions[bisect.bisect(functions, (loop.dot, "~")) - 1]
            found.setdefault(file, []).append(loop)
    return found


def test_kernels_do_not_spill(loops):
    sets = importlib.import_module("disassembly").SETS.values()
    assert set(loops) == {source for source, architecture in sets if architecture is own_architecture()}
    for file, found in loops.items():
        assert len(found) > 30  # most types, for several numbers of columns
        for loop in found:
            is_few = FEW_COLUMNS.search(loop.function) and file != "avx512.cpp"
            assert loop.stack_per_dot <= (LIMIT_OF_BOTH_HALVES if is_few else LIMIT), (file, loop)


def test_kernels_prefetch(library):
    # GCC drops a call of a function that does nothing but prefetch if it does not inline it.
    disassembly = importlib.import_module("disassembly")
    n = 0
    for code in disassembly.functions(library, own_architecture()):
        if FROM_CACHE.search(code.function):
            continue
        if "::multiply_" in code.function and any(len(code.dots(b)) >= SEVERAL for b in code.loops.values()):
            assert any(i.name.startswith(("prefetch", "prfm")) for i in code.instructions()), code.function
            n += 1
    assert n > 100
