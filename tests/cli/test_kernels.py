"""--kernels, and the CPU kernels in doctor and -v."""

import shutil
import tomllib

import pytest
import typer

from spec_local.kernels import build, measure
from spec_local.llama.tiny import write_tiny_model
from spec_local.session import Session
from specdec_cli import settings
from specdec_cli.app import app
from specdec_cli.facts import setting_lines
from tests import fake_kernels

pytestmark = [
    pytest.mark.skipif(build.unsupported() is not None, reason="there are no kernels for this machine"),
    pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler"),
]
SMALL = ["--threads", 1, "--ctx", 256, "-n", 2, "--temp", 0, "-v", "x"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return fake_kernels.compile_library(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def bare(fresh, tmp_path):
    """The command in a Python environment in which no kernels are built, on a machine that is idle."""
    idle = "from spec_local.system import machine\nmachine.OtherPrograms.cores = lambda programs: 0.0\n"
    fresh.environment |= fresh.sabotaged(
        tmp_path / "site", f"import sys\nsys.prefix = {str(tmp_path)!r}\n{idle}"
    )
    fresh.environment |= {"FAKE_LOG": str(tmp_path / "log")}
    return fresh


@pytest.fixture
def built(bare, compiled, tmp_path):
    """The same with fake kernels; each process that installs them adds a line to the log."""
    folder = tmp_path / "share/specdec/kernels"
    folder.mkdir(parents=True)
    shutil.copy(compiled, folder / build._name())
    return bare


def kernels_line(done):
    """The line about the kernels on stdout or stderr."""
    assert done.returncode == 0, done
    (line,) = (line for line in (done.stdout + done.stderr).decode().splitlines() if "CPU kernels:" in line)
    return line


def log(specdec):
    path = specdec.folder / "log"
    return path.read_text().split() if path.exists() else []


def test_doctor_shows_why_kernels_are_not_used(built):
    every = {f"FAKE_{name}": "crash" for name in build.instruction_sets()}
    assert "the self-test failed with " in kernels_line(built("doctor", env=every))
    (path,) = (built.folder / "share/specdec/kernels").glob("*.so")
    path.rename(path.with_stem("specdec-kernels-0123456789abcdef"))
    assert "built for another version of specdec or llama.cpp: run specdec doctor --fix" in kernels_line(
        built("doctor")
    )


def test_doctor_compiles(bare, compiled, tmp_path):
    """With a fake compiler, whose output is the fake library."""
    copy = f'while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {compiled} "$2"; shift; done'
    env = {"CXX": fake_kernels.compiler(tmp_path, copy)}
    done = bare("doctor", "--fix", env=env)
    lines = done.stdout.decode().splitlines()
    first = lines.index("compiling the CPU kernels; this takes about half a minute")
    assert lines[first + 1].startswith("compiled in ")
    assert lines[first + 3] == "comparing them with llama.cpp's kernels; this takes about half a minute"
    assert lines[first + 5].split() == ["1", "2", "4", "8", "prompt", "session"]
    assert lines[first + 6].split()[:6] == ["Q4_0", *["2.00"] * 5]
    assert len(lines[first + 6 :]) == len(measure.TYPES) + 1
    assert lines[-1] == "left to llama.cpp's kernels: nothing"
    assert kernels_line(done) == f"CPU kernels: {build.reported()[0]}"
    assert kernels_line(bare("doctor")) == kernels_line(done)


def limits_line(done):
    assert done.returncode == 0, done
    (line,) = (line for line in done.stdout.decode().splitlines() if line.startswith("left to llama.cpp"))
    return line.removeprefix("left to llama.cpp's kernels: ")


def test_doctor_shows_the_kernels_and_measures_once_what_is_left_to_llama_cpp(built):
    best = build.reported()[0]
    hint = "(not measured on this machine; specdec doctor --fix does it)"
    done = built("doctor")
    assert kernels_line(done) == f"CPU kernels: {best}"
    assert limits_line(done).endswith(hint)
    assert log(built) == [best]  # its self-test; llama.cpp is checked without them
    refused = built("doctor", "--fix", env={"FAKE_SLOW": "refuse"})
    assert b"not compared: products could not be timed: there is not enough memory\n" in refused.stdout
    assert limits_line(refused).endswith(hint)
    assert limits_line(built("doctor", "--fix", env={"FAKE_SLOW": "BF16"})) == "BF16 from 7 tokens on"
    slow = {"FAKE_SLOW": "Q4_K", "FAKE_READING": "1"}
    assert limits_line(built("doctor", "--fix", env=slow)) == "BF16 from 7 tokens on"  # as measured before
    assert limits_line(built("doctor", "kernels", env=slow)) == "BF16 from 7 tokens on"
    again = built("doctor", "--fix", "kernels", env=slow)
    assert limits_line(again) == "Q4_K"
    read = b"packed weights are not prefetched into the first-level cache: 0.90 of the time"
    assert read in again.stdout.splitlines()


def test_report_is_an_entry_of_the_table_of_processors(built):
    refused = built("doctor", "--report")
    assert refused.returncode != 0
    assert b"nothing was measured on this machine" in refused.stderr
    assert built("doctor", "--fix").returncode == 0
    done = built("doctor", "--report")
    (entry,) = tomllib.loads(done.stdout.decode())["processor"]
    assert entry["name"].endswith(f", {build.reported()[0]}")
    assert set(entry["times"]) == set(measure.TYPES)
    assert entry["other_reading"] == {"packed": 1.0, "floats": 1.0}
    ours, theirs = entry["times"]["Q6_K"]["512"]
    assert theirs == 2 * ours


def test_everything_works_without_kernels(bare, main, tmp_path):
    off = bare("doctor", "--fix", env={"SPECDEC_KERNELS": "off"})  # not even compiled
    assert kernels_line(off) == "CPU kernels: not used (--kernels off)"
    assert b"compiling" not in off.stdout
    env = {"CXX": fake_kernels.compiler(tmp_path, "echo 'error: the disk is full' >&2; exit 1")}
    done = bare("doctor", "--fix", env=env)
    assert kernels_line(done) == (
        f"CPU kernels: not used (not built: {env['CXX']} failed: error: the disk is full)"
    )
    assert done.stderr == b""
    done = bare("generate", "--main", main, *SMALL)
    assert kernels_line(done) == "CPU kernels: not used (not built: run specdec doctor --fix)"
    assert done.stdout


def test_generate_and_its_child_process_use_the_kernels(built, main):
    best = build.reported()[0]
    line = kernels_line(built("generate", "--main", main, *SMALL))
    assert line.startswith(
        f"CPU kernels: {best}; logits depend on the size of a call: F32 in calls of more than "
    )
    assert log(built) == [best] * 3  # the self-test, the child that checks the model, and the command


@pytest.mark.parametrize("how", ["flag", "file"])
def test_off_applies_to_the_child_process(built, main, tmp_path, how):
    (tmp_path / "config.toml").write_text('kernels = "off"\n')
    more = {"flag": ["--kernels", "off"], "file": ["--config", tmp_path / "config.toml"]}
    env = {"SPECDEC_KERNELS": {"flag": "auto", "file": ""}[how]}
    done = built("generate", "--main", main, *more.get(how, []), *SMALL, env=env)
    assert kernels_line(done) == "CPU kernels: not used (--kernels off)"
    assert b"checking main.gguf" in done.stderr  # in a child process
    assert log(built) == []


def test_every_command_that_runs_models_has_the_option():
    commands = dict(settings.runnable(typer.main.get_command(app)))
    having, threads = (
        {name for name, command in commands.items() if option in settings.options(command)}
        for option in ("kernels", "threads")
    )
    assert having == threads - {"worker"}  # which has no models
    assert {"generate", "chat", "bench", "tune", "models-check", "draft-train", "draft-quantize"} <= having


def test_layers_on_a_gpu_need_no_cpu_kernels(a_gpu, tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf")
    for options, uses_cpu in (
        ({"device": "gpu"}, False),
        ({"device": "cpu"}, True),
        ({"draft_device": "cpu"}, True),
        ({"gpu_layers": 2}, True),
        ({"gpu_layers": 3}, False),
    ):
        with Session.open(path, path, n_ctx=128, threads=1, **options) as session:
            shown = setting_lines(session)[-1]
            assert shown.startswith("CPU kernels: not needed, as no layers are on the CPU") != uses_cpu
