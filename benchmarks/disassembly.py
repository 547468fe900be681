"""The machine code of the CPU kernels: instructions, basic blocks and loops, from objdump's output."""

import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from spec_local.kernels import build
from spec_local.system import native_build


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the code of a processor architecture is compiled and read.

    names: as `platform.machine` spells it; first as LLVM and GNU do.
    jump, end: instructions that may jump; those after which the next one is not executed.
    on_stack, in_frame: operands relative to the stack pointer, where it is the only pointer to the stack and
        where there is a frame pointer, too.
    frame: the instruction that sets the frame pointer.
    no_access: instructions that have an operand in memory that they do not read.
    dots: dot products. In this order: where codes are multiplied, other products only scale the sums.
    """

    names: tuple[str, ...]
    jump: re.Pattern[str]
    end: re.Pattern[str]
    on_stack: re.Pattern[str]
    in_frame: re.Pattern[str]
    frame: tuple[str, str]
    no_access: tuple[str, ...]
    dots: tuple[re.Pattern[str], ...]

    def tool(self, name: str) -> str:
        """The command of a tool of GNU's, which is a cross tool if this machine has another architecture."""
        return name if platform.machine().lower() in self.names else f"{self.names[0]}-linux-gnu-{name}"

    def compiler(self) -> list[str] | None:
        """The command of the C++ compiler; None if there is none."""
        name = self.tool("g++")
        return native_build.compiler() if name == "g++" else [name] if shutil.which(name) else None


X86 = Architecture(
    names=("x86_64", "amd64"),
    jump=re.compile(r"j"),
    end=re.compile(r"jmp|ret|ud2"),
    on_stack=re.compile(r"\(%rsp[,)]"),
    in_frame=re.compile(r"\(%r[sb]p[,)]"),
    frame=("mov", "%rsp,%rbp"),
    no_access=("lea", "nop", "prefetch", "data16", "cs"),
    dots=(re.compile(r"vpmaddubsw|vpdpbusd$"), re.compile(r"vfn?m(add|sub)\d+ps|vdpbf16ps")),
)

ARM = Architecture(
    names=("aarch64", "arm64"),
    jump=re.compile(r"(b|b\..*|cbn?z|tbn?z|br|ret)$"),
    end=re.compile(r"(b|br|ret|udf|brk)$"),
    on_stack=re.compile(r"\[sp\b"),
    in_frame=re.compile(r"\[(sp|x29)\b"),
    frame=("mov", "x29, sp"),
    no_access=("prfm",),
    dots=(re.compile(r"[su]dot|[su]mmla"), re.compile(r"fml[as]|bfdot|bfmmla")),
)

SETS = {
    name: (each.source, architecture)
    for architecture in (X86, ARM)
    for name, each in build.instruction_sets(architecture.names[0]).items()
}
"""The source file of each instruction set, and its architecture."""

_LABEL = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(?:(?:notrack|bnd|\{\w+\}) +)*(\S+)\s*(.*)$")
_TARGET = re.compile(r"(?:^|,\s*)([0-9a-f]+)(?= <|$)")


@dataclass(slots=True)
class Instruction:
    address: int
    name: str
    operands: str


@dataclass(slots=True)
class Code:
    """A function: its basic blocks by their first address, those that may follow each, and its loops.

    following: first the target of a jump, then the next block.
    loops: the blocks of each loop by its first block, that of the jump back.
    """

    function: str
    architecture: Architecture
    blocks: dict[int, list[Instruction]]
    following: dict[int, list[int]]
    preceding: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    loops: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for block, others in self.following.items():
            for other in others:
                self.preceding[other].append(block)
        self.loops = _natural_loops(self)

    def instructions(self, blocks: set[int] | None = None) -> list[Instruction]:
        return [i for block in sorted(self.blocks if blocks is None else blocks) for i in self.blocks[block]]

    def dots(self, blocks: set[int] | None = None) -> list[Instruction]:
        """The dot products of some blocks."""
        return dots(self.architecture, self.instructions(blocks))

    def loops_with_dots(self) -> list[int]:
        return [header for header, body in self.loops.items() if self.dots(body)]


def compilable() -> list[str]:
    """The instruction sets that there is a compiler for."""
    return [name for name, (_, architecture) in SETS.items() if architecture.compiler()]


def dots(architecture: Architecture, code: Sequence[Instruction]) -> list[Instruction]:
    kinds = ([i for i in code if kind.match(i.name)] for kind in architecture.dots)
    return next((found for found in kinds if found), [])


def objects(folder: Path, work: Path, names: Sequence[str]) -> dict[str, Path]:
    """Compile the kernels of the instruction sets, with the names of inlined functions.

    Raises:
        SystemExit: there is no compiler, no headers, or an error in the sources.
    """
    headers = native_build.headers()
    if not headers:
        sys.exit("llama-cpp-python was installed without its headers")
    made, commands = {name: work / f"{name}.o" for name in names}, []
    for name, path in made.items():
        source, architecture = SETS[name]
        if not (compiler := architecture.compiler()):
            sys.exit(f"{name}: there is no C++ compiler ({architecture.tool('g++')})")
        of = folder.resolve() / source
        command = build.compile_command(compiler, headers, of, path, architecture=architecture.names[0])
        commands.append([*command, "-g1"])
    with ThreadPoolExecutor() as pool:
        for reason in pool.map(partial(native_build.run, work), commands):
            if reason:
                sys.exit(reason)
    return made


