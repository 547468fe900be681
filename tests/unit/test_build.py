"""Builds of llama.cpp with fewer instruction sets, and trying one after the other."""

import shlex
import sys

import pytest

from spec_local.llama.setup import build
from spec_local.llama.setup.build import recipes, repair

HASWELL = {"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"}
SAPPHIRE = HASWELL | {
    "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16",
    "avx_vnni", "amx_tile", "amx_int8",
}  # fmt: skip


@pytest.fixture
def processor(monkeypatch, pretend):
    def replace(features, kind="x86_64"):
        pretend(processor_features=frozenset(features))
        monkeypatch.setattr("platform.machine", lambda: kind)

    return replace


def enabled(recipe):
    arguments = recipe.cmake_args.split()
    assert arguments.pop() == "-DMTMD_VIDEO=OFF"  # it starts ffmpeg
    switches = dict(s.removeprefix("-DGGML_").split("=") for s in arguments)
    assert switches.pop("NATIVE") == "OFF"
    assert set(switches.values()) <= {"ON", "OFF"}
    return {name for name, value in switches.items() if value == "ON"}


def test_a_new_processor(processor):
    processor(SAPPHIRE)
    first, second, third = recipes()
    assert {"AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AVX_VNNI"} <= enabled(first)
    assert enabled(second) == {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"}
    assert enabled(third) == {"SSE42"}
    assert not any("AMX" in recipe.cmake_args.replace("AVX512", "") for recipe in recipes())


def test_incomplete_avx512_is_not_used(processor):
    processor(SAPPHIRE - {"avx512dq"})
    assert "AVX512" not in enabled(recipes()[0])
    processor(SAPPHIRE - {"f16c"})  # an older instruction set that it needs
    assert not {option for option in enabled(recipes()[0]) if option.startswith("AVX512")}


def test_an_older_processor_has_no_duplicate_recipes(processor):
    processor(HASWELL)
    made = recipes()
    assert len({r.cmake_args for r in made}) == len(made) == 2


def test_other_architectures(processor):
    processor(set(), "arm64")
    (recipe,) = recipes()
    assert recipe.cmake_args == "-DGGML_NATIVE=OFF -DMTMD_VIDEO=OFF"


def test_a_build_with_images_keeps_the_options_of_the_user(monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    assert build.with_images().cmake_args == "-DGGML_CUDA=ON -DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF"
    monkeypatch.delenv("CMAKE_ARGS")
    assert build.with_images().cmake_args == "-DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF"


@pytest.mark.parametrize("works_at", [0, 1, None])
def test_repair(processor, works_at):
    processor(SAPPHIRE)
    candidates = recipes()
    installed = []

    def install(recipe):
        installed.append(recipe)
        return True

    events = list(repair(lambda: works_at is not None and len(installed) > works_at, install))
    n = len(candidates) if works_at is None else works_at + 1
    assert installed == candidates[:n]
    assert [r for r, _ in events] == [r for r in candidates[:n] for _ in range(2)]
    assert [works for _, works in events[0::2]] == [None] * n
    assert [works for _, works in events[1::2]] == [i == works_at for i in range(n)]


def test_repair_yields_a_recipe_before_installing_it(processor):
    processor(SAPPHIRE)
    installed = []
    events = repair(lambda: True, lambda recipe: installed.append(recipe) or True)
    assert next(events)[1] is None
    assert installed == []


def test_a_failed_build_is_not_tested(processor):
    processor(SAPPHIRE)
    events = list(repair(lambda: pytest.fail("tested a build that was not installed"), lambda recipe: False))
    assert not any(works for _, works in events)


def test_command(processor):
    processor(SAPPHIRE)
    assignment, *command = shlex.split(recipes()[0].command())
    assert assignment == f"CMAKE_ARGS={recipes()[0].cmake_args}"
    assert command[0] == sys.executable
    assert "install" in command
    # Without pip's cache, from source, and without other packages.
    for option in ("--force-reinstall", "--no-deps", "--no-cache-dir"):
        assert option in command
    assert command[command.index("--no-binary") + 1] == "llama-cpp-python"
    assert command[-1].startswith("llama-cpp-python==")


@pytest.mark.parametrize("code", [0, 1])
def test_install(processor, tmp_path, monkeypatch, capfd, code):
    processor(SAPPHIRE)
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$CMAKE_ARGS|$CMAKE_BUILD_PARALLEL_LEVEL|$*"\nexit {code}\n')
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    monkeypatch.setattr("sys.stderr", sys.__stderr__)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "3")
    assert build.install(recipes()[1]) is (code == 0)
    out, err = capfd.readouterr()
    assert out == ""  # stdout is for the report
    assert err.startswith(f"{recipes()[1].cmake_args}|3|")
