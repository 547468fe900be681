"""The CPU kernels: where they are built, which are chosen, and that nothing fails without them."""

import ctypes
import json
import shutil
import sys
from pathlib import Path

import pytest

from spec_local import kernels, machine
from spec_local.child_process import ChildResult, run_child
from spec_local.kernels import build, check
from spec_local.llama import runtime
from tests import fake_kernels

ALL = frozenset().union(*build.INSTRUCTION_SETS.values())
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The fake library as the build makes it, once."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", fake_kernels.write_source(folder / "sources"))
        patch.setattr(build, "folders", lambda: [folder / "kernels"])
        patch.setattr("platform.machine", lambda: "x86_64")
        patch.setattr(machine, "processor_features", lambda: ALL)
        assert build.build() is None
        (library,) = (folder / "kernels").iterdir()
        return library


@pytest.fixture
def processor(tmp_path, monkeypatch, afresh):
    """An x86-64 with all features, where nothing is built or loaded; a function that sets its features."""

    def has(features):
        monkeypatch.setattr(machine, "processor_features", lambda: frozenset(features))
        afresh()

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(build, "SOURCES", fake_kernels.write_source(tmp_path / "sources"))
    monkeypatch.setattr(build, "folders", lambda: [tmp_path / "env/kernels", tmp_path / "user/kernels"])
    monkeypatch.delenv("CXX", raising=False)
    has(ALL)
    return has


@pytest.fixture
def library(compiled, processor, tmp_path):
    """The library, where it belongs."""
    path = tmp_path / "env/kernels" / build._name()
    path.parent.mkdir(parents=True)
    shutil.copy(compiled, path)
    return path


@pytest.fixture
def tested(monkeypatch):
    """Self-tests pass without a child; the instruction sets that were tried."""
    tried = []
    monkeypatch.setattr(check, "run_child", lambda *a: tried.append(a[-1]) or ChildResult(None, None, {}))
    return tried


@pytest.fixture
def afresh(monkeypatch):
    """As in the next process."""

    def begin():
        monkeypatch.setenv(kernels.VARIABLE, "auto")
        monkeypatch.setattr(kernels, "_state", kernels._State())

    return begin


@needs_compiler
def test_the_build_leaves_one_library(compiled):
    assert [path.name for path in compiled.parent.iterdir()] == [compiled.name]
    assert len(compiled.stem.removeprefix("specdec-kernels-")) == 16
    probe = compiled.parents[1] / "probe"
    probe.touch()
    assert compiled.stat().st_mode & 0o444 == probe.stat().st_mode & 0o444  # for all users, as any file


@needs_compiler
def test_the_best_that_passes_is_chosen_and_named(library):
    assert kernels.status() == kernels.Status("avx512_vnni")
    assert str(kernels.status()) == "avx512_vnni"
    assert kernels.identity() == f"avx512_vnni:{build.digest()}"
    record = json.loads(library.with_suffix(".json").read_text())
    assert record["self_tests"] == {"avx512_vnni": "passed"}


@needs_compiler
@pytest.mark.parametrize(
    ("outcomes", "chosen", "said"),
    [
        ({"avx512_vnni": "crash"}, "avx_vnni", ["SIGILL", "passed"]),
        ({"avx512_vnni": "Q8_0", "avx_vnni": "refuse"}, "avx2", ["Q8_0", "they do not fit", "passed"]),
        ({"avx512_vnni": "crash", "avx_vnni": "crash", "avx2": "wrong"}, None, ["SIGILL", "SIGILL", "wrong"]),
    ],
)  # fmt: skip
def test_what_fails_its_self_test_is_not_used(library, monkeypatch, outcomes, chosen, said):
    for name, outcome in outcomes.items():
        monkeypatch.setenv(f"FAKE_{name}", outcome)
    status = kernels.status()
    assert status.instruction_set == chosen
    assert list(check.verdict(library).self_tests.values()) == said
    if chosen is None:
        assert status.reason == "the self-test failed with avx512_vnni: SIGILL; avx_vnni: SIGILL; avx2: wrong"
        assert str(status) == f"not used ({status.reason})"
        assert kernels.identity() == ""