def functions(path: Path, architecture: Architecture) -> Iterator[Code]:
    """Read the functions of an object file or a library that contain dot products."""
    return parsed(_output([architecture.tool("objdump"), "-dC", "--no-show-raw-insn", path]), architecture)


def parsed(listing: str, architecture: Architecture) -> Iterator[Code]:
    """Read the functions with dot products from the output of objdump."""
    name, instructions = "", list[Instruction]()
    for line in [*listing.splitlines(), "0 <>:"]:
        if label := _LABEL.match(line):
            if dots(architecture, instructions):
                yield _code(name, instructions, architecture)
            name, instructions = label[1], []
        elif found := _INSTRUCTION.match(line):
            instructions.append(Instruction(int(found[1], 16), found[2], found[3]))


def target(instruction: Instruction, architecture: Architecture) -> int | None:
    """The address that an instruction jumps to."""
    if not architecture.jump.match(instruction.name) or not (found := _TARGET.search(instruction.operands)):
        return None
    return int(found[1], 16)


def _code(function: str, instructions: list[Instruction], architecture: Architecture) -> Code:
    addresses = {i.address for i in instructions}
    targets = {i.address: target(i, architecture) for i in instructions}
    starts = {instructions[0].address}
    for i, next_ in pairwise(instructions):
        if architecture.jump.match(i.name) or architecture.end.match(i.name):
            starts.add(next_.address)
    starts |= {to for to in targets.values() if to in addresses}
    blocks: dict[int, list[Instruction]] = {}
    for i in instructions:
        if i.address in starts:
            blocks[i.address] = []
        blocks[max(blocks)].append(i)
    following: dict[int, list[int]] = {}
    for block, after in zip(blocks, [*list(blocks)[1:], None], strict=True):
        last = blocks[block][-1]
        to = targets[last.address]
        following[block] = [to] if to in blocks else []
        if after is not None and not architecture.end.match(last.name):
            following[block].append(after)
    # A jump through a table may lead to any block that nothing else leads to.
    known = {instructions[0].address, *(other for others in following.values() for other in others)}
    for block, code in blocks.items():
        if _jumps_through_table(code[-1]):
            following[block] += [other for other in blocks if other not in known]
    return Code(function, architecture, blocks, following)


def _jumps_through_table(instruction: Instruction) -> bool:
    return (instruction.name == "jmp" and instruction.operands.startswith("*")) or instruction.name == "br"


def _natural_loops(code: Code) -> dict[int, set[int]]:
    dominators = _dominators(code)
    bodies: dict[int, set[int]] = {}
    for block, others in code.following.items():
        for header in others:
            if block not in dominators or header not in dominators[block]:
                continue
            body, pending = bodies.setdefault(header, {header}), [block]
            while pending:
                if (at := pending.pop()) not in body:
                    body.add(at)
                    pending += [p for p in code.preceding[at] if p in dominators]
    return bodies


def _dominators(code: Code) -> dict[int, set[int]]:
    """Return for each block that can be reached the blocks that every path to it leads through."""
    entry = next(iter(code.blocks))
    reached, pending = {entry}, [entry]
    while pending:
        for other in code.following[pending.pop()]:
            if other not in reached:
                reached.add(other)
                pending.append(other)
    dominators = {block: set(reached) for block in reached}
    dominators[entry] = {entry}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {entry}):
            before = [dominators[p] for p in code.preceding[block] if p in reached]
            now = set.intersection(*before) | {block}
            if now != dominators[block]:
                dominators[block], changed = now, True
    return dominators


def kernels(path: Path, architecture: Architecture, addresses: Sequence[int], header: Path) -> list[str]:
    """Return the template instances that instructions belong to, inlined or not; else the functions.

    Args:
        header: layout.h of the sources, which has the names of the types.
    """
    enumerators = names_of_types(header)
    text = "\n".join(f"{address:#x}" for address in addresses)
    output = _output([architecture.tool("addr2line"), "-afiC", "-e", path], text)
    names = []
    for chain in re.split(r"^0x", output, flags=re.MULTILINE)[1:]:
        lines = chain.splitlines()[1:]  # a line with a function and one with its place in the sources
        places = zip(lines[::2], lines[1::2], strict=True)
        names.append(
            _kernel([_short(name, enumerators) for name, place in places if _is_kernel(name, place)])
        )
    return names


def names_of_types(header: Path) -> dict[str, list[str]]:
    """Return the names of the values of each `enum class` of a header."""
    found = re.findall(r"enum class (\w+) \{(.*?)\}", header.read_text(), re.DOTALL)
    return {enum: re.findall(r"\w+", re.sub(r"//.*", "", body)) for enum, body in found}


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


def _output(command: Sequence[str | Path], text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
