"""Checking files and builds in a child process: damaged files, and children that crash."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import gguf
import psutil
import pytest

from spec_local.errors import BackendCrash, ContextOverflow, ModelFileError
from spec_local.llama.devices import OFFLOADED, ON_CPU
from spec_local.llama.memory import free_memory
from spec_local.llama.setup import probe
from spec_local.llama.setup.probe import check_model_files, probe_build, probe_files
from spec_local.llama.tiny import write_tiny_model
from spec_local.system.child_process import ChildResult


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("whole") / "model.gguf", n_layers=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache"))


BUILD_WORKS = """[ "$4" ] || { echo "{}"; exit; }\n"""


@pytest.fixture
def fake_child(tmp_path, monkeypatch):
    """A function that replaces child processes by a shell script."""

    def fake(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return fake


@pytest.fixture
def tried(fake_child, tmp_path):
    """A function that replaces child processes by a script, and the arguments of each that was started."""

    class Tried(list):
        def script(self, script="echo '{}'"):
            fake_child(f"shift 3; echo $@ >> {log}\n{script}")

        def __call__(self):
            return [tuple(line.split()) for line in log.read_text().splitlines()]

    log = tmp_path / "tried"
    log.touch()
    return Tried()


def test_duplicate_tokens(whole, tmp_path):
    """The most common crash: a flipped bit makes two tokens equal, which fails an assertion of llama.cpp."""
    raw = whole.read_bytes()
    assert raw.count(b"<0x41>") == 1
    path = tmp_path / "twice.gguf"
    path.write_bytes(raw.replace(b"<0x41>", b"<0x40>"))
    with pytest.raises(ModelFileError, match=r"twice\.gguf crashes llama\.cpp \(SIGABRT\)"):
        check_model_files(path)


_WITHIN = """
import resource, sys
import psutil
from spec_local.errors import SpecLocalError
from spec_local.llama import runtime
from spec_local.llama.model import Model

runtime.library()
most = psutil.Process().memory_info().vms + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (most, -1))
try:
    Model(sys.argv[1])
except SpecLocalError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the addresses of a process")
def test_too_little_memory(tmp_path):
    """The limit of a shell stands for a machine whose memory is full."""
    path = write_tiny_model(tmp_path / "large.gguf", n_embd=768, n_layers=2, tensor_type="F32")
    size = path.stat().st_size
    assert size > 20e6
    run = [sys.executable, "-c", _WITHIN, str(path), str(size // 2)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    kind, message = done.stdout.strip().split(" ", 1)
    assert kind == "ContextOverflow", done
    assert re.fullmatch(
        r"\S+large.gguf does not fit into memory \(.*\): it needs \S+ MB and its context, and \S+ MB are "
        r"free; use a smaller quantization, a smaller `n_ctx`, or `draft=none`",
        message,
    )


def test_a_process_that_the_system_kills(whole, fake_child, monkeypatch):
    """A file is only to blame if there was memory for it."""
    fake_child("kill -KILL $$")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=whole.stat().st_size))
    with pytest.raises(ContextOverflow, match=r"does not fit into memory \(SIGKILL\): .* or `draft=none`"):
        check_model_files(whole)
    fake_child("""echo '{"error": "too little: use less", "kind": "ContextOverflow"}'""")
    with pytest.raises(ContextOverflow, match="too little"):
        check_model_files(whole)


def test_memory_is_left_of_the_limits_of_a_container(tmp_path):
    groups, process = tmp_path / "sys/fs/cgroup", tmp_path / "proc/self"
    folder = groups / "a/b"
    folder.mkdir(parents=True)
    process.mkdir(parents=True)
    facts = {"max": "1000000", "current": "900000", "stat": "anon 5\ninactive_file 300000\n"}
    for name, content in facts.items():
        (folder / f"memory.{name}").write_text(content)
    (groups / "a/memory.max").write_text("max")
    (process / "cgroup").write_text("1:cpu:/\n0::/a/b\n")
    assert free_memory(tmp_path) == 400_000
    (folder / "memory.current").write_text("2000000")
    assert free_memory(tmp_path) == 0
    (folder / "memory.max").unlink()
    assert free_memory(tmp_path) > 1e6


def test_a_valid_file_is_checked_once(whole, tried):
    notices = []
    check_model_files(whole, log=notices.append)
    assert notices == ["checking model.gguf (first use on this machine)"]
    tried.script()
    check_model_files(whole, log=notices.append)
    assert len(notices) == 1
    assert tried() == []


@pytest.mark.parametrize("change", ["content", "layers", "build", "processor"])
def test_a_file_is_checked_again_after_a_change(whole, tmp_path, tried, pretend, change):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.read_bytes())
    tried.script()
    check_model_files(path)
    match change:
        case "content":
            stat = path.stat()
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
        case "build":
            pretend(llama_cpp_build="another")
        case "processor":
            pretend(processor_features=frozenset({"sse4_2"}))
    check_model_files(path, offload=ON_CPU if change == "layers" else OFFLOADED)
    assert len(tried()) == 2
    assert tried()[0] == (str(path), "-1")


