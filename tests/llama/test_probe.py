"""What would kill the process is met in a child: damaged files by the hundred, and children that die."""

import json
import os
import random
import select
import subprocess
import sys
from collections import Counter

import gguf
import pytest

from spec_local.child_process import ChildResult
from spec_local.errors import BackendCrash, ModelFileError
from spec_local.llama import probe
from spec_local.llama.probe import check_model_file, probe_build, probe_file
from spec_local.llama.tiny import write_tiny_model

# Does with each file what the probe does, many in one process, so that a crash is seen and costs one of them only.
WORKER = """
import json, resource, sys
from pathlib import Path
import spec_local.machine
from spec_local.errors import SpecLocalError
from spec_local.llama.probe import _exercise
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
spec_local.machine.default_threads = lambda: 1
for line in sys.stdin:
    try:
        _exercise(Path(line.strip()), -1)
        answer = ["success", ""]
    except SpecLocalError as error:
        answer = ["error", str(error)]
    except Exception as error:
        answer = ["untyped", repr(error)]
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """Loads files in a child, and takes another one when it has died."""

    def __init__(self, log):
        self._log = log
        self._child = None

    def load(self, path):
        """What became of it (success, error, untyped, crash, hang), and what it said."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            )
        self._child.stdin.write(f"{path}\n")
        self._child.stdin.flush()
        if not select.select([self._child.stdout], [], [], 20)[0]:
            self.end()
            return "hang", ""
        answer = self._child.stdout.readline()
        if not answer:
            code = self._child.wait()
            self.end()
            return "crash", str(code)
        return json.loads(answer)

    def end(self):
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("whole") / "model.gguf", n_layers=1)


@pytest.fixture
def load(tmp_path):
    with (tmp_path / "log").open("w") as log:
        worker = Worker(log)
        yield worker.load
        worker.end()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # or children crawl where something else runs too
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache"))


@pytest.fixture
def fake_child(tmp_path, monkeypatch):
    """Children run this shell script instead."""

    def fake(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return fake


def borders(path):
    """Where the header's parts begin, and where the tensors' data does."""
    reader = gguf.GGUFReader(path)
    fields = [field.offset for field in reader.fields.values()]
    return sorted(fields)[3:], int(reader.data_offset)


def test_cut_files(whole, load, tmp_path):
    raw = whole.read_bytes()
    fields, data = borders(whole)
    rng = random.Random(0)
    cuts = {4, 5, 8, 12, 16, 23, 24, 25, data - 1, data, data + 1, len(raw) - 1, *fields[:12]}
    cuts |= {rng.randrange(24, data) for _ in range(10)} | {rng.randrange(data, len(raw)) for _ in range(6)}
    assert len(cuts) > 35
    path = tmp_path / "cut.gguf"
    for cut in sorted(cuts):
        path.write_bytes(raw[:cut])
        outcome, said = load(path)
        assert outcome == "error", (cut, outcome, said)
        assert str(path) in said
    path.write_bytes(raw)
    assert load(path)[0] == "success"


def test_flipped_bits(whole, load, tmp_path):
    """None hangs, none escapes as an untyped error, and those that crash llama.cpp are refused politely."""
    raw = whole.read_bytes()
    fields, data = borders(whole)
    rng = random.Random(1)
    places = [rng.randrange(0, fields[-1] + 100) for _ in range(90)]
    places += [offset + rng.randrange(0, 40) for offset in fields] + [rng.randrange(0, 24) for _ in range(10)]
    places += [rng.randrange(data - 1200, data) for _ in range(20)]  # what the tensors are
    places += [rng.randrange(data, len(raw)) for _ in range(15)]
    assert len(places) > 150
    outcomes, crashing = Counter(), []
    path = tmp_path / "flipped.gguf"
    for place in places:
        damaged = bytearray(raw)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        outcome, said = load(path)
        outcomes[outcome] += 1
        assert outcome in ("success", "error", "crash"), (place, outcome, said)
        if outcome == "crash":
            crashing.append(bytes(damaged))
    # All three happen, or this test says less than it seems to.
    assert outcomes["success"] > 20
    assert outcomes["error"] > 20
    for damaged in crashing[:2]:
        path.write_bytes(damaged)
        with pytest.raises(ModelFileError, match=r"crashes llama\.cpp \(SIG"):
            check_model_file(path)


def test_two_tokens_of_one_name(whole, tmp_path):
    """The commonest crash: one flipped bit makes two tokens the same, and llama.cpp asserts that none are."""
    raw = whole.read_bytes()
    assert raw.count(b"<0x41>") == 1
    path = tmp_path / "twice.gguf"
    path.write_bytes(raw.replace(b"<0x41>", b"<0x40>"))
    verdict = probe_file(path)
    if verdict.crash is None:  # a newer llama.cpp may be kinder
        pytest.skip("this llama.cpp loads it")
    assert verdict.crash == "SIGABRT"
    with pytest.raises(ModelFileError, match=r"twice\.gguf crashes llama\.cpp \(SIGABRT\)"):
        check_model_file(path)


def test_a_good_file_is_tried_once(whole, monkeypatch):
    notices = []
    check_model_file(whole, log=notices.append)
    assert notices == ["checking model.gguf (first use on this machine)"]
    monkeypatch.setattr(probe, "_run_child", lambda *a: pytest.fail("tried again"))
    check_model_file(whole, log=notices.append)
    assert len(notices) == 1


@pytest.mark.parametrize("change", ["content", "layers", "build", "processor"])
def test_what_has_changed_is_tried_again(whole, tmp_path, monkeypatch, change):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.read_bytes())
    tried = []
    monkeypatch.setattr(probe, "_run_child", lambda *a: tried.append(a) or ChildResult(None, None, {}))
    check_model_file(path)
    match change:
        case "content":
            stat = path.stat()
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
        case "build":
            monkeypatch.setattr("spec_local.machine.llama_cpp_build", lambda: "another")
        case "processor":
            monkeypatch.setattr("spec_local.machine.processor_features", lambda: frozenset({"sse4_2"}))
    check_model_file(path, gpu_layers=0 if change == "layers" else -1)
    assert len(tried) == 2
    assert tried[0] == (str(path), "-1")


