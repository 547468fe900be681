"""Processors, as llvm-mca simulates them, and the machines that they are in."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from disassembly import Architecture, Instruction, target

_NEWEST, _OLDEST = 40, 16  # versions of LLVM to look for; 16 is the first with Zen 4 and Neoverse V2
_SIMULATED = 30000  # instructions


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor and a machine with it.

    name: as LLVM spells it.
    sets: the instruction sets of the kernels to simulate, best first.
    machine, cores, ghz, gb_per_s: where it is used; the highest clock and the bandwidth of the memory that the
        maker states.
    width: instructions per cycle that it decodes or renames, which LLVM's model may not know.
    model: whose model LLVM uses, if it has none of its own.
    options: of llvm-mca.
    corrections: patterns and replacements for lines of assembly, where LLVM's model is known to be wrong.
    """

    name: str
    sets: tuple[str, ...]
    machine: str
    cores: int
    ghz: float
    gb_per_s: float
    width: int
    model: str = ""
    options: tuple[str, ...] = ()
    corrections: tuple[tuple[str, str], ...] = ()


# A load that fills all lanes with one number needs a load unit only: measured on Zen 5 (4 of them and 8 additions take
# 2.2 cycles), as on Intel. In LLVM's models of Zen, it also occupies one of the four vector units.
_BROADCAST = (r"^vp?broadcast(?:ss|d) (?=\S*\()", "vmovups ")
# LLVM has this instruction occupy a unit for its whole latency, unless it is encoded as in AVX-VNNI. Measured on Zen 5: a
# latency of 4 cycles, and two units, which is what LLVM has for multiply-add.
_DOT = (r"^vpdp(?:bus|wss)d\b", "vfmadd231ps")
# Zen 5 (but for laptops) has units of 512 bits where Zen 4 has 256, as many: LLVM 19 simulates it as Zen 4.
_HALVED = (("zmm", "ymm"), ("1to16", "1to8"))

PROCESSORS = (
    Processor("skylake", ("avx2",), "Core i7-6700", 4, 4.0, 34.1, 4),
    Processor(
        "alderlake",
        ("avx_vnni", "avx2"),
        "Core i5-12400",
        *(6, 4.4, 76.8, 6),
        corrections=((r"^vpdp", "{vex} vpdp"),),  # the encoding that it has
    ),
    Processor("znver2", ("avx2",), "Ryzen 7 4800U", 8, 4.2, 51.2, 6, corrections=(_BROADCAST,)),
    Processor("znver3", ("avx2",), "Ryzen 7 5800U", 8, 4.4, 51.2, 6, corrections=(_BROADCAST,)),
    Processor("znver4", ("avx512_vnni",), "Ryzen 7 7840U", 8, 5.1, 89.6, 6, corrections=(_BROADCAST, _DOT)),
    Processor(
        "znver5",
        ("avx512_vnni", "avx_vnni", "avx2"),
        "Ryzen 7 9700X",
        *(8, 5.5, 89.6, 8),
        model="znver4",
        options=("-dispatch=8", "-lqueue=202", "-squeue=104"),
        corrections=(*_HALVED, _BROADCAST, _DOT),
    ),
)

# Cycles from one addition to a total in memory to the next one, which llvm-mca does not see: it assumes that loads and
# stores have different addresses. Measured on Zen 5: 13 with 256 bits, which no kernel is as fast as, and 15 with 512.
RELOAD = {"avx512_vnni": 15.0}


def llvm_mca() -> str | None:
    """The newest llvm-mca that is installed."""
    names = [f"llvm-mca-{version}" for version in range(_NEWEST, _OLDEST - 1, -1)]
    return next(filter(None, map(shutil.which, [*names, "llvm-mca"])), None)


def host() -> str:
    """What LLVM calls this machine's processor."""
    program = llvm_mca()
    found = re.search(r"Host CPU: (\S+)", _run([program, "--version"])) if program else None
    return found[1] if found else ""


def assembly(code: Sequence[Instruction], architecture: Architecture) -> list[str]:
    """Instructions as an assembler reads them: without addresses, comments and alignment."""
    lines = []
    for i in code:
        if i.name.startswith(("nop", "cs", "data16")):
            continue
        operands = re.sub(r"\s*(#|//) .*|<.*>", "", i.operands).strip()
        if target(i, architecture) is not None:
            operands = re.sub(r"[0-9a-f]+$", "elsewhere", operands)
        lines.append(f"{i.name} {operands}".strip())
    return lines


def cycles(lines: Sequence[str], processor: Processor, triple: str) -> float:
    """Simulate a sequence of instructions that is repeated. Returns the cycles of one repetition.

    Raises:
        ValueError: llvm-mca does not know an instruction or the processor.
    """
    program = llvm_mca()
    if not program:
        raise ValueError("llvm-mca was not found: install LLVM (Debian: llvm-19)")
    text = "\n".join(lines)
    for pattern, replacement in processor.corrections:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    n = max(10, _SIMULATED // len(lines))
    command = [program, f"-mtriple={triple}", f"-mcpu={processor.name}", f"-iterations={n}"]
    output = _run([*command, "-instruction-info=0", "-resource-pressure=0", *processor.options], text)
    found = re.search(r"Total Cycles:\s+(\d+)", output)
    assert found, output
    return max(int(found[1]) / n, len(lines) / processor.width)


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode or ": error: " in done.stderr or "is not a recognized processor" in done.stderr:
        raise ValueError(f"llvm-mca failed: {done.stderr.strip().splitlines()[0]}")
    return done.stdout