@needs_compiler
def test_only_what_the_processor_claims_is_tried(library, processor, tested, afresh):
    processor({"avx2", "fma", "f16c"})
    assert kernels.status().instruction_set == "avx2"
    processor({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma", "f16c"})  # as macOS has it
    assert kernels.status().instruction_set == "avx512_vnni"
    processor(())  # nothing tells
    assert kernels.status().instruction_set == "avx512_vnni"
    assert tested == ["avx2", "avx512_vnni", "avx512_vnni"]
    processor({"sse4_2"})
    assert "lacks AVX2" in kernels.status().reason


@needs_compiler
def test_a_self_test_is_remembered_for_one_processor(library, processor, tested, afresh):
    for _ in range(2):
        afresh()
        assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested) == 1
    processor(ALL | {"sse4_2"})
    for _ in range(2):
        afresh()
        kernels.status()
    assert len(tested) == 2
    library.with_suffix(".json").write_text('{"instruction_set": "avx2"')
    afresh()
    assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested) == 3


@needs_compiler
def test_a_record_that_cannot_be_kept_is_no_error(library, tested, monkeypatch, afresh):
    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(check, "write_atomically", refuse)
    for _ in range(2):
        afresh()
        for _ in range(2):
            assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested) == 2  # once a process


def test_nothing_built(processor):
    assert kernels.status().reason == "not built: run specdec doctor --fix"
    assert kernels.identity() == ""


@needs_compiler
@pytest.mark.parametrize("change", ["sources", "llama.cpp", "flags"])
def test_built_for_something_else(library, tested, monkeypatch, change):
    match change:
        case "sources":
            (build.SOURCES / "fake.h").write_text("// newer\n")
        case "llama.cpp":
            monkeypatch.setattr(machine, "llama_cpp_build", lambda: "another")
        case "flags":
            monkeypatch.setattr(build, "_FLAGS", ("-O1",))
    assert kernels.status().reason == (
        "built for another version of specdec or llama.cpp: run specdec doctor --fix"
    )
    assert tested == []


def test_machines_without_kernels(processor, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert kernels.status().reason == "this processor is not x86-64: llama.cpp's own kernels are used"
    assert kernels.rebuild() == kernels.status().reason
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux and macOS" in build.unsupported()


@pytest.mark.parametrize("where", ["path", "CXX"])
def test_no_compiler(processor, tmp_path, monkeypatch, where):
    monkeypatch.setenv("PATH", str(tmp_path)) if where == "path" else monkeypatch.setenv("CXX", "gone-c++ -x")
    assert kernels.rebuild() == "no C++ compiler was found: install one, or name it in CXX"
    assert kernels.status().reason == "not built: run specdec doctor --fix"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo \"g++: error: unrecognized command-line option '-mavxvnni'; did you mean x?\" >&2; exit 1",
            "{} does not know -mavxvnni: gcc 11, clang 12 or later is needed; name it in CXX",
        ),
        ("echo In x: >&2; echo 'fatal error: no math.h' >&2; exit 1", "{} failed: fatal error: no math.h"),
        ("echo all is lost >&2; exit 1", "{} failed: all is lost"),
        ("exit 3", "{} failed: exit code 3"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails(processor, tmp_path, monkeypatch, script, reason):
    compiler = fake_kernels.compiler(tmp_path, script)
    monkeypatch.setenv("CXX", compiler)
    old = tmp_path / "env/kernels/specdec-kernels-0123456789abcdef.so"
    old.parent.mkdir(parents=True)
    old.touch()
    assert kernels.rebuild() == reason.format(compiler)
    assert list(old.parent.iterdir()) == [old]  # what was there stays, and nothing else


TOUCH = """echo "$@" >> log; while [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done"""


def test_what_the_compiler_is_told(processor, tmp_path, monkeypatch):
    """Real sources: each has its own instruction set only, with llama.cpp's headers and libraries."""
    monkeypatch.setattr(build, "SOURCES", Path(kernels.__file__).parent)
    compiler = fake_kernels.compiler(tmp_path, TOUCH.replace("log", str(tmp_path / "log")))
    monkeypatch.setenv("CXX", f"{compiler} -v")
    folder = tmp_path / "env/kernels"
    folder.mkdir(parents=True)
    for name in ("specdec-kernels-0.so", "specdec-kernels-0.json", "notes.txt"):
        (folder / name).touch()
    assert kernels.rebuild() is None
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", build._name()]
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    compiles = {Path(call[call.index("-c") + 1]).name: call for call in calls if "-c" in call}
    assert set(compiles) == {path.name for path in build.SOURCES.glob("*.cpp")}
    for name, call in compiles.items():
        assert call[:2] == ["-v", "-O3"]
        (headers,) = (flag[2:] for flag in call if flag.startswith("-I"))
        assert (Path(headers) / "ggml.h").is_file()
        assert ("-mavx512f" in call) == (name == "avx512.cpp")
        assert ("-mavxvnni" in call) == (name == "avxvnni.cpp")
        assert ("-mfma" in call) == (name in build._EXTRA_FLAGS)
    assert set(build._EXTRA_FLAGS) < set(compiles)
    link = calls[-1]
    assert {"-shared", "-lggml-base", "-lggml-cpu"} < set(link)
    (libraries,) = (flag[2:] for flag in link if flag.startswith("-L"))
    assert list(Path(libraries).glob("libggml-cpu*"))


def test_what_is_compiled_again_is_tested_again(processor, tested, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_kernels.compiler(tmp_path, TOUCH.replace("log", "/dev/null")))
    for _ in range(2):
        assert kernels.rebuild() is None
        assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested) == 2


