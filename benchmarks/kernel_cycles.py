"""Estimate the cycles that the CPU kernels take, on processors that are not at hand, from their machine code.

    python benchmarks/kernel_cycles.py [--processor znver3] [--types Q4_K,Q8_0] [--columns 1,2,4,8] [--check]

llvm-mca simulates how a processor executes what the kernels execute for a block of weights of 16 rows, over
and over. It needs LLVM (16 or later, and 19 for a Zen 4), a compiler and binutils, but no quiet machine. A
block's instructions follow from the control flow: a loop runs as often as the products of the block require.
Memory is as fast as the first-level cache in the simulation.

A second table sets the cycles against the bandwidth of a machine's memory. T(n), the time of a call of n
tokens relative to one, has two figures: if computing and reading the weights overlap entirely, so that the
longer of them counts, and if they do not overlap. All cores compute at their highest clock, and reading
reaches `--share` of the bandwidth that the maker states. The last column is the number of tokens that are
computed while the weights are read once.

`--check` times the kernels on this machine and compares: with a tile in the first-level cache, and with a
matrix in memory and all cores. For the latter, the time with one column is the measured one, and the error is
the distance from the range.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
from common import machine, numbers, parser, table
from disassembly import SETS, Code, Instruction, compilable, functions, kernels, names_of_types, objects
from pipelines import PROCESSORS, RELOAD, Processor, assembly, cycles, host, llvm_mca

from spec_local.kernels import build
from spec_local.system import native_build

ROWS, LINE = 16, 64  # as in layout.h
_GROUPS = 4  # of a super-block
_PRODUCTS = {"zmm": 64, "ymm": 32, "mmla": 32, "dot": 16}  # of an instruction or of its operands
_STORE = re.compile(r"vmov[au]ps %[xyz]mm\d+,.*\(")  # on x86-64, where the destination is last
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

    @property
    def computing(self) -> float:
        """Nanoseconds of a block where all cores compute others."""
        return self.cycles / (self.processor.machine.ghz * self.processor.machine.cores)

    def reading(self, share: float) -> float:
        """Nanoseconds in which a share of the memory's bandwidth suffices for a block."""
        return ROWS * block(self.kernel.type)[1] / (share * self.processor.machine.gb_per_s)


