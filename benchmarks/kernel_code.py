"""Count the instructions and the stack accesses of the CPU kernels, for each dot product.

    python benchmarks/kernel_code.py [FOLDER] [--instruction-set avx2] [--all]

The kernels of each instruction set are compiled as `specdec doctor --fix` compiles them, and disassembled by
objdump. No quiet machine is needed, and the processor need not execute them. FOLDER: sources other than the
installed ones.

Only loops are counted: what comes before and after them (saving registers, the results) is not. A loop is
found in the control flow (a jump back to a block through which every path to the jump leads). Each row of the
table is an innermost loop that has dot products. An instruction counts once, however often it runs; loops of
a fixed length are usually unrolled.

- dot product: an instruction that multiplies codes (vpmaddubsw, vpdpbusd); where there are none, one that
  multiplies numbers (vfmadd…ps, vdpbf16ps).
- stack access: an operand in memory relative to the stack pointer, or to rbp where it is the frame pointer.
- around: stack accesses in the loops around it, which run less often.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from common import table

from spec_local.kernels import build
from spec_local.system import native_build

LIMIT = 0.2  # stack accesses per dot product: at most one for each pass over five columns

_SOURCES = {"avx2": "avx2.cpp", "avx_vnni": "avxvnni.cpp", "avx512_vnni": "avx512.cpp"}
_LABEL = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(?:(?:notrack|bnd|\{\w+\}) +)*(\S+)\s*(.*)$")
_ON_STACK = re.compile(r"\(%rsp[,)]")
_IN_FRAME = re.compile(r"\(%r[sb]p[,)]")
# In this order: where codes are multiplied, other products only scale the sums.
_DOTS = (re.compile(r"vpmaddubsw|vpdpbusds?"), re.compile(r"vfn?m(add|sub)\d+ps|vdpbf16ps"))
_NO_ACCESS = ("lea", "nop", "prefetch", "data16", "cs")  # have an operand in memory that they do not read


@dataclass(slots=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """The address that it jumps to."""
        if not self.name.startswith("j") or not (found := re.match(r"[0-9a-f]+\b", self.operands)):
            return None
        return int(found[0], 16)

    def uses_stack(self, operand: re.Pattern[str]) -> bool:
        return not self.name.startswith(_NO_ACCESS) and bool(operand.search(self.operands))


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


@dataclass(slots=True)
class _Blocks:
    """The basic blocks of a function, by their first address, and the blocks that may follow each."""

    instructions: dict[int, list[Instruction]]
    following: dict[int, list[int]]
    preceding: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for block, others in self.following.items():
            for other in others:
                self.preceding[other].append(block)


def objects(folder: Path, work: Path, names: list[str]) -> dict[str, Path]:
    """Compile the kernels of the instruction sets, with the names of inlined functions.

    Raises:
        SystemExit: there is no compiler, no headers, or an error in the sources.
    """
    compiler, headers = native_build.compiler(), native_build.headers()
    if not compiler or not headers:
        sys.exit("there is no C++ compiler, or llama-cpp-python was installed without its headers")
    made = {name: work / f"{name}.o" for name in names}
    commands = [
        [*build.compile_command(compiler, headers, folder.resolve() / _SOURCES[name], path), "-g1"]
        for name, path in made.items()
    ]
    with ThreadPoolExecutor() as pool:
        for reason in pool.map(partial(native_build.run, work), commands):
            if reason:
                sys.exit(reason)
    return made


def loops(instruction_set: str, path: Path, folder: Path = build.SOURCES) -> list[Loop]:
    """Return the loops with dot products of an object file that was compiled from the sources in a folder."""
    output = subprocess.run(
        ["objdump", "-dC", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = [
        loop
        for function, instructions in _functions(output)
        for loop in _loops(instruction_set, function, instructions)
    ]
    names = _kernels(path, [loop.dot for loop in found], _enumerators(folder / "layout.h"))
    for loop, kernel in zip(found, names, strict=True):
        loop.kernel = kernel
    return found


def _functions(output: str) -> Iterator[tuple[str, list[Instruction]]]:
    name, instructions = "", list[Instruction]()
    for line in output.splitlines():
        if label := _LABEL.match(line):
            yield name, instructions
            name, instructions = label[1], []
        elif found := _INSTRUCTION.match(line):
            instructions.append(Instruction(int(found[1], 16), found[2], found[3]))
    yield name, instructions


def _loops(instruction_set: str, function: str, instructions: list[Instruction]) -> Iterator[Loop]:
    if not any(kind.match(i.name) for kind in _DOTS for i in instructions):
        return
    has_frame = any(i.name == "mov" and i.operands == "%rsp,%rbp" for i in instructions)
    on_stack = _IN_FRAME if has_frame else _ON_STACK
    blocks = _basic_blocks(instructions)
    bodies = _natural_loops(blocks)

    def code(body: set[int]) -> list[Instruction]:
        return [i for block in sorted(body) for i in blocks.instructions[block]]

    dots = {header: _dots(code(body)) for header, body in bodies.items()}
    with_dots = [header for header in bodies if dots[header]]
    for header in with_dots:
        body = bodies[header]
        if any(other in body and other != header for other in with_dots):
            continue  # it has an inner loop
        own = code(body)
        outer = set().union(*(bodies[other] for other in with_dots if header in bodies[other]))
        inner = set().union(*(bodies[other] for other in with_dots if header not in bodies[other]))
        yield Loop(
            instruction_set,
            function,
            dots[header][0].address,
            len(dots[header]),
            len(own),
            sum(i.uses_stack(on_stack) for i in own),
            sum(i.uses_stack(on_stack) for i in code(outer - body - inner)),
        )


def _dots(code: list[Instruction]) -> list[Instruction]:
    return next((dots for kind in _DOTS if (dots := [i for i in code if kind.match(i.name)])), [])


def _basic_blocks(instructions: list[Instruction]) -> _Blocks:
    addresses = {i.address for i in instructions}
    starts = {instructions[0].address}
    for i, next_ in pairwise(instructions):
        if i.name.startswith(("j", "ret", "ud2")):
            starts.add(next_.address)
    starts |= {i.target for i in instructions if i.target in addresses}
    blocks: dict[int, list[Instruction]] = {}
    for i in instructions:
        if i.address in starts:
            blocks[i.address] = []
        blocks[max(blocks)].append(i)
    following: dict[int, list[int]] = {}
    for block, after in zip(blocks, [*list(blocks)[1:], None], strict=True):
        last = blocks[block][-1]
        following[block] = [last.target] if last.target in blocks else []
        if after is not None and not last.name.startswith(("jmp", "ret", "ud2")):
            following[block].append(after)
    # A jump through a table may lead to any block that nothing else leads to.
    known = {instructions[0].address, *(other for others in following.values() for other in others)}
    for block, code in blocks.items():
        if code[-1].name == "jmp" and code[-1].operands.startswith("*"):
            following[block] += [other for other in blocks if other not in known]
    return _Blocks(blocks, following)


def _natural_loops(blocks: _Blocks) -> dict[int, set[int]]:
    """Return the blocks of each loop by its first block, that of the jump back."""
    dominators = _dominators(blocks)
    bodies: dict[int, set[int]] = {}
    for block, others in blocks.following.items():
        for header in others:
            if block not in dominators or header not in dominators[block]:
                continue
            body, pending = bodies.setdefault(header, {header}), [block]
            while pending:
                if (at := pending.pop()) not in body:
                    body.add(at)
                    pending += [p for p in blocks.preceding[at] if p in dominators]
    return bodies


def _dominators(blocks: _Blocks) -> dict[int, set[int]]:
    """Return for each block that can be reached the blocks that every path to it leads through."""
    entry = next(iter(blocks.instructions))
    reached, pending = {entry}, [entry]
    while pending:
        for other in blocks.following[pending.pop()]:
            if other not in reached:
                reached.add(other)
                pending.append(other)
    dominators = {block: set(reached) for block in reached}
    dominators[entry] = {entry}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {entry}):
            before = [dominators[p] for p in blocks.preceding[block] if p in reached]
            now = set.intersection(*before) | {block}
            if now != dominators[block]:
                dominators[block], changed = now, True
    return dominators


def _kernels(path: Path, addresses: list[int], enumerators: dict[str, list[str]]) -> list[str]:
    """Return the template instances that instructions belong to, inlined or not; else the functions."""
    text = "\n".join(f"{address:#x}" for address in addresses)
    output = subprocess.run(
        ["addr2line", "-afiC", "-e", str(path)], input=text, capture_output=True, text=True, check=True
    ).stdout
    names = []
    for chain in re.split(r"^0x", output, flags=re.MULTILINE)[1:]:
        lines = chain.splitlines()[1:]  # a line with a function and one with its place in the sources
        places = zip(lines[::2], lines[1::2], strict=True)
        names.append(
            _kernel([_short(name, enumerators) for name, place in places if _is_kernel(name, place)])
        )
    return names


def _is_kernel(function: str, place: str) -> bool:
    """Return whether a function is in one of the kernels' own headers, and not an intrinsic."""
    file = Path(place.partition(":")[0]).name
    ours = file.endswith(".h") and (build.SOURCES / file).exists() and not file.startswith("simd_")
    return ours and "lambda" not in function and "operator()" not in function


