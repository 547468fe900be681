"""Estimate the cycles that the CPU kernels take, on processors that are not at hand, from their machine code.

    python benchmarks/kernel_cycles.py [--processor znver3] [--types Q4_K,Q8_0] [--columns 1,2,4,8] [--check]

llvm-mca simulates how a processor executes what the kernels execute for a block of weights of 16 rows, over and
over. It needs LLVM (16 or later), a compiler and binutils, but no quiet machine. The block's instructions follow
from the control flow: a loop runs as often as the products of the block require. Memory is as fast as the
first-level cache in the simulation.

A second table sets the cycles against the bandwidth of a machine's memory: T(n), the time of a call of n tokens,
is that of computing or that of reading the weights, whichever is longer. All cores compute, and reading reaches
`--share` of the bandwidth that the maker states. These are estimates.

`--check` times the kernels on this machine, with a tile in the first-level cache, and compares.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
from common import numbers, parser, table
from disassembly import SETS, Code, Instruction, functions, kernels, names_of_types, objects
from pipelines import PROCESSORS, RELOAD, Processor, assembly, cycles, host, llvm_mca

from spec_local.kernels import build
from spec_local.system import native_build

ROWS, LINE = 16, 64  # as in layout.h
_GROUPS = 4  # of a super-block
_PRODUCTS = ((re.compile("zmm"), 64), (re.compile("ymm"), 32))
_KERNEL = re.compile(r"multiply_(?:simple|k)<(\w+), (\d+)>$")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel of an instruction set executes for one block of ROWS rows, with n columns."""

    instruction_set: str
    type: str
    n: int
    code: list[Instruction]

    @property
    def products(self) -> int:
        return ROWS * block(self.type)[0] * self.n


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cycles of a kernel for a block."""

    kernel: Kernel
    processor: Processor
    cycles: float

    @property
    def per_32_products(self) -> float:
        return 32 * self.cycles / self.kernel.products

    def seconds(self, share: float) -> float:
        """Time of a block where all cores compute others, at `share` of the memory's bandwidth."""
        p = self.processor
        reading = ROWS * block(self.kernel.type)[1] / (share * p.gb_per_s)
        return 1e-9 * max(reading, self.cycles / (p.ghz * p.cores))


