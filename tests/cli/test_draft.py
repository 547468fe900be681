"""specdec draft quantize: expectations, confirmation, output and interrupts."""

import json
import re
import signal
import subprocess
import sys
import time
from typing import get_args

import pexpect
import pytest

from spec_local.llama.quantize import KINDS
from spec_local.llama.tiny import write_tiny_model
from specdec_cli.draft import KindChoice

TINY = ["--threads", 1, "--ctx", 256]

SLOW = """
import sys
if 'spec_local.llama.quantize' in sys.orig_argv:
    import time, llama_cpp
    real = llama_cpp.llama_model_quantize
    def slow(source, target, params):
        if not params.dry_run:
            open(target, 'wb').write(b'GGUF')
            time.sleep(60)
        return real(source, target, params)
    llama_cpp.llama_model_quantize = slow
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "wide.gguf", n_embd=256, n_layers=2)


@pytest.fixture
def losing(fresh, wide):
    """The main model was measured, and evaluates two tokens in twice the time of one."""
    assert fresh("tune", wide, *TINY, "--rounds", 1).returncode == 0
    (path,) = fresh.folder.rglob("costs/*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": {"1": 1.0, "2": 2.0, "64": 64.0}}))
    return fresh


def files(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def target(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "copy.gguf"


def test_the_types_are_those_of_the_library():
    assert get_args(KindChoice) == KINDS


def test_a_copy(fresh, wide, target):
    done = fresh("draft", "quantize", wide, "--type", "q2_k", "--output", target)
    assert done.returncode == 0, done
    assert done.stdout == f"{target}\n".encode()
    size, gain, writing = done.stderr.decode().splitlines()
    assert size.startswith("Q2_K copy: ")
    assert "times the model's" in size
    assert gain == f"expected speed-up: unknown; to see it, run specdec tune {wide} first"
    assert writing == f"writing {target}"
    assert files(target.parent) == ["copy.gguf"]
    answered = fresh("generate", "--main", wide, "--draft", target, *TINY, "-n", 4, "x")
    assert answered.returncode == 0, answered
    assert b"vocabulary" not in answered.stderr


def test_an_existing_file_is_kept_without_force(specdec, wide, target):
    target.write_text("mine")
    error = specdec.one_line(specdec("draft", "quantize", wide, "--output", target), 2)
    assert "exists: give another --output" in error
    assert target.read_text() == "mine"
    assert specdec("draft", "quantize", wide, "--output", target, "--force").returncode == 0
    assert target.read_bytes()[:4] == b"GGUF"


def test_a_copy_that_does_not_pay_off_needs_yes(losing, wide, target):
    command = ["draft", "quantize", wide, "--output", target, *TINY]
    done = losing(*command)
    assert done.returncode == 1
    assert done.stdout == b""
    *lines, last = done.stderr.decode().splitlines()
    assert lines[1:] == [f"expected speed-up at {p}% acceptance: none" for p in (80, 90, 95)]
    assert last.startswith("specdec: the copy would be slower than decoding without a draft model")
    assert "--yes" in last
    assert files(target.parent) == []
    assert losing(*command, "--yes").returncode == 0
    assert files(target.parent) == ["copy.gguf"]


@pytest.mark.parametrize(
    ("key", "code", "n_files"), [("y\r", 0, 1), ("n\r", 1, 0), ("\r", 1, 0), ("\x03", 130, 0)]
)
def test_confirmation_on_a_terminal(losing, wide, target, key, code, n_files):
    arguments = ["-m", "specdec_cli", "draft", "quantize", str(wide), "-o", str(target), *map(str, TINY)]
    child = pexpect.spawn(sys.executable, arguments, env=losing.environment, timeout=30, encoding="utf-8")
    child.expect("Make it anyway.*: ")
    child.send(key)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
    assert len(files(target.parent)) == n_files


def test_the_expected_speedup(losing, wide, target):
    (path,) = losing.folder.rglob("costs/*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": {"1": 1.0, "64": 1.1}}))
    done = losing("draft", "quantize", wide, "-o", target, *TINY)
    assert done.returncode == 0
    assert done.stderr.count(b"times plain decoding at best") == 3


def test_a_copy_for_another_main_model(fresh, wide, draft, target):
    """The expected speed-up needs both models measured; each command suggests the other one."""
    tuning = ["tune", wide, draft, *TINY, "--rounds", 1]
    command = ["draft", "quantize", draft, "--for", wide, "-o", target, *TINY, "--yes"]
    assert f"run specdec tune {wide} {draft} first" in fresh(*command).stderr.decode()
    tuned = fresh(*tuning)
    assert tuned.returncode == 0, tuned
    done = fresh(*command, "--force")
    assert done.returncode == 0, done
    assert done.stdout == f"{target}\n".encode()
    assert done.stderr.count(b"% acceptance: ") == 3
    hint = re.search(
        rb"A Q4_0 copy takes about (\S+), with nearly the same acceptance rate:\s+specdec (.*)", tuned.stdout
    )
    assert 0 < float(hint[1]) < 10
    assert hint[2].decode() == f"draft quantize {draft} --for {wide}"
    assert b"A Q4_0 copy" not in fresh("tune", wide, target, *TINY, "--rounds", 1).stdout  # it is one already


def wait_for(condition):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("timed out")


@pytest.mark.parametrize(
    ("how", "group"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)],
    ids=["interrupt", "Ctrl-C", "terminate", "kill"],
)
def test_an_interrupt_leaves_no_files(specdec, wide, target, tmp_path, how, group):
    """group: the signal also goes to the child process, as from a terminal."""
    env = specdec.sabotaged(tmp_path / "site", SLOW)
    command = specdec.start("draft", "quantize", wide, "-o", target, env=env, start_new_session=True)
    wait_for(lambda: any(p.stat().st_size for p in target.parent.iterdir()))
    assert not target.exists()
    if group:
        import os

        os.killpg(command.pid, how)
    else:
        command.send_signal(how)
    out, err = command.communicate(timeout=20)
    assert command.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -how)
    assert out == b""
    assert b"Traceback" not in err
    wait_for(lambda: not files(target.parent))


def test_a_crash_of_the_quantizer_is_one_line(specdec, wide, target, tmp_path):
    env = specdec.sabotaged(tmp_path / "site", SLOW.replace("time.sleep(60)", "import os; os.abort()"))
    done = specdec("draft", "quantize", wide, "-o", target, env=env)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("specdec: llama.cpp crashed while quantizing ")
    assert "SIGABRT" in last
    assert files(target.parent) == []


def test_models_that_cannot_be_quantized(specdec, wide, target, tmp_path):
    for arguments, code, what in [
        ([tmp_path / "absent.gguf"], 1, "does not exist"),
        ([wide, "--type", "F16"], 1, "and a F16 copy would have"),
        ([wide, "--output", wide, "--force"], 2, "is the source model itself"),
    ]:
        output = [] if "--output" in arguments else ["--output", target]
        error = specdec.one_line(specdec("draft", "quantize", *arguments, *output), code)
        assert what in error
    assert files(target.parent) == []


@pytest.mark.parametrize("arguments", [[], ["x", "--type", "Q1"], ["x", "--threads", "0"]], ids=str)
def test_usage_errors(specdec, arguments):
    done = specdec("draft", "quantize", *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr


def test_help_is_fast(specdec):
    assert b"quantize" in specdec("draft", "--help").stdout
    script = (
        "import runpy, sys\n"
        "sys.argv = ['specdec', 'draft', 'quantize', '--help']\n"
        "try:\n"
        "    runpy.run_module('specdec_cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "slow = {'llama_cpp', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", script], env=specdec.environment, capture_output=True, check=True)
