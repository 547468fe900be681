"""Count the instructions and the stack accesses of the CPU kernels, for each dot product.

    python benchmarks/kernel_code.py [FOLDER] [--instruction-set avx2] [--above 0.2]

The kernels of each instruction set are compiled as `specdec doctor --fix` compiles them, and disassembled by
objdump. No quiet machine is needed, and the processor need not execute them: with a cross compiler (Debian:
g++-aarch64-linux-gnu), also those for Arm. FOLDER: sources other than the installed ones.

Only loops are counted: what comes before and after them (saving registers, the results) is not. A loop is
found in the control flow (a jump back to a block through which every path to the jump leads). Each row of the
table is an innermost loop that has dot products. An instruction counts once, however often it runs; loops of
a fixed length are usually unrolled.

- dot product: an instruction that multiplies codes (vpmaddubsw, vpdpbusd, sdot, smmla); where there are none,
  one that multiplies numbers (vfmadd…ps, vdpbf16ps, fmla).
- stack access: an operand in memory relative to the stack pointer, or to the frame pointer if there is one.
- around: stack accesses in the loops around it, which run less often.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import table
from disassembly import SETS, X86, Architecture, Code, Instruction, compilable, functions, kernels, objects

from spec_local.kernels import build

LIMIT = 0.2  # stack accesses per dot product: at most one for each pass over five columns


@dataclass(slots=True)
class Loop:
    """An innermost loop with dot products. dot: address of the first. around: see above."""

    instruction_set: str
    function: str
    dot: int
    n_dots: int
    n_instructions: int
    n_stack: int
    around: int
    kernel: str = ""

    @property
    def stack_per_dot(self) -> float:
        return self.n_stack / self.n_dots


def loops(
    instruction_set: str, path: Path, folder: Path = build.SOURCES, architecture: Architecture = X86
) -> list[Loop]:
    """Return the loops with dot products of an object file that was compiled from the sources in a folder."""
    found = [loop for code in functions(path, architecture) for loop in _loops(instruction_set, code)]
    names = kernels(path, architecture, [loop.dot for loop in found], folder / "layout.h")
    for loop, kernel in zip(found, names, strict=True):
        loop.kernel = kernel
    return found


def _loops(instruction_set: str, code: Code) -> Iterator[Loop]:
    with_dots = code.loops_with_dots()
    for header in with_dots:
        body = code.loops[header]
        if any(other in body and other != header for other in with_dots):
            continue  # it has an inner loop
        own, dots = code.instructions(body), code.dots(body)
        outer = set().union(*(code.loops[other] for other in with_dots if header in code.loops[other]))
        inner = set().union(*(code.loops[other] for other in with_dots if header not in code.loops[other]))
        yield Loop(
            instruction_set,
            code.function,
            dots[0].address,
            len(dots),
            len(own),
            _n_stack(code, own),
            _n_stack(code, code.instructions(outer - body - inner)),
        )


def _n_stack(code: Code, instructions: Sequence[Instruction]) -> int:
    a = code.architecture
    has_frame = any((i.name, i.operands) == a.frame for i in code.instructions())
    operand = a.in_frame if has_frame else a.on_stack
    return sum(not i.name.startswith(a.no_access) and bool(operand.search(i.operands)) for i in instructions)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("folder", type=Path, nargs="?", default=build.SOURCES)
    options.add_argument("--instruction-set", choices=SETS, action="append")
    options.add_argument(
        "--above", type=float, default=0, help="only loops with more stack accesses per dot product"
    )
    arguments = options.parse_args()
    if not shutil.which("objdump"):
        sys.exit("objdump was not found: install the GNU binutils")
    with tempfile.TemporaryDirectory() as work:
        made = objects(arguments.folder, Path(work), arguments.instruction_set or compilable())
        found = [
            loop for name, path in made.items() for loop in loops(name, path, arguments.folder, SETS[name][1])
        ]
    head = ["kernel", "set", "dot products", "instructions / dot", "stack / dot", "stack", "around"]
    rows = [
        [
            loop.kernel,
            loop.instruction_set,
            str(loop.n_dots),
            f"{loop.n_instructions / loop.n_dots:.2f}",
            f"{loop.stack_per_dot:.2f}{' !' if loop.stack_per_dot > LIMIT else ''}",
            str(loop.n_stack),
            str(loop.around),
        ]
        for loop in sorted(found, key=lambda loop: (loop.instruction_set, _order(loop.kernel)))
        if loop.stack_per_dot >= arguments.above
    ]
    table(head, rows)


def _order(name: str) -> list[tuple[int, str]]:
    """A sorting key that orders numbers by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


if __name__ == "__main__":
    main()