def block(type_: str) -> tuple[int, int]:
    """Weights and bytes of a block of one row."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    return int(weights), int(size)


def executed(code: Code, header: int, products: int, lines: float) -> list[Instruction]:
    """Return the instructions of one iteration of a loop over blocks, in the order of execution.

    Args:
        header: the first block of the loop.
        products: number of products of one iteration.
        lines: number of cache lines that one iteration prefetches.

    Raises:
        ValueError: the number of iterations of an inner loop cannot be derived from these.
    """
    inner = {h: body for h, body in code.loops.items() if h in code.loops[header] and h != header}
    with_dots = {h for h in inner if code.dots(inner[h])}
    prefetching = {h for h in inner.keys() - with_dots if _n_prefetches(code.instructions(inner[h]))}
    if others := inner.keys() - with_dots - prefetching:
        raise ValueError(f"{code.function}: how often does the loop at {min(others):x} run?")
    repetitions, rest = divmod(products, n_products(code, _Walk(code, header, {}).instructions))
    if rest or (repetitions > 1 and not with_dots):
        raise ValueError(f"{code.function}: {products} products are no multiple of those of its loops")
    # A loop over groups may be in one over the registers of a line.
    middle = {h for h in with_dots if any(h != other and other in inner[h] for other in with_dots)}
    innermost = with_dots - middle or {header}
    groups = _GROUPS if middle else repetitions
    iterations = {h: repetitions // groups if h in middle else groups for h in with_dots}
    n = _Walk(code, header, iterations, innermost).n_innermost
    found = _Walk(code, header, iterations, innermost, prefetching, lines / n).instructions
    if n_products(code, found) != products:
        raise ValueError(f"{code.function}: its loops are not understood")
    return found


class _Walk:
    """One iteration of a loop. Inner loops run once if they are not in `iterations`.

    instructions: those that are executed.
    n_innermost: how often the loops `innermost` run in total; each run prefetches `lines`.
    """

    def __init__(
        self,
        code: Code,
        header: int,
        iterations: Mapping[int, int],
        innermost: Collection[int] = (),
        prefetching: Collection[int] = (),
        lines: float = 0,
    ) -> None:
        self.instructions: list[Instruction] = []
        self.n_innermost = 0
        done = dict.fromkeys(code.loops, 0)
        at, prefetched = header, 0
        while True:
            self.instructions += code.blocks[at]
            prefetched += _n_prefetches(code.blocks[at])
            self.n_innermost += at in innermost
            more = prefetched + 0.5 < self.n_innermost * lines
            back = next((h for h in code.following[at] if at in code.loops.get(h, ())), None)
            if back == header:
                return
            onward = [b for b in code.following[at] if b != back and b in code.loops[header]]
            if back is not None:
                done[back] = (done[back] + 1) % iterations.get(back, 1)
                if more if back in prefetching else done[back]:
                    at = back
                    continue
            if not onward:
                raise ValueError(f"{code.function}: the block at {at:x} does not lead back to {header:x}")
            # A fork ends a loop, skips one that has nothing to do, or skips prefetches.
            ends = [b for b in onward if (_n_prefetches(code.blocks[b]) > 0) == more] or onward
            at = ends[-1]


def n_products(code: Code, instructions: Sequence[Instruction]) -> int:
    """Number of products of codes that some instructions compute."""
    pattern = code.architecture.dots[0]
    found = [f"{i.name} {i.operands}" for i in instructions if pattern.match(i.name)]
    return sum(next(n for part, n in _PRODUCTS.items() if part in text) for text in found)


def _n_prefetches(instructions: Sequence[Instruction]) -> int:
    return sum(i.name.startswith(("prefetch", "prfm")) for i in instructions)


def compiled(
    folder: Path, path: Path, set_: str, types: Sequence[str], columns: Sequence[int]
) -> list[Kernel]:
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
    n = cycles(assembly(kernel.code, architecture), processor, architecture.names[0])
    reloads = any(_STORE.match(f"{i.name} {i.operands}") for i in kernel.code)
    return Estimate(kernel, processor, max(n, RELOAD.get(kernel.instruction_set, 0) if reloads else 0))


@dataclass(frozen=True, slots=True)
class Measured:
    """Cycles of a block in the cache; nanoseconds of one of a matrix in memory, for all cores; the clock."""

    cycles: float
    nanoseconds: float
    ghz: float


def measured(folder: Path, made: Path, work: Path, kernels_: Sequence[Kernel]) -> list[Measured]:
    """Time kernels of one instruction set on this machine."""
    compiler = native_build.compiler()
    assert compiler  # has made the object file
    source = Path(__file__).with_suffix(".cpp")
    name = kernels_[0].instruction_set
    program = work / f"time_{name}"
    options = ["-O2", "-std=c++17", "-pthread", f"-DKERNELS=kernels_{name}", f"-I{folder.resolve()}"]
    if reason := native_build.run(work, [*compiler, *options, str(source), str(made), "-o", str(program)]):
        sys.exit(reason)
    types = names_of_types(folder / "layout.h")["Type"]
    arguments = [text for k in kernels_ for text in (str(types.index(k.type)), str(k.n))]
    output = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    lines = output.splitlines()
    times, facts = lines[: len(kernels_)], lines[len(kernels_) :]
    print("\n".join(facts), flush=True)
    clock = re.search(r"([\d.]+) GHz", facts[0])
    assert clock, facts
    figures = (line.split() for line in times)
    return [Measured(float(cycles), float(nanoseconds), float(clock[1])) for cycles, nanoseconds in figures]


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
        sys.exit("llvm-mca or objdump was not found: install LLVM 16 or later and the GNU binutils")
    chosen = [host()] if options.check else options.processor or []
    processors = [p for p in PROCESSORS if p.name in chosen or not chosen]
    if not processors:
        sys.exit(f"this processor, {chosen[0]}, is not among those of pipelines.py")
    possible = [p for p in processors if p.sets[0] in compilable() and llvm_mca(p.oldest)]
    if left_out := [p.name for p in processors if p not in possible]:
        print(f"left out, since they need a cross compiler or a newer LLVM: {', '.join(left_out)}\n")
    if not (processors := possible):
        return
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


def _compare(estimates: Sequence[Estimate], times: Sequence[Measured]) -> None:
    """Print estimates and what was measured. T(n) refers to the first number of columns."""
    in_cache, in_memory = _Comparison("cycles of a block"), _Comparison("T(n)")
    first: dict[tuple[str, str], tuple[Estimate, Measured]] = {}
    cores = os.cpu_count() or 1
    for e, time in zip(estimates, times, strict=True):
        in_cache.add(e.kernel, (e.cycles, e.cycles), time.cycles)
        of_one, one = first.setdefault((e.kernel.instruction_set, e.kernel.type), (e, time))
        if one is not time:
            shares = [cycles / (time.ghz * cores * one.nanoseconds) for cycles in (of_one.cycles, e.cycles)]
            in_memory.add(
                e.kernel, relative_times(*shares, 1 - shares[0]), time.nanoseconds / one.nanoseconds
            )
    in_cache.print()
    in_memory.print()
    print(machine())


def relative_times(of_one: float, of_several: float, reading: float) -> tuple[float, float]:
    """The time of a call of several tokens relative to one: if computing and reading overlap, and if not.

    Args:
        of_one, of_several: times of computing.
        reading: time of reading the weights, in the same unit.
    """
    overlapping = max(of_several, reading) / max(of_one, reading)
    separate = (of_several + reading) / (of_one + reading)
    return min(overlapping, separate), max(overlapping, separate)


class _Comparison:
    """Estimates, of which each is a range, and measurements of some quantity."""

    def __init__(self, quantity: str) -> None:
        self._quantity = quantity
        self._rows: list[list[str]] = []
        self._errors = defaultdict[str, list[float]](list)

    def add(self, kernel: Kernel, estimated: tuple[float, float], measured: float) -> None:
        nearest = min(max(estimated[0], measured), estimated[1])
        error = nearest / measured - 1
        digits = 1 if measured > 10 else 2
        figures = [_range(estimated, digits), f"{measured:.{digits}f}", f"{error:+.0%}"]
        self._rows.append([f"{kernel.type}, {kernel.instruction_set}", str(kernel.n), *figures])
        self._errors[kernel.instruction_set].append(abs(error))

    def print(self) -> None:
        table(["kernel", "columns", f"{self._quantity}, estimated", "measured", "error"], self._rows)
        table(
            ["set", "median error", "largest"],
            [
                [set_, f"{statistics.median(errors):.0%}", f"{max(errors):.0%}"]
                for set_, errors in self._errors.items()
            ],
        )


def _range(figures: tuple[float, float], digits: int = 2) -> str:
    return "–".join(dict.fromkeys(f"{figure:.{digits}f}" for figure in figures))


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
    first, *others = options.columns
    print(f"Estimated time of a call, relative to {first} token{'s' * (first > 1)}:\n")
    rows = []
    for (p, set_, type_), row in by_row.items():
        one, last = row[first], row[options.columns[-1]]
        reading = one.reading(options.share)
        times = {n: relative_times(one.computing, e.computing, reading) for n, e in row.items()}
        tokens = last.kernel.n * reading / last.computing
        rows.append([f"{p.machine.name}, {p.name}, {set_}", type_])
        rows[-1] += [*(_range(times[n]) for n in others), f"{tokens:.0f}"]
    table(["machine", "type", *(f"T({n})" for n in others), "tokens while reading"], rows)


if __name__ == "__main__":
    main()
