"""Building and selecting the CPU kernels. Nothing fails without them."""

import ctypes
import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from spec_local import kernels
from spec_local.kernels import build, check, measure, records
from spec_local.llama import runtime
from spec_local.system import machine
from spec_local.system.native_build import SUFFIX
from tests import fake_kernels

ALL = frozenset().union(*(each.features for each in build.instruction_sets("x86_64").values()))
ANY = 1000.0  # cores: measurements are not disturbed by whatever else this machine does
ANOTHER = f"specdec-kernels-{0:016}{SUFFIX}"
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The fake library, compiled once."""
    return fake_kernels.compile_library(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def processor(tmp_path, monkeypatch, new_process, pretend):
    """An x86-64 processor with all features and no kernels; a function that sets its features.

    The environment is `tmp_path / "env"`, the user's data folder `tmp_path / "user"`.
    """

    def set_features(features):
        pretend(processor_features=frozenset(features))
        new_process()

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    for kind, folder in {"data": "user", "cache": "cache"}.items():
        monkeypatch.setattr(f"platformdirs.user_{kind}_dir", lambda name, f=folder: str(tmp_path / f))
    monkeypatch.delenv("CXX", raising=False)
    set_features(ALL)
    return set_features


@pytest.fixture
def folder(processor):
    """The folder for the library in the environment, empty."""
    folder = build.folders()[0]
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def library(compiled, folder):
    """The library, in its folder."""
    return Path(shutil.copy(compiled, folder / f"specdec-kernels-{build.digest()}{SUFFIX}"))


@pytest.fixture
def fake_compiler(compiled, processor, tmp_path, monkeypatch):
    """A compiler whose output is always the fake library."""
    script = f'while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {compiled} "$2"; shift; done'
    monkeypatch.setenv("CXX", fake_kernels.compiler(tmp_path, script))


@pytest.fixture
def self_test(tmp_path, monkeypatch):
    """A function that replaces the self-tests' processes by a shell script.

    $4 is the library, $5 the instruction set.
    """
    python = sys.executable

    def replace(script):
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/sh\n[ "$3" = spec_local.kernels.check ] || exec {python} "$@"\n{script}\necho "{{}}"\n'
        )
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


@pytest.fixture
def tested(self_test, tmp_path):
    """Self-tests that take no time and pass; a function that returns which sets were tested until now."""
    log = tmp_path / "tested"
    log.touch()
    self_test(f'echo "$5" >> {log}')
    return lambda: log.read_text().split()


@pytest.fixture
def new_process(monkeypatch):
    """A function that resets the state of the process."""

    def reset():
        monkeypatch.setenv(kernels.VARIABLE, "auto")
        monkeypatch.delenv(kernels.INSTRUCTION_SET, raising=False)
        monkeypatch.setattr(kernels, "_state", kernels._State())

    return reset


@needs_compiler
def test_the_build_leaves_one_library(fake_compiler, folder, compiled):
    assert build.build() is None
    (library,) = folder.iterdir()
    assert library == build.built()
    assert len(library.stem.removeprefix("specdec-kernels-")) == 16
    assert library.read_bytes() == compiled.read_bytes()
    (folder / "probe").touch()
    assert library.stat().st_mode & 0o444 == (folder / "probe").stat().st_mode & 0o444  # for all users


@needs_compiler
def test_the_best_set_that_passes_is_selected(library):
    assert kernels.status() == kernels.Status("avx512_vnni", limits=measure.UNMEASURED)
    assert kernels.identity() == f"avx512_vnni:{build.digest()}:F16-8:F32-32"
    record = json.loads(library.with_suffix(".json").read_text())
    assert record["self_tests"] == {"avx512_vnni": "passed"}


@needs_compiler
def test_failed_self_tests(library, monkeypatch):
    for name, outcome in {"avx512_vnni": "crash", "avx_vnni": "refuse", "avx2": "Q8_0"}.items():
        monkeypatch.setenv(f"FAKE_{name}", outcome)
    status = kernels.status()
    assert status.instruction_set is None
    assert list(check.verdict(library).self_tests.values()) == ["SIGILL", "they do not fit", "Q8_0"]
    assert "avx512_vnni: SIGILL; avx_vnni: they do not fit; avx2: Q8_0" in str(status)
    assert kernels.identity() == ""


@needs_compiler
def test_kernels_that_could_be_used_are_missing_until_they_are_compiled(library, processor, new_process):
    assert kernels.missing() is None
    library.rename(library.with_name(ANOTHER))
    new_process()
    assert "another version" in kernels.missing()
    processor({"sse4_2"})
    assert kernels.missing() is None
    kernels.use("off")
    assert kernels.missing() is None


@needs_compiler
def test_only_reported_instruction_sets_are_tested(library, processor, tested, new_process):
    processor({"avx2", "fma", "f16c"})
    assert kernels.status().instruction_set == "avx2"
    processor(
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma", "f16c"}
    )  # spelled as on macOS
    assert kernels.status().instruction_set == "avx512_vnni"
    processor(())  # unknown
    assert kernels.status().instruction_set == "avx512_vnni"
    assert tested() == ["avx2", "avx512_vnni", "avx512_vnni"]
    processor({"sse4_2"})
    assert "lacks AVX2" in kernels.status().reason


@needs_compiler
def test_an_instruction_set_can_be_forced(library, monkeypatch, new_process):
    """It is tested, too, and nothing is recorded."""
    monkeypatch.setenv(kernels.INSTRUCTION_SET, "avx2")
    assert kernels.status().instruction_set == "avx2"
    assert kernels.identity().startswith("avx2:")
    assert not library.with_suffix(".json").exists()
    new_process()
    monkeypatch.setenv(kernels.INSTRUCTION_SET, "avx2")
    monkeypatch.setenv("FAKE_avx2", "crash")
    assert kernels.status() == kernels.Status(None, "the self-test failed with avx2: SIGILL")
    new_process()
    monkeypatch.setenv(kernels.INSTRUCTION_SET, "sse4")
    assert "is none of avx512_vnni, avx_vnni, avx2" in kernels.status().reason


@needs_compiler
def test_results_are_recorded_for_one_machine(library, processor, tested, pretend, new_process):
    for _ in range(2):
        new_process()
        assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested()) == 1
    processor(ALL | {"sse4_2"})
    for _ in range(2):
        new_process()
        kernels.status()
    assert len(tested()) == 2
    pretend(llama_cpp_build="another")  # of the same version
    new_process()
    kernels.status()
    assert len(tested()) == 3
    library.with_suffix(".json").write_text('{"instruction_set": "avx2"')
    new_process()
    assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested()) == 4


@needs_compiler
def test_limits_are_measured_for_one_machine(library, tested, monkeypatch, new_process, pretend):
    def limits():
        new_process()
        return dict(kernels.status().limits) if kernels.status().measured else None

    assert limits() is None
    monkeypatch.setenv("FAKE_SLOW", "Q4_K")
    assert kernels.compare(most_others=ANY) is None
    assert limits() == {"Q4_K": 0}
    monkeypatch.setenv("FAKE_SLOW", "F16")
    new_process()
    monkeypatch.setenv(kernels.INSTRUCTION_SET, "avx2")
    assert not kernels.status().measured
    assert kernels.compare(most_others=ANY) is None
    assert kernels.status().limits == {"F16": 6}
    assert limits() == {"Q4_K": 0}
    pretend(default_threads=99)
    assert limits() is None


@needs_compiler
def test_how_weights_are_read_is_measured_with_all_types(library, tested, monkeypatch, new_process):
    def ways(faster, types):
        monkeypatch.setenv("FAKE_READING", faster)
        assert kernels.compare(types, ANY) is None
        new_process()
        return round(kernels.status().other_reading.packed, 2)

    assert ways("1", None) == 0.9
    assert ways("0", ["Q4_K"]) == 0.9  # as before
    assert ways("0", None) == 1.11


@needs_compiler
def test_limits_that_cannot_be_used(library, tested, monkeypatch, new_process):
    monkeypatch.setenv("FAKE_SLOW", "refuse")
    assert "there is not enough memory" in kernels.compare()
    monkeypatch.setenv("FAKE_SLOW", "Q4_K")
    assert "other programs used the cores" in kernels.compare(most_others=-1.0)
    assert not kernels.status().times
    assert kernels.compare(most_others=ANY) is None
    (path,) = library.parent.glob("*-threads.json")
    known = path.read_text()
    damaged = ("", known.replace("Q4_K", "Q9"), known.replace("512", "5"), known[:-9], '{"times": 1}')
    for text in damaged:
        path.write_text(text)
        new_process()
        assert (kernels.status().limits, kernels.status().measured) == (measure.UNMEASURED, False)
    path.unlink()
    path.mkdir()  # then in the user's folder
    assert kernels.compare(most_others=ANY) is None
    new_process()
    assert kernels.status().limits == {"Q4_K": 0}
    own = records.paths(library)[1].parent / path.name
    own.unlink()
    own.mkdir()
    assert f"{own.parent} cannot be written" in kernels.compare(most_others=ANY)
    kernels.use("off")
    assert kernels.compare() == "`kernels=off`"


@needs_compiler
def test_types_that_sessions_contradict_are_measured_again(library, tested, monkeypatch, new_process):
    kernels.doubt(["Q4_K"])  # nothing was measured yet
    monkeypatch.setenv("FAKE_SLOW", "Q4_K")
    assert kernels.compare(most_others=ANY) is None
    monkeypatch.delenv("FAKE_SLOW")
    kernels.doubt(["Q4_K", "Q9"])  # no more than once a day
    new_process()
    assert kernels.status().doubts == ()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    kernels.doubt(["Q4_K", "Q9"])
    new_process()
    assert kernels.status().doubts == ("Q4_K",)
    assert kernels.status().limits == {"Q4_K": 0}
    monkeypatch.setenv("FAKE_SLOW", "Q8_0")  # which is not in doubt
    assert kernels.compare(kernels.status().doubts, ANY) is None
    new_process()
    assert (kernels.status().doubts, kernels.status().limits) == ((), {})
    assert kernels.status().measured


@needs_compiler
def test_results_that_cannot_be_recorded(library, tested, new_process):
    for path in records.paths(library):
        path.mkdir(parents=True)
    for _ in range(2):
        new_process()
        for _ in range(2):
            assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested()) == 2  # once per process


@needs_compiler
def test_a_folder_that_is_not_writable(library, tested, new_process):
    """As that of a package that root installed: results are in the user's own folder."""
    library.with_suffix(".json").mkdir()
    for _ in range(2):
        new_process()
        assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested()) == 1
    assert records.paths(library)[1].is_file()
    library.with_suffix(".json").rmdir()
    records.forget(library)
    assert not records.paths(library)[1].exists()


