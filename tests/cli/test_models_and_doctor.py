"""specdec models and specdec doctor, with a fake pip."""

import os
import re
import sys
from pathlib import Path

import pytest

from spec_local.system import machine
from spec_local.system.native_build import SUFFIX

CRASH_UNTIL_FIXED = (
    "import os, signal, sys\n"
    "if 'spec_local.llama.setup.probe' in sys.orig_argv and not os.path.exists({flag!r}):\n"
    "    os.kill(os.getpid(), signal.SIGILL)\n"
)


def with_pip(specdec, folder, main, sitecustomize=""):
    """An environment in which `python -m pip` runs `main`."""
    env = specdec.sabotaged(folder, sitecustomize)
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(main)
    return env


def test_list(fresh_inside):
    """Lines of five values, which are never cut: those here, those to download, and pairs."""
    done = fresh_inside("models", "list", env={"COLUMNS": "20"})
    assert (done.returncode, done.stderr) == (0, b"")
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert {len(row) for row in rows} == {5}
    by_name = {row[0]: row for row in rows}
    assert len(by_name) == len(rows)
    assert rows[0][:3] == ["starter-draft", "downloaded", "Apache-2.0"]  # the only one that is here
    assert by_name["starter"][1:3] == ["98 MB to download", "Apache-2.0"]
    assert by_name["starter"][4] == "98362432"
    states = [row[1] for row in rows]
    assert states == sorted(states, key=lambda state: (state == "pair", state != "downloaded"))
    _, state, models, text, size = by_name["starter-pair"]
    assert (state, models, size) == ("pair", "starter + starter-draft", str(98362432 + 4216864))
    assert "measured on two 2-core CPUs" in text
    local = fresh_inside("models", "list", "--local").stdout.decode().splitlines()
    assert local == ["\t".join(rows[0])]


def test_the_drafts_of_a_main_model_are_beside_each_other_and_compared(inside):
    rows = [line.split("\t") for line in inside("models", "list").stdout.decode().splitlines()]
    names = [row[0] for row in rows if row[2].startswith("qwen3-8b + ")]
    first = [row[0] for row in rows].index(names[0])
    assert names == [row[0] for row in rows[first : first + len(names)]]
    assert {"qwen3-medium", "qwen3-eagle3", "qwen3-dflash", "qwen3-dspark"} == set(names)
    texts = [row[3] for row in rows[first : first + len(names)]]
    assert all(re.search(r"; (about \d\.\d times as|not) fast(er)? here, estimated", text) for text in texts)
    assert any("; the best draft for qwen3-8b" in text for text in texts)


def test_a_head_to_convert(inside):
    shown = inside("models", "show", "qwen3-small-dspark").stdout.decode()
    assert "accepted    3.64 tokens per step with 7 draft tokens at temperature 1\n" in shown
    assert "            DSpark paper, table 1, MT-Bench\n" in shown
    assert re.search(r"^expected    about \d\.\d times as fast here, estimated$", shown, re.MULTILINE)
    assert "state       to convert\n" in shown
    assert "repo        deepseek-ai/dspark_qwen3_4b_block7\n" in shown
    refused = inside.one_line(inside("models", "pull", "qwen3-4b-dspark"), 2)
    assert "which is not here: run specdec models pull qwen3-4b first" in refused


def test_show_a_pair(inside):
    shown = inside("models", "show", "starter-pair").stdout.decode()
    assert "memory      103 MB for both models, and their KV caches\n" in shown
    assert "gain        1.3 to 1.7 times as fast, measured on two 2-core CPUs\n" in shown
    assert "size        about 4.7 GB\n" in inside("models", "show", "coder-7b").stdout.decode()


def test_path(inside):
    assert "specdec models pull starter" in inside.one_line(inside("models", "path"), 1)
    unknown = inside.one_line(inside("models", "path", "nobody"), 2)
    assert "nobody" in unknown
    assert "specdec models list" in unknown


def test_pull_without_a_network(fresh_inside, tmp_path):
    no_network = "import sys\nprint('noise')\nsys.exit('ERROR: no network, sorry')\n"
    env = with_pip(fresh_inside, tmp_path / "pip", no_network)
    done = fresh_inside("models", "pull", env=env)
    assert done.returncode == 1
    assert done.stdout == b""
    first, second = done.stderr.decode().splitlines()
    assert first.startswith("downloading starter: 98 MB into ")
    assert second.startswith("specdec: ")
    assert "no network, sorry" in second
    assert not [p for p in tmp_path.rglob("*") if "gguf" in p.name.lower()]


def test_doctor_on_a_working_build(fresh):
    done = fresh("doctor")
    assert done.returncode == 0, done
    assert b"llama.cpp works: " in done.stdout
    assert b"llama-cpp-python 0." in done.stdout
    assert b"\nimages: libmtmd\n" in done.stdout
    assert done.stderr == b""


