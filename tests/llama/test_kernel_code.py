"""The compiler keeps what the kernels multiply in registers, which the code shows without measuring."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

from spec_local.kernels import build
from spec_local.system import native_build

# Totals of simple types lie in memory: a load and a store for each eight dot products. With up to four
# columns, those of K-quants do, too, since both halves of a line are multiplied together: for each four.
LIMIT, LIMIT_OF_BOTH_HALVES = 0.5, 0.75
SEVERAL = 32  # dot products in a loop: more than in those that add up sums


@pytest.mark.slow
@pytest.mark.parametrize("name", list(build.INSTRUCTION_SETS))
def test_kernels_do_not_spill(name, tmp_path, monkeypatch):
    if build.unsupported() or not shutil.which("objdump") or not native_build.compiler():
        pytest.skip("needs a compiler and objdump for x86-64")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    kernel_code = importlib.import_module("kernel_code")
    objects = kernel_code.objects(build.SOURCES, tmp_path, [name])
    found = [
        loop
        for loop in kernel_code.loops(name, objects[name])
        if loop.kernel.startswith("multiply_") and loop.n_dots >= SEVERAL
    ]
    assert len(found) > 30  # most types, for several numbers of columns
    few = re.compile(r"multiply_.*, [1-4]>")

    def limit(loop):
        return LIMIT_OF_BOTH_HALVES if few.match(loop.kernel) and "avx512" not in name else LIMIT

    assert [loop for loop in found if loop.stack_per_dot > limit(loop)] == []