def test_a_bad_file_is_not_remembered_as_good(tmp_path, whole):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[:5000])
    for _ in range(2):
        with pytest.raises(ModelFileError):
            check_model_file(path)


def test_without_a_place_for_verdicts_it_is_tried_each_time(whole, tmp_path, monkeypatch):
    (tmp_path / "cache").touch()  # a file where the folder should be
    monkeypatch.setattr(probe, "_run_child", lambda *a: ChildResult(None, None, {}))
    notices = []
    for _ in range(2):
        check_model_file(whole, log=notices.append)
    assert len(notices) == 2


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
def test_deaths_of_a_child(whole, fake_child, monkeypatch, script, crash):
    fake_child(script)
    verdict = probe_file(whole)
    assert verdict.crash == crash
    assert not verdict.works
    # The build does not work either: then the file is not to blame.
    with pytest.raises(BackendCrash, match="specdec doctor"):
        check_model_file(whole)
    # It works: then it is.
    monkeypatch.setattr(probe, "probe_build", lambda: ChildResult(None, None, {}))
    with pytest.raises(ModelFileError, match=r"crashes llama\.cpp"):
        check_model_file(whole)


def test_an_error_of_a_child(whole, fake_child):
    fake_child("""echo 'some log'; echo '{"error": "it is too big"}'""")
    assert probe_file(whole) == ChildResult(None, "it is too big", {"error": "it is too big"})
    with pytest.raises(ModelFileError, match="it is too big"):
        check_model_file(whole)


def test_missing_and_foreign_files_need_no_child(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_run_child", lambda *a: pytest.fail("tried"))
    (tmp_path / "foreign").write_bytes(b"PK\x03\x04")
    for name in ("absent", "foreign", "."):
        with pytest.raises(ModelFileError):
            check_model_file(tmp_path / name)


def test_this_build_works():
    verdict = probe_build()
    assert verdict.works, verdict
    assert "CPU" in verdict.facts["system"] or verdict.facts["gpu"]


def test_the_child_says_nothing_to_our_streams(whole, capfd):
    assert probe_file(whole).works
    (whole.parent / "bad.gguf").write_bytes(whole.read_bytes()[:9999])
    assert probe_file(whole.parent / "bad.gguf").error
    assert capfd.readouterr() == ("", "")


def test_logits_that_are_no_numbers(whole, tmp_path):
    reader = gguf.GGUFReader(whole)
    tensor = next(t for t in reader.tensors if t.name == "output_norm.weight")
    raw = bytearray(whole.read_bytes())
    raw[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = b"\xff" * tensor.n_bytes  # NaN
    path = tmp_path / "nan.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match="not numbers"):
        check_model_file(path)


def test_a_file_on_which_only_the_cpu_kernels_crash(own_cache, tiny_path, monkeypatch):
    """What to do is to turn them off; the file is not called damaged, and works without them."""
    tried = []

    def child(*arguments):
        tried.append(arguments)
        crashes = len(arguments) == 2
        return ChildResult("SIGSEGV" if crashes else None, None, {})

    monkeypatch.setattr(probe, "_run_child", child)
    monkeypatch.setattr(probe.kernels, "status", lambda: probe.kernels.Status("avx2"))
    monkeypatch.setattr(probe.kernels, "identity", lambda: "avx2:0123456789abcdef")
    with pytest.raises(BackendCrash, match=r"the CPU kernels crash with .* \(SIGSEGV\): add --kernels off"):
        check_model_file(tiny_path)
    assert [len(arguments) for arguments in tried] == [
        2,
        0,
        3,
    ]  # the file, the build, the file without kernels
    # Without kernels it is the file's fault, or the memory's.
    monkeypatch.setattr(probe.kernels, "status", lambda: probe.kernels.Status(None, "not built"))
    with pytest.raises(ModelFileError, match=r"crashes llama\.cpp"):
        check_model_file(tiny_path)