def test_doctor_without_libmtmd(fresh, tmp_path):
    done = fresh("doctor", env={"MTMD_CPP_LIB": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, b"")
    (line,) = (line for line in done.stdout.decode().splitlines() if line.startswith("images: "))
    assert line.startswith("images: no (this llama.cpp was built without libmtmd")
    assert "specdec doctor --fix images" in line


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Metal, which needs no compiler of its own")
@pytest.mark.parametrize(
    ("compilers", "option"),
    [(["nvcc", "glslc"], "-DGGML_CUDA=ON"), (["glslc"], "-DGGML_VULKAN=ON"), ([], None)],
    ids=["CUDA", "Vulkan", "neither"],
)
def test_doctor_builds_for_a_gpu(fresh, tmp_path, compilers, option):
    """CMake's arguments by the compilers that are installed; this build finds no GPU before and after it."""
    fresh.environment["SPECDEC_KERNELS"] = "off"
    log, tools = tmp_path / "log", tmp_path / "tools"
    tools.mkdir()
    for name in compilers:
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    pip = f"import os, sys\nprint(os.environ['CMAKE_ARGS'], *sys.argv[1:], file=open({str(log)!r}, 'a'))\n"
    done = fresh("doctor", "--fix", "gpu", env=with_pip(fresh, tmp_path / "pip", pip) | {"PATH": str(tools)})
    if not option:
        assert "no compiler for a GPU is installed: install CUDA" in done.stderr.decode()
        assert (done.returncode, log.exists()) == (2, False)
        return
    (install,) = log.read_text().splitlines()
    assert install.startswith(f"{option} ")
    assert " -DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF install --force-reinstall " in install
    if "VULKAN" in option:
        (folder,) = re.findall(r" -DCMAKE_CXX_FLAGS=-I(\S+) ", install)
        assert "LayerSettingEXT" in (Path(folder) / "vulkan/vulkan.hpp").read_text()
    assert b"GPU: none that this build of llama.cpp can use (install its driver)" in done.stdout


@pytest.mark.parametrize("fixes", [True, False], ids=["is built", "is not built"])
def test_doctor_adds_libmtmd(fresh, tmp_path, fixes):
    """pip's output and CMake's arguments, and the library in the place where it was missing."""
    fresh.environment["SPECDEC_KERNELS"] = "off"
    place, log = tmp_path / "lib", tmp_path / "log"
    place.mkdir()
    theirs = machine.llama_cpp_folder() / "lib" / f"libmtmd{SUFFIX}"
    pip = (
        "import os, sys\n"
        f"print(os.environ['CMAKE_ARGS'], *sys.argv[1:], file=open({str(log)!r}, 'a'))\n"
        + (f"os.symlink({str(theirs)!r}, {str(place / theirs.name)!r})\n" if fixes else "sys.exit(1)\n")
    )
    env = with_pip(fresh, tmp_path / "pip", pip)
    env |= {"MTMD_CPP_LIB": str(place), "CMAKE_ARGS": "-DGGML_CUDA=ON"}
    done = fresh("doctor", "--fix", "images", env=env)
    (install,) = log.read_text().splitlines()
    assert install.startswith("-DGGML_CUDA=ON -DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF install --force-reinstall ")
    assert done.returncode == (not fixes)
    failed = b"images: no (a build with libmtmd could not be installed: see above)\n"
    line = b"images: libmtmd\n" if fixes else failed
    assert done.stdout.count(b"images: ") == done.stdout.count(line) == 1
    if fixes:  # only once
        fresh("doctor", "--fix", "images", env=env)
        assert len(log.read_text().splitlines()) == 1


def test_doctor_on_a_crashing_build(fresh_inside, tmp_path):
    env = fresh_inside.sabotaged(tmp_path / "sick", CRASH_UNTIL_FIXED.format(flag=""))
    done = fresh_inside("doctor", env=env)
    assert done.returncode == 1
    report = done.stdout.decode()
    assert "does not work on this machine: SIGILL" in report
    assert "specdec doctor --fix" in report
    assert "CMAKE_ARGS=" in report


def test_doctor_on_a_processor_that_is_too_old_for_a_wheel(fresh, tmp_path):
    features = "frozenset({'sse4_2', 'avx'})"
    old = f"from spec_local.system import machine\nmachine.processor_features = lambda: {features}\n"
    env = fresh.sabotaged(tmp_path / "sick", CRASH_UNTIL_FIXED.format(flag="") + old)
    line = "SIGILL (this processor lacks avx2, bmi2, f16c, fma, which wheels of specdec need)\n"
    assert line in fresh("doctor", env=env).stdout.decode()


@pytest.mark.parametrize("fixes", [True, False], ids=["works then", "never works"])
def test_doctor_rebuilds(fresh, tmp_path, fixes):
    flag, log = str(tmp_path / "fixed"), str(tmp_path / "log")
    fresh.environment["SPECDEC_KERNELS"] = "off"  # they are neither compiled nor measured
    pip = (
        "import os, sys\n"
        f"print(os.environ['CMAKE_ARGS'], *sys.argv[1:], file=open({log!r}, 'a'))\n"
        "print('output of pip')\n"
    )
    env = with_pip(
        fresh,
        tmp_path / "pip",
        pip + (f"open({flag!r}, 'w')\n" if fixes else ""),
        CRASH_UNTIL_FIXED.format(flag=flag),
    )
    done = fresh("doctor", "--fix", env=env)
    installs = (tmp_path / "log").read_text().splitlines()
    assert b"output of pip" in done.stderr
    assert b"pip" not in done.stdout.replace(str(tmp_path).encode(), b"").lower()
    for part in ("-DGGML_NATIVE=OFF", "--force-reinstall", "--no-binary", "llama-cpp-python=="):
        assert part in installs[0]
    if fixes:
        assert done.returncode == 0
        assert len(installs) == 1
        assert b"llama.cpp works: " in done.stdout
    else:
        assert done.returncode == 1
        assert len(installs) == len(set(installs)) > 1 or os.uname().machine != "x86_64"
        assert b"No build works" in done.stdout
