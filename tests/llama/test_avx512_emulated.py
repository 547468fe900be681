"""The AVX-512 kernels, emulated with AVX2: their results have the same bits as those of the AVX2 kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_local.kernels import build
from spec_local.system import native_build

TESTS = Path(__file__).parents[1]
N_PACKED = 13  # types whose results have the same bits with all instruction sets: all but F16, BF16 and F32
# Each number of columns is compiled separately, which takes a minute for all 12. More columns than a kernel
# multiplies at once are multiplied in several passes.
MOST_COLUMNS = os.environ.get("SPECDEC_TEST_COLUMNS", "3")
FLAGS = ("-std=c++17", "-Wno-psabi", "-Wno-ignored-attributes")


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """A program that multiplies by random matrices, with the compiled library and the emulated kernels."""
    library, compiler, headers = build.built(), native_build.compiler(), native_build.headers()
    if not sys.platform.startswith("linux") or "avx2" not in build.reported():
        pytest.skip("needs Linux on a processor with AVX2")
    if not library or not compiler or not headers:
        pytest.skip("needs the compiled kernels and a compiler")
    work = tmp_path_factory.mktemp("emulated")
    sources = shutil.copytree(build.SOURCES, work / "kernels")
    simd = (sources / "simd_avx512.h").read_text()
    assert "max_columns = 12;" in simd
    (sources / "simd_avx512.h").write_text(
        simd.replace("max_columns = 12;", f"max_columns = {MOST_COLUMNS};")
    )
    command = [*compiler, *FLAGS, f"-I{headers}", f"-I{build.SOURCES}"]
    emulated, program = work / "avx512.o", work / "products"
    included = str(TESTS / "avx512/emulated.h")
    own = [*command, "-O1", *build.instruction_sets()["avx2"].flags, "-include", included]
    # The program's kernels take precedence over the library's of the same name.
    linked = [str(library), f"-Wl,-rpath,{library.parent}"]
    linked += native_build.link_options("ggml-base", "ggml-cpu")
    for each in (
        [*own, "-c", str(sources / "avx512.cpp"), "-o", str(emulated)],
        [*command, "-O2", str(TESTS / "arm64/products.cpp"), str(emulated), *linked, "-o", str(program)],
    ):
        done = subprocess.run(each, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return program


def run(program, name):
    done = subprocess.run([program, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    lines = [line.split() for line in done.stdout.splitlines()]
    return {kind: digest for kind, _, _, digest in lines}


def test_results_have_the_same_bits_as_with_avx2(products):
    """The self-test passes, too; it includes attention."""
    emulated, own = run(products, "avx512_vnni"), run(products, "avx2")
    packed = list(own)[:N_PACKED]
    assert {t: emulated[t] for t in packed} == {t: own[t] for t in packed}