@needs_compiler
def test_a_library_in_the_package(library, tested, tmp_path, monkeypatch, new_process):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(build.native_build, "prebuilt", lambda kind: package)
    library.rename(package / library.name)
    new_process()
    assert kernels.status().instruction_set == "avx512_vnni"
    assert build.built() == package / library.name


@needs_compiler
def test_built_for_another_version(library, tested):
    library.rename(library.with_name(ANOTHER))
    assert kernels.status().reason.startswith("built for another version")
    assert tested() == []


def test_the_version_is_that_of_the_sources_llama_cpp_and_the_flags(tmp_path, pretend):
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    assert build.digest(sources) == build.digest()
    (sources / "x86.h").write_text("// newer\n")
    digests = {build.digest(), build.digest(sources), build.digest(flags=("-O1",))}
    pretend(binding_version="another")
    assert len(digests | {build.digest()}) == 4


def test_unsupported_machines(processor, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "this processor is neither x86-64 nor Arm64" in kernels.status().reason
    assert kernels.rebuild() == kernels.status().reason
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux and macOS" in build.unsupported()


@needs_compiler
@pytest.mark.parametrize("name", ["aarch64", "arm64"])  # as Linux and macOS call it
def test_arm(fake_compiler, processor, tested, monkeypatch, new_process, name):
    monkeypatch.setattr("platform.machine", lambda: name)
    processor({"asimd", "asimddp", "i8mm"})
    assert kernels.rebuild() is None
    assert kernels.status().instruction_set == "neon_i8mm"
    processor({"asimd", "asimddp"})
    assert kernels.status().instruction_set == "neon_dotprod"
    new_process()
    monkeypatch.setenv(kernels.INSTRUCTION_SET, "avx2")
    assert "is none of neon_i8mm, neon_dotprod" in kernels.status().reason
    processor({"asimd"})
    reason = "this processor lacks dot products (FEAT_DotProd): llama.cpp's own kernels are used"
    assert kernels.status().reason == kernels.rebuild() == reason
    assert kernels.missing() is None  # nothing that the user could do


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ({16: 0b11, 26: 0}, {"asimd"}),  # Cortex-A72
        ({16: 0b11 | 1 << 20, 26: 0}, {"asimd", "asimddp"}),  # Cortex-A76
        ({16: 0b11 | 1 << 20, 26: 1 << 13 | 1 << 14}, {"asimd", "asimddp", "i8mm"}),  # Neoverse V1
    ],
)
def test_arm_features_on_linux(words, features):
    assert machine.arm_features(words) == features