def test_an_environment_that_cannot_be_written_to(processor, tmp_path, monkeypatch):
    compiler = fake_kernels.compiler(tmp_path, TOUCH.replace("log", "/dev/null"))
    monkeypatch.setenv("CXX", compiler)
    (tmp_path / "env").touch()  # a file where the folder should be
    assert kernels.rebuild() is None
    assert build.built() == tmp_path / "user/kernels" / build._name()
    (tmp_path / "user/kernels" / build._name()).unlink()
    (tmp_path / "user/kernels").rmdir()
    (tmp_path / "user/kernels").touch()
    assert kernels.rebuild() == f"File exists: {tmp_path / 'user/kernels'}"
    monkeypatch.setenv("CXX", "'c++")  # no shell could read it
    assert kernels.rebuild() == "No closing quotation"


@needs_compiler
def test_loading_and_switching(library, tested):
    loaded = ctypes.CDLL(str(library))
    kernels.load()
    assert kernels.status() == kernels.Status("avx512_vnni")
    assert loaded.fake_enabled() == -1  # as they were installed
    kernels.use("off")
    assert loaded.fake_enabled() == 0
    assert kernels.status().reason == "--kernels off"
    assert kernels.identity() == ""
    kernels.use("auto")
    assert loaded.fake_enabled() == 1
    assert kernels.identity().startswith("avx512_vnni:")


@needs_compiler
def test_what_was_off_when_llama_was_loaded_stays_off(library, monkeypatch):
    monkeypatch.setattr(check, "run_child", lambda *a: pytest.fail("tried"))
    kernels.use("off")
    kernels.load()
    kernels.use("auto")
    assert kernels.status().reason == "--kernels off"
    assert kernels._state.native is None


@needs_compiler
def test_loading_never_raises(library, tested, monkeypatch, afresh):
    monkeypatch.setenv("FAKE_avx512_vnni", "refuse")
    kernels.load()
    assert kernels.status().reason == "they do not fit"
    assert kernels.identity() == ""
    afresh()
    library.unlink()
    library.write_bytes(b"not a library")
    kernels.load()
    assert kernels.status().instruction_set is None
    assert "\n" not in kernels.status().reason
    afresh()

    def fail():
        raise ModuleNotFoundError("llama-cpp-python\nis not installed")

    monkeypatch.setattr(build, "digest", fail)
    kernels.load()
    assert kernels.status().reason == "llama-cpp-python is not installed"


@needs_compiler
def test_what_is_known_of_a_model_depends_on_the_kernels(library, tested, tmp_path, afresh):
    model = tmp_path / "m.gguf"
    model.touch()
    used = runtime.fingerprint(model)
    kernels.use("off")
    off = runtime.fingerprint(model)
    afresh()
    assert runtime.fingerprint(model) == used
    tested_as = json.loads(library.with_suffix(".json").read_text())
    library.with_suffix(".json").write_text(json.dumps(tested_as | {"instruction_set": "avx2"}))
    afresh()
    other = runtime.fingerprint(model)
    library.unlink()
    afresh()
    assert runtime.fingerprint(model) == off  # without them nothing has changed
    assert len({used, off, other}) == 3


@pytest.mark.parametrize("mode", kernels.MODES)
def test_children_are_told(processor, tmp_path, monkeypatch, mode):
    path = tmp_path / "python"
    path.write_text(f"""#!/bin/sh\necho "{{\\"mode\\": \\"${kernels.VARIABLE}\\"}}"\n""")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setenv(kernels.VARIABLE, "something else")
    kernels.use(mode)
    assert run_child("any").facts == {"mode": mode}
