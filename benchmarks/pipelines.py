"""Processors, as llvm-mca simulates them, and the machines that they are in."""

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from disassembly import Architecture, Instruction, target

_NEWEST, _OLDEST = 40, 16  # versions of LLVM to look for; 16 is the first with Zen 4 and Neoverse V2
_SIMULATED = 30000  # instructions


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as published.

    cores: all alike; the fastest ones, if there are several kinds.
    ghz: the highest clock.
    gb_per_s: bandwidth of the memory: its transfers per second times the width of its bus.
    """

    name: str
    cores: int
    ghz: float
    gb_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor as llvm-mca simulates it.

    name: as LLVM spells it, if it knows the processor.
    sets: the instruction sets of the kernels to simulate, best first.
    machine: where it is used.
    width: instructions per cycle that it decodes or renames, which LLVM's model may not know.
    model: the processor that is simulated, if it is another one.
    options: of llvm-mca.
    corrections: patterns and replacements for lines of assembly, where LLVM's model is known to be wrong.
    oldest: the first version of LLVM whose model can be used.
    """

    name: str
    sets: tuple[str, ...]
    machine: Machine
    width: int
    model: str = ""
    options: tuple[str, ...] = ()
    corrections: tuple[tuple[str, str], ...] = ()
    oldest: int = _OLDEST


# A load that fills all lanes with one number needs a load unit only, as on Intel: 4 of them and 8 additions
# take 2.0 cycles on Zen 5. In LLVM's models of Zen, it also occupies one of the four vector units.
_BROADCAST = (r"^vp?broadcast(?:ss|d) (?=\S*\()", "vmovups ")
# LLVM has this instruction occupy a unit for its whole latency, unless it is encoded as in AVX-VNNI. On Zen
# 5, two units begin one in every cycle, and the latency is 4 cycles: LLVM has this for multiply-add.
_DOT = (r"^vpdp(?:bus|wss)ds?\b", "vfmadd231ps")
# LLVM counts it as microcode of 100 cycles on Zen 2; it is a load and a conversion.
_HALF = (r"^vcvtph2ps (?=\S*\()", "vpmovzxwd ")
# Zen 5 (but for laptops) has units of 512 bits where Zen 4 has as many of 256. LLVM 19 simulates it as Zen 4.
_HALVED = (("zmm", "ymm"), ("1to16", "1to8"))
# Loads in flight on Zen 4 and 5, stores on Zen 5, as measured by Chips and Cheese. LLVM has 72 and 64.
_LOADS = ("-lqueue=136",)
_LOADS_AND_STORES = ("-lqueue=202", "-squeue=104")

_M1 = Machine("Apple M1", 4, 3.2, 68.3, "AnandTech's review (clock); LPDDR4X-4267, 128 bits")
_M4 = Machine("Apple M4", 4, 4.4, 120, "Geekbench's database (clock); Apple's announcement (bandwidth)")
_RYZEN_9700X = Machine("Ryzen 7 9700X", 8, 5.5, 89.6, "AMD's specification; DDR5-5600, 128 bits")