def test_arm_features_on_macos(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sysctl = tmp_path / "sysctl"
    for i8mm in (0, 1):
        output = (
            f"hw.optional.arm.AdvSIMD: 1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: {i8mm}"
        )
        sysctl.write_text(f"#!/bin/sh\n[ $* = hw.optional.arm ] && echo '{output}'\n")
        sysctl.chmod(0o755)
        machine.processor_features.cache_clear()
        assert machine.processor_features() == {"asimd", "asimddp", *(["i8mm"] if i8mm else [])}
    machine.processor_features.cache_clear()


@pytest.mark.parametrize("where", ["path", "CXX"])
def test_no_compiler(processor, tmp_path, monkeypatch, where):
    monkeypatch.setenv("PATH", str(tmp_path)) if where == "path" else monkeypatch.setenv("CXX", "gone-c++ -x")
    assert kernels.rebuild() == "no C++ compiler was found: install one, or name it in CXX"
    assert kernels.status().reason.startswith("not built: ")
    assert kernels.identity() == ""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo \"error: unrecognized option '-mavxvnni'; did you mean x?\" >&2; exit 1", "support -mavxvnni"),
        ("echo In x: >&2; echo 'fatal error: no math.h' >&2; exit 1", "failed: fatal error: no math.h"),
        ("echo all is lost >&2; exit 1", "failed: all is lost"),
        ("exit 3", "failed: exit code 3"),
    ],
    ids=["an old compiler", "an error", "another last line", "no output"],
)
def test_compiler_errors(folder, tmp_path, monkeypatch, script, reason):
    compiler = fake_kernels.compiler(tmp_path, script)
    monkeypatch.setenv("CXX", compiler)
    old = folder / ANOTHER
    old.touch()
    found = kernels.rebuild()
    assert found.startswith(f"{compiler} ")
    assert reason in found
    assert list(old.parent.iterdir()) == [old]  # the old library stays, and nothing is added