def _kernel(chain: list[str]) -> str:
    """Choose the name of a loop from its functions, innermost first: what multiplies, not a part of it."""
    templates = [name for name in chain if name.endswith(">") and not name.startswith("with_number")]
    multiplies = [name for name in templates if name.startswith("multiply_")]
    return (multiplies or templates or chain or ["?"])[0]


def _short(function: str, enumerators: dict[str, list[str]]) -> str:
    """Return a name without namespaces, return type, arguments and clone suffix."""
    name = function.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.sub(r"\(specdec::(\w+)\)(\d+)", lambda m: enumerators[m[1]][int(m[2])], name)
    return name.replace("specdec::", "").split("(")[0]


def _enumerators(header: Path) -> dict[str, list[str]]:
    """Return the names of the values of each `enum class` of a header."""
    found = re.findall(r"enum class (\w+) \{(.*?)\}", header.read_text(), re.DOTALL)
    return {enum: re.findall(r"\w+", re.sub(r"//.*", "", body)) for enum, body in found}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("folder", type=Path, nargs="?", default=build.SOURCES)
    options.add_argument("--instruction-set", choices=_SOURCES, action="append")
    options.add_argument(
        "--above", type=float, default=0, help="only loops with more stack accesses per dot product"
    )
    arguments = options.parse_args()
    if not shutil.which("objdump"):
        sys.exit("objdump was not found: install the GNU binutils")
    with tempfile.TemporaryDirectory() as work:
        made = objects(arguments.folder, Path(work), arguments.instruction_set or list(_SOURCES))
        found = [loop for name, path in made.items() for loop in loops(name, path, arguments.folder)]
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