PROCESSORS = (
    Processor(
        "skylake",
        ("avx2",),
        Machine("Core i7-6700", 4, 4.0, 34.1, "Intel's specification; DDR4-2133, 128 bits"),
        width=4,
    ),
    Processor(
        "alderlake",
        ("avx_vnni", "avx2"),
        Machine("Core i5-12400", 6, 4.4, 76.8, "Intel's specification; DDR5-4800, 128 bits"),
        width=6,
        corrections=((r"^vpdp", "{vex} vpdp"),),  # the encoding that it has
    ),
    Processor(
        "znver2",
        ("avx2",),
        Machine("Ryzen 7 4800U", 8, 4.2, 51.2, "AMD's specification; DDR4-3200, 128 bits"),
        width=6,
        corrections=(_BROADCAST, _HALF),
    ),
    Processor(
        "znver3",
        ("avx2",),
        Machine("Ryzen 7 5800U", 8, 4.4, 51.2, "AMD's specification; DDR4-3200, 128 bits"),
        width=6,
        corrections=(_BROADCAST,),
    ),
    Processor(
        "znver4",
        ("avx512_vnni",),
        Machine("Ryzen 7 7840U", 8, 5.1, 89.6, "AMD's specification; DDR5-5600, 128 bits"),
        width=6,
        options=_LOADS,
        corrections=(_BROADCAST, _DOT),
        oldest=19,  # LLVM 16 begins a multiplication of 512 bits in every second cycle; it is every one
    ),
    Processor(
        "znver5",
        ("avx512_vnni", "avx_vnni", "avx2"),
        _RYZEN_9700X,
        width=8,
        model="znver4",
        options=("-dispatch=8", *_LOADS_AND_STORES),
        corrections=(*_HALVED, _BROADCAST, _DOT),
    ),
    # LLVM simulates all Apple processors as the Cyclone of 2013, with three vector units. They have four, as
    # Neoverse V2 has.
    Processor("apple-m1", ("neon_dotprod",), _M1, width=8),
    Processor("apple-m1 as V2", ("neon_dotprod",), _M1, width=8, model="neoverse-v2"),
    Processor("apple-m4", ("neon_i8mm", "neon_dotprod"), _M4, width=10),
    Processor("apple-m4 as V2", ("neon_i8mm", "neon_dotprod"), _M4, width=10, model="neoverse-v2"),
    Processor(
        "neoverse-n1",
        ("neon_dotprod",),
        Machine("Ampere Altra Q80-30", 80, 3.0, 204.8, "Ampere's product brief; 8 of DDR4-3200, 64 bits"),
        width=4,
    ),
    Processor(
        "neoverse-v2",
        ("neon_i8mm", "neon_dotprod"),
        Machine("Graviton4", 96, 2.8, 537.6, "Chips and Cheese (clock); AWS: 12 of DDR5-5600, 64 bits"),
        width=8,
    ),
    # LLVM simulates it as a Cortex-A57. Neoverse N1 is the same core for servers.
    Processor(
        "cortex-a76",
        ("neon_dotprod",),
        Machine("Raspberry Pi 5", 4, 2.4, 17.1, "Raspberry Pi's announcement; LPDDR4X-4267, 32 bits"),
        width=4,
        model="neoverse-n1",
    ),
)

# Cycles from one addition to a total in memory to the next one, which llvm-mca does not see: it assumes that
# loads and stores have different addresses. Measured on Zen 5. With 256 bits, it takes 13, and all kernels
# take longer for a block. Only for totals in memory.
RELOAD = {"avx512_vnni": 15.0}


@functools.cache
def llvm_mca(oldest: int = _OLDEST) -> str | None:
    """The newest llvm-mca that is installed; None if it is older than that."""
    names = [f"llvm-mca-{version}" for version in range(_NEWEST, _OLDEST - 1, -1)]
    for program in filter(None, map(shutil.which, [*names, "llvm-mca"])):
        version = re.search(r"LLVM version (\d+)", _run([program, "--version"]))
        if version and int(version[1]) >= oldest:
            return program
    return None


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
    program = llvm_mca(processor.oldest)
    if not program:
        raise ValueError(
            f"llvm-mca {processor.oldest} or later was not found: install LLVM (Debian: llvm-19)"
        )
    text = "\n".join(lines)
    for pattern, replacement in processor.corrections:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    n = max(10, _SIMULATED // len(lines))
    command = [program, f"-mtriple={triple}", f"-mcpu={processor.model or processor.name}"]
    options = [f"-iterations={n}", "-instruction-info=0", "-resource-pressure=0", *processor.options]
    output = _run([*command, *options], text)
    found = re.search(r"Total Cycles:\s+(\d+)", output)
    assert found, output
    return max(int(found[1]) / n, len(lines) / processor.width)


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode or ": error: " in done.stderr or "is not a recognized processor" in done.stderr:
        raise ValueError(f"llvm-mca failed: {done.stderr.strip().splitlines()[0]}")
    return done.stdout