# The output of this compiler is the list of the sources that were not left out.
LIST = """
for word; do
    case $last in -c) source=$(basename $word) ;; -o) out=$word ;; esac
    case $word in -DSPECDEC_LEAVE_OUT) left_out=1 ;; *.o) objects="$objects $word" ;; esac
    last=$word
done
if [ "$source" ]; then [ "$left_out" ] || echo $source > $out; touch $out; else cat $objects > $out; fi
"""


def test_compiler_arguments(folder, tmp_path, monkeypatch):
    """Each real source file is compiled for its own instruction set, against the installed llama.cpp."""
    compiler = fake_kernels.compiler(tmp_path, f'echo "$@" >> {tmp_path / "log"}\n{LIST}')
    monkeypatch.setenv("CXX", f"{compiler} -v")
    for name in (ANOTHER, str(Path(ANOTHER).with_suffix(".json")), "notes.txt"):
        (folder / name).touch()
    assert build.build() is None
    left = sorted(path.name for path in folder.iterdir() if path.suffix != ".json")
    assert left == ["notes.txt", build.built().name]
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    compiles = {Path(call[call.index("-c") + 1]).name: call for call in calls if "-c" in call}
    assert set(compiles) == {path.name for path in build.SOURCES.glob("*.cpp")}
    for name, call in compiles.items():
        assert call[:2] == ["-v", "-O3"]
        (headers,) = (flag[2:] for flag in call if flag.startswith("-I"))
        assert (Path(headers) / "ggml.h").is_file()
        assert ("-mavx512f" in call) == (name == "avx512.cpp")
        assert ("-mavxvnni" in call) == (name == "avxvnni.cpp")
        assert ("-mfma" in call) == (
            name in {each.source for each in build.instruction_sets("x86_64").values()}
        )
        assert ("-DSPECDEC_LEAVE_OUT" in call) == (name in {"neon.cpp", "neon_i8mm.cpp"})
    link = calls[-1]
    assert {"-shared", "-lggml-base", "-lggml-cpu"} < set(link)
    (libraries,) = (flag[2:] for flag in link if flag.startswith("-L"))
    assert list(Path(libraries).glob("libggml-cpu*"))