def test_several_files_are_checked_at_the_same_time(whole, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(whole.read_bytes())
    check_model_files(whole, other, whole)
    check_model_files(other, log=lambda line: pytest.fail("checked again"))
    raw = whole.read_bytes()
    other.write_bytes(raw.replace(b"<0x41>", b"<0x40>"))
    third = tmp_path / "third.gguf"
    third.write_bytes(raw)
    with pytest.raises(ModelFileError, match=r"other\.gguf crashes llama\.cpp \(SIGABRT\)"):
        check_model_files(other, third)


def test_a_damaged_file_is_not_recorded_as_valid(whole, tried):
    tried.script("""echo '{"error": "it is damaged"}'""")
    for _ in range(2):
        with pytest.raises(ModelFileError):
            check_model_files(whole)
    assert len(tried()) == 2


def test_without_a_cache_folder_the_file_is_checked_each_time(whole, tmp_path, tried):
    (tmp_path / "cache").touch()  # a file where the folder should be
    tried.script()
    notices = []
    for _ in range(2):
        check_model_files(whole, log=notices.append)
    assert len(notices) == len(tried()) == 2


@pytest.mark.parametrize(
    ("script", "crash"),
    [
        ("kill -SEGV $$", "SIGSEGV"),
        ("kill -ILL $$", "SIGILL"),
        ("echo '{}'; kill -ABRT $$", "SIGABRT"),
        ("kill -KILL $$", "SIGKILL"),
        ("echo 'Traceback' >&2; echo 'MemoryError: too much' >&2; exit 1", "MemoryError: too much"),
        ("exit 3", "exit code 3"),
        ("echo 'not JSON'", "exit code 0"),
        ("", "exit code 0"),
    ],
)
def test_crashes_of_a_child(whole, fake_child, script, crash):
    fake_child(script)
    result = probe_files([whole])[0]
    assert result.crash == crash
    assert not result.works
    # If the build does not work either, the error is about the build.
    with pytest.raises(BackendCrash, match="specdec doctor"):
        check_model_files(whole)
    # If the build works, the error is about the file.
    fake_child(BUILD_WORKS + script)
    with pytest.raises(ModelFileError, match=r"crashes llama\.cpp"):
        check_model_files(whole)


def test_a_child_that_hangs_is_killed(whole, fake_child):
    fake_child("exec sleep 3600")
    assert probe_files([whole], seconds=0.3)[0].crash == "killed after 0 s without a result"


def test_the_deadline_grows_with_the_bytes_of_all_parts(tmp_path, fake_child, monkeypatch):
    """1 GB takes 100 s on the slowest disk. The files are sparse."""
    fake_child("echo '{}'")
    deadlines, communicate = [], subprocess.Popen.communicate

    def recorded(child, timeout):
        deadlines.append(timeout)
        return communicate(child, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", recorded)
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b-00001-of-00003.gguf", "[c]*.x"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**9)
        assert probe_files([tmp_path / name.replace("2-of", "1-of")])[0].works
    assert [round(each - probe.DEADLINE_S, -1) for each in deadlines] == [100, 200, 100, 100]


def test_an_error_in_a_child(whole, fake_child):
    fake_child("""echo 'some log'; echo '{"error": "it is too big"}'""")
    assert probe_files([whole])[0] == ChildResult(None, "it is too big", {"error": "it is too big"})
    with pytest.raises(ModelFileError, match="it is too big"):
        check_model_files(whole)


def test_missing_files_and_other_formats_need_no_child(tmp_path, tried):
    tried.script()
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04")
    for name in ("absent", "foreign", "."):
        with pytest.raises(ModelFileError):
            check_model_files(tmp_path / name)
    assert tried() == []


def test_this_build_works():
    result = probe_build()
    assert result.works, result
    assert "CPU" in result.facts["system"] or result.facts["gpus"]


def test_the_child_prints_nothing(whole, capfd):
    assert probe_files([whole])[0].works
    (whole.parent / "bad.gguf").write_bytes(whole.read_bytes()[:9999])
    assert probe_files([whole.parent / "bad.gguf"])[0].error
    assert capfd.readouterr() == ("", "")


def test_logits_that_are_not_numbers(whole, tmp_path):
    reader = gguf.GGUFReader(whole)
    tensor = next(t for t in reader.tensors if t.name == "output_norm.weight")
    raw = bytearray(whole.read_bytes())
    raw[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = b"\xff" * tensor.n_bytes  # NaN
    path = tmp_path / "nan.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match="not numbers"):
        check_model_files(path)


def test_a_file_that_crashes_only_the_cpu_kernels(tiny_path, tried, pretend_kernels):
    """The error suggests to disable the kernels, and does not call the file damaged."""
    tried.script("[ $# = 2 ] && kill -SEGV $$\necho '{}'")
    pretend_kernels("avx2:0123456789abcdef")
    with pytest.raises(BackendCrash, match=r"the CPU kernels crash with .* \(SIGSEGV\): add `kernels=off`"):
        check_model_files(tiny_path)
    assert [len(arguments) for arguments in tried()] == [2, 0, 3]  # file, build, file without kernels
    # If kernels are not in use, the file is damaged or too large.
    pretend_kernels("")
    with pytest.raises(ModelFileError, match=r"crashes llama\.cpp"):
        check_model_files(tiny_path)
