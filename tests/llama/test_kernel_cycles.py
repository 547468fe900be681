"""What the kernels execute for a block follows from objdump's output, and llvm-mca simulates it."""

import importlib
from pathlib import Path

import pytest

# Two groups, each with a loop that prefetches, which may have nothing to do, in a loop over blocks.
X86 = """
0000000000000000 <multiply>:
   0:	xor    %eax,%eax
   4:	lea    0x100(%rsi),%rdx
   8:	jge    18 <multiply+0x18>
   c:	prefetcht0 (%rdx)
  10:	add    $0x40,%rdx
  14:	jg     c <multiply+0xc>
  18:	vpandq (%rsi),%zmm2,%zmm10        # 1c <multiply+0x1c>
  1c:	{vex} vpdpbusd %ymm11,%ymm10,%ymm1
  20:	nopw   0x0(%rax,%rax,1)
  24:	jne    8 <multiply+0x8>
  28:	vmovaps %zmm1,0x40(%rsp)
  2c:	jl     4 <multiply+0x4>
  30:	ret
"""

# Registers of a line, each with groups, some of which prefetch.
ARM = """
0000000000000000 <multiply>:
   0:	mov	x0, #0x0                   	// #0
   4:	ldr	q3, [x1]
   8:	movi	v4.4s, #0x0
   c:	cmp	x2, x3
  10:	b.ge	18 <multiply+0x18>  // b.tcont
  14:	prfm	pldl1keep, [x4]
  18:	smmla	v0.4s, v3.16b, v5.16b
  1c:	sdot	v1.4s, v3.16b, v5.4b[1]
  20:	cbnz	x5, c <multiply+0xc>
  24:	str	q0, [sp, #16]
  28:	tbnz	w6, #3, 8 <multiply+0x8>
  2c:	b.ne	4 <multiply+0x4>  // b.any
  30:	ret
"""


@pytest.fixture
def cycles(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("kernel_cycles")


def names(cycles, listing, architecture, products, lines):
    disassembly = importlib.import_module("disassembly")
    (code,) = disassembly.parsed(listing, getattr(disassembly, architecture))
    return [i.name for i in cycles.executed(code, 4, products, lines)]


def test_loops_run_as_often_as_the_products_require(cycles):
    group = ["vpandq", "vpdpbusd", "nopw", "jne"]
    prefetch = ["prefetcht0", "add", "jg"]
    assert names(cycles, X86, "X86", 2 * 32, 4) == [
        *("lea", "jge", *prefetch * 2, *group),
        *("jge", *prefetch * 2, *group),
        *("vmovaps", "jl"),
    ]
    assert names(cycles, X86, "X86", 3 * 32, 2).count("prefetcht0") == 2  # the third group skips the loop


def test_loops_over_registers_and_groups(cycles):
    found = names(cycles, ARM, "ARM", 2 * 4 * (32 + 16), 4)
    assert found[:2] == ["ldr", "movi"]
    assert [found.count(name) for name in ("smmla", "prfm", "str", "tbnz", "b.ne")] == [8, 4, 2, 2, 1]


def test_a_number_of_products_that_does_not_fit(cycles):
    with pytest.raises(ValueError, match="no multiple"):
        names(cycles, X86, "X86", 40, 0)


def test_stack_accesses_of_both_architectures(cycles):
    disassembly, kernel_code = (importlib.import_module(m) for m in ("disassembly", "kernel_code"))
    for listing, architecture, n_dots, around in (X86, "X86", 1, 1), (ARM, "ARM", 2, 1):
        (code,) = disassembly.parsed(listing, getattr(disassembly, architecture))
        (loop,) = kernel_code._loops("", code)
        assert (loop.n_dots, loop.n_stack, loop.around) == (n_dots, 0, around)


def test_assembly(cycles):
    disassembly, pipelines = (importlib.import_module(m) for m in ("disassembly", "pipelines"))
    (code,) = disassembly.parsed(X86, disassembly.X86)
    lines = pipelines.assembly(code.instructions(), disassembly.X86)
    assert lines[2] == "jge elsewhere"
    assert lines[6] == "vpandq (%rsi),%zmm2,%zmm10"
    assert "nopw" not in "".join(lines)
    (code,) = disassembly.parsed(ARM, disassembly.ARM)
    lines = pipelines.assembly(code.instructions(), disassembly.ARM)
    assert lines[:5] == ["mov x0, #0x0", "ldr q3, [x1]", "movi v4.4s, #0x0", "cmp x2, x3", "b.ge elsewhere"]


def test_cycles_of_what_waits_for_itself(cycles):
    pipelines = importlib.import_module("pipelines")
    if not pipelines.llvm_mca():
        pytest.skip("needs llvm-mca")
    processors = {p.name: p for p in pipelines.PROCESSORS}
    four = ["vfmadd231ps %ymm0,%ymm1,%ymm2"] * 4
    assert pipelines.cycles(four, processors["skylake"], "x86_64") == pytest.approx(16, rel=0.05)
    four = ["vpdpbusd %zmm0,%zmm1,%zmm2"] * 4
    assert pipelines.cycles(four, processors["znver5"], "x86_64") == pytest.approx(16, rel=0.05)
    eight = [f"sdot v{i}.4s, v8.16b, v9.4b[0]" for i in range(8)]
    assert pipelines.cycles(eight, processors["neoverse-n1"], "aarch64") == pytest.approx(4, rel=0.05)
    with pytest.raises(ValueError, match="llvm-mca failed"):
        pipelines.cycles(["no such instruction"], processors["skylake"], "x86_64")