def block(type_: str) -> tuple[int, int]:
    """Weights and bytes of a block of one row."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    return int(weights), int(size)


def executed(code: Code, header: int, products: int, lines: float) -> list[Instruction]:
    """Return the instructions of one iteration of a loop over blocks, in the order in which they are executed.

    Args:
        header: the first block of the loop.
        products: number of products of one iteration.
        lines: number of cache lines that one iteration prefetches.

    Raises:
        ValueError: the number of iterations of an inner loop cannot be derived from these.
    """
    inside = {h: body for h, body in code.loops.items() if h in code.loops[header] and h != header}
    with_dots = {h for h in inside if code.dots(inside[h])}
    prefetching = {h for h in inside if h not in with_dots and _n_prefetches(code.instructions(inside[h]))}
    if others := inside.keys() - with_dots - prefetching:
        raise ValueError(f"{code.function}: how often does the loop at {min(others):x} run?")
    once = _walk(code, header, {})
    repetitions, rest = divmod(products, n_products(code, once))
    if rest or (repetitions > 1 and not with_dots):
        raise ValueError(f"{code.function}: {products} products are no multiple of those of its loops")
    # Loops over groups may be in a loop over parts of a line.
    middle = {h for h in with_dots if any(h != other and other in inside[h] for other in with_dots)}
    innermost = _GROUPS if middle else repetitions
    iterations = {h: repetitions // innermost if h in middle else innermost for h in with_dots}
    if prefetching:
        n = _n_prefetches(_walk(code, header, iterations))
        iterations |= dict.fromkeys(prefetching, max(1, round(lines / n)))
    found = _walk(code, header, iterations)
    if n_products(code, found) != products:
        raise ValueError(f"{code.function}: its loops are not understood")
    return found


def _walk(code: Code, header: int, iterations: dict[int, int]) -> list[Instruction]:
    """Follow one iteration of a loop. Inner loops run once if they are not in `iterations`."""
    done = dict.fromkeys(code.loops, 0)
    found: list[Instruction] = []
    at = header
    while True:
        found += code.blocks[at]
        back = next((h for h in code.following[at] if at in code.loops.get(h, ())), None)
        if back == header:
            return found
        onward = [b for b in code.following[at] if b != back and b in code.loops[header]]
        if back is not None:
            done[back] = (done[back] + 1) % iterations.get(back, 1)
        if back is not None and done[back]:
            at = back
        elif onward:
            at = onward[-1]  # a jump forward would skip a loop without iterations
        else:
            raise ValueError(f"{code.function}: the block at {at:x} does not lead back to {header:x}")


def n_products(code: Code, instructions: Sequence[Instruction]) -> int:
    """Number of products of codes that some instructions compute."""
    pattern = code.architecture.dots[0]
    found = [f"{i.name} {i.operands}" for i in instructions if pattern.match(i.name)]
    return sum(next(n for kind, n in _PRODUCTS if kind.search(text)) for text in found)


def _n_prefetches(instructions: Sequence[Instruction]) -> int:
    return sum(i.name.startswith(("prefetch", "prfm")) for i in instructions)


def compiled(folder: Path, path: Path, set_: str, types: Sequence[str], columns: Sequence[int]) -> list[Kernel]:
    """Return the kernels of an object file."""
    architecture = SETS[set_][1]
    outermost = []
    for code in functions(path, architecture):
        with_dots = code.loops_with_dots()
        outermost += [
            (code, h) for h in with_dots if not any(h in code.loops[o] for o in with_dots if o != h)
        ]
    firsts = [code.dots(code.loops[header])[0].address for code, header in outermost]
    names = kernels(path, architecture, firsts, folder / "layout.h")
    found = []
    for (code, header), name in zip(outermost, names, strict=True):
        if (match := _KERNEL.match(name)) and match[1] in types and int(match[2]) in columns:
            weights, size = block(match[1])
            n = int(match[2])
            trace = executed(code, header, ROWS * weights * n, ROWS * size / LINE)
            found.append(Kernel(set_, match[1], n, trace))
    return sorted(found, key=lambda k: (types.index(k.type), k.n))


def estimate(kernel: Kernel, processor: Processor) -> Estimate:
    architecture = SETS[kernel.instruction_set][1]
    n = cycles(assembly(kernel.code, architecture), processor, architecture.triple)
    return Estimate(kernel, processor, max(n, RELOAD.get(kernel.instruction_set, 0)))


def measured(folder: Path, made: Path, work: Path, kernels_: Sequence[Kernel]) -> list[float]:
    """Time kernels of one instruction set on this machine. Returns the cycles of a block."""
    compiler = native_build.compiler()
    assert compiler  # has made the object file
    source = Path(__file__).with_suffix(".cpp")
    name = kernels_[0].instruction_set
    program = work / f"time_{name}"
    options = ["-O2", "-std=c++17", f"-DKERNELS=kernels_{name}", f"-I{folder.resolve()}"]
    if reason := native_build.run(work, [*compiler, *options, str(source), str(made), "-o", str(program)]):
        sys.exit(reason)
    types = names_of_types(folder / "layout.h")["Type"]
    arguments = [text for k in kernels_ for text in (str(types.index(k.type)), str(k.n))]
    clock, *found = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=True
    ).stdout.split()
    print(f"{name}: measured at {clock} GHz")
    return [float(text) for text in found]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, default=build.SOURCES, help="sources of the kernels")
    arguments.add_argument("--types", type=numbers(str), default=["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
    arguments.add_argument("--columns", type=numbers(int), default=[1, 2, 4, 8], help="tokens of a call")
    arguments.add_argument("--processor", choices=[p.name for p in PROCESSORS], action="append")
    arguments.add_argument("--share", type=float, default=0.8, help="of the memory's bandwidth")
    arguments.add_argument("--check", action="store_true", help="measure on this machine, and compare")
    options = arguments.parse_args()
    if not llvm_mca() or not shutil.which("objdump"):
        sys.exit("llvm-mca or objdump was not found: install LLVM and the GNU binutils")
    chosen = [host()] if options.check else options.processor
    processors = [p for p in PROCESSORS if not chosen or p.name in chosen]
    if not processors:
        sys.exit(f"this processor, {chosen[0]}, is not among those of pipelines.py")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        work = Path(name)
        made = objects(options.folder, work, list(dict.fromkeys(s for p in processors for s in p.sets)))
        found = {
            set_: compiled(options.folder, path, set_, options.types, options.columns)
            for set_, path in made.items()
        }
        pairs = [(k, p) for p in processors for set_ in p.sets for k in found[set_]]
        estimates = list(pool.map(lambda pair: estimate(*pair), pairs))
        if options.check:
            times = {set_: measured(options.folder, made[set_], work, ks) for set_, ks in found.items()}
            _compare(estimates, [t for p in processors for set_ in p.sets for t in times[set_]])
            return
    _report(estimates, options)


def _compare(estimates: Sequence[Estimate], times: Sequence[float]) -> None:
    errors = {id(e): e.cycles / time - 1 for e, time in zip(estimates, times, strict=True)}
    table(
        ["kernel", "columns", "cycles of a block, estimated", "measured", "error"],
        [
            [f"{e.kernel.type}, {e.kernel.instruction_set}", e.kernel.n, f"{e.cycles:.1f}", f"{time:.1f}"]
            + [f"{errors[id(e)]:+.0%}"]
            for e, time in zip(estimates, times, strict=True)
        ],
    )
    rows = []
    for set_ in dict.fromkeys(e.kernel.instruction_set for e in estimates):
        own = [(e, time) for e, time in zip(estimates, times, strict=True) if e.kernel.instruction_set == set_]
        sizes = [abs(errors[id(e)]) for e, _ in own]
        total = sum(e.cycles for e, _ in own) / sum(time for _, time in own) - 1
        rows.append([set_, f"{statistics.median(sizes):.0%}", f"{max(sizes):.0%}", f"{total:+.0%}"])
    table(["set", "median error", "largest", "of the sum"], rows)


def _report(estimates: Sequence[Estimate], options: argparse.Namespace) -> None:
    by_row: dict[tuple[Processor, str, str], dict[int, Estimate]] = {}
    for e in estimates:
        key = (e.processor, e.kernel.instruction_set, e.kernel.type)
        by_row.setdefault(key, {})[e.kernel.n] = e
    head = [f"{n} column{'s' * (n > 1)}" for n in options.columns]
    print("Estimated cycles for 32 products:\n")
    table(
        ["processor", "type", *head],
        [
            [f"{p.name}, {set_}", type_, *(f"{row[n].per_32_products:.2f}" for n in options.columns)]
            for (p, set_, type_), row in by_row.items()
        ],
    )
    first = options.columns[0]
    print(f"Estimated time of a call, relative to {first} token, and the share of memory in that one:\n")
    rows = []
    for (p, _set, type_), row in by_row.items():
        times = {n: row[n].seconds(options.share) for n in options.columns}
        waits = row[first].cycles / (p.ghz * p.cores) * 1e-9 / times[first]
        rows.append([p.machine, type_, *(f"{times[n] / times[first]:.2f}" for n in options.columns[1:])])
        rows[-1].append(f"{waits:.2f}")
    table(["machine", "type", *(f"T({n})" for n in options.columns[1:]), "computing / T(1)"], rows)


if __name__ == "__main__":
    main()