def test_only_the_best_instruction_set_that_works_is_compiled(processor, self_test, tmp_path, monkeypatch):
    """A third of the time; the next one if the processor cannot execute what it reports."""
    monkeypatch.setenv("CXX", fake_kernels.compiler(tmp_path, LIST))
    self_test("""
        [ $5 = avx512_vnni ] && kill -ILL $$
        case $5 in avx_vnni) source=avxvnni.cpp ;; *) source=$5.cpp ;; esac
        grep -q "^$source" "$4" || { echo not compiled >&2; exit 1; }
    """)
    assert kernels.rebuild() is None
    assert kernels.status().instruction_set == "avx_vnni"
    compiled = build.built().read_text().split()
    assert "avxvnni.cpp" in compiled
    assert not {"avx512.cpp", "avx2.cpp"} & set(compiled)
    assert check.verdict(build.built()).self_tests == {"avx512_vnni": "SIGILL", "avx_vnni": "passed"}


def test_a_rebuilt_library_is_tested_again(processor, tested, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_kernels.compiler(tmp_path, LIST))
    for _ in range(2):
        assert kernels.rebuild() is None
        assert kernels.status().instruction_set == "avx512_vnni"
    assert len(tested()) == 2


def test_a_read_only_environment(processor, tested, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_kernels.compiler(tmp_path, LIST))
    (tmp_path / "env").touch()  # a file in place of the folder
    assert kernels.rebuild() is None
    user = tmp_path / "user/kernels"
    assert build.built().parent == user
    shutil.rmtree(user)
    user.touch()
    assert kernels.rebuild() == f"File exists: {user}"
    monkeypatch.setenv("CXX", "'c++")  # not valid in a shell
    assert kernels.rebuild() == "No closing quotation"


@needs_compiler
def test_loading_and_switching_off(library, tested):
    loaded = ctypes.CDLL(str(library))
    kernels.load()
    assert kernels.status().instruction_set == "avx512_vnni"
    assert loaded.fake_enabled() == -1  # unchanged since the installation
    kernels.use("off")
    assert loaded.fake_enabled() == 0
    assert kernels.status().reason == "`kernels=off`"
    assert kernels.identity() == ""
    kernels.use("auto")
    assert loaded.fake_enabled() == 1
    assert kernels.identity().startswith("avx512_vnni:")


@needs_compiler
def test_kernels_that_were_off_during_loading_stay_off(library, tested):
    kernels.use("off")
    kernels.load()
    kernels.use("auto")
    assert kernels.status().reason == "`kernels=off`"
    assert tested() == []


@needs_compiler
def test_loading_never_raises(library, tested, monkeypatch, new_process):
    monkeypatch.setenv("FAKE_avx512_vnni", "refuse")
    kernels.load()
    assert kernels.status().reason == "they do not fit"
    assert kernels.identity() == ""
    new_process()
    library.unlink()
    library.write_bytes(b"not a library")
    kernels.load()
    assert kernels.status().instruction_set is None
    assert "\n" not in kernels.status().reason
    new_process()

    def fail(name):
        raise ModuleNotFoundError("llama-cpp-python\nis not installed")

    monkeypatch.setattr("importlib.metadata.version", fail)
    machine.binding_version.cache_clear()
    kernels.load()
    assert kernels.status().reason == "llama-cpp-python is not installed"


@needs_compiler
def test_the_fingerprint_of_a_model_depends_on_the_kernels(library, tested, tmp_path, new_process):
    model = tmp_path / "m.gguf"
    model.touch()
    used = runtime.fingerprint(model)
    kernels.use("off")
    off = runtime.fingerprint(model)
    new_process()
    assert runtime.fingerprint(model) == used
    record = json.loads(library.with_suffix(".json").read_text())
    library.with_suffix(".json").write_text(json.dumps(record | {"instruction_set": "avx2"}))
    new_process()
    other = runtime.fingerprint(model)
    library.unlink()
    new_process()
    assert runtime.fingerprint(model) == off  # as without kernels
    assert len({used, off, other}) == 3
