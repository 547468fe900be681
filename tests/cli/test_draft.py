"""specdec draft quantize: expectations, confirmation, output and interrupts."""

import json
import os
import re
import shutil
import signal

import pytest

from spec_local.llama.tiny import write_tiny_model
from tests.waiting import wait_until

TINY = ["--threads", 1, "--ctx", 256]

SLOW = """
import sys
if 'spec_local.llama.quantize' in sys.orig_argv:
    import time
    from llama_cpp import llama_cpp
    real = llama_cpp.llama_model_quantize
    def slow(source, target, params):
        if not params.dry_run:
            open(target, 'wb').write(b'GGUF')
            time.sleep(60)
        return real(source, target, params)
    llama_cpp.llama_model_quantize = slow
"""


@pytest.fixture(scope="module")
def wide(home, inside):
    """A model that is checked and measured."""
    path = write_tiny_model(home / "wide.gguf", n_embd=256, n_layers=2)
    assert inside("tune", path, *TINY, "--rounds", 1).returncode == 0
    return path


@pytest.fixture
def measured(home, wide, fresh_inside):
    """Return the command after a measurement with this result: seconds by the number of tokens in a call."""

    def measured(seconds):
        cache = fresh_inside.folder / "cache"
        shutil.copytree(home / "cache", cache)
        for path in cache.rglob("costs/*.json"):
            if (costs := json.loads(path.read_text()))["model"] == wide.name:
                path.write_text(json.dumps(costs | {"seconds": seconds, "others": 0.0}))
        return fresh_inside

    return measured


LOSING = {"1": 1.0, "2": 2.0, "64": 64.0}
"""Two tokens take twice the time of one: no draft can pay."""


def files(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def target(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "copy.gguf"


def test_a_copy(unmeasured, wide, target):
    done = unmeasured("draft", "quantize", wide, "--type", "q2_k", "--output", target)
    assert (done.returncode, done.stdout) == (0, f"{target}\n".encode())
    size, *gains, how, writing = done.stderr.decode().splitlines()
    assert size.startswith("Q2_K copy: ")
    assert "times the model's" in size
    assert all(line.startswith("expected speed-up at ") for line in gains)
    assert how == f"estimated from the sizes; to measure it, run specdec tune {wide}"
    assert writing == f"writing {target}"
    assert files(target.parent) == ["copy.gguf"]
    answered = unmeasured("generate", "--main", wide, "--draft", target, *TINY, "-n", 4, "x")
    assert answered.returncode == 0, answered
    assert b"vocabulary" not in answered.stderr


def test_an_existing_file_is_kept_without_force(inside, wide, target):
    target.write_text("mine")
    command = ["draft", "quantize", wide, "--output", target, "--yes"]
    assert "exists: give another --output" in inside.one_line(inside(*command), 2)
    assert target.read_text() == "mine"
    assert inside(*command, "--force").returncode == 0
    assert target.read_bytes()[:4] == b"GGUF"


def test_a_copy_that_does_not_pay_off_needs_yes(measured, wide, target):
    run = measured(LOSING)
    command = ["draft", "quantize", wide, "--output", target, *TINY]
    done = run(*command)
    assert (done.returncode, done.stdout) == (1, b"")
    *lines, last = done.stderr.decode().splitlines()
    assert lines[1:] == [f"expected speed-up at {p}% acceptance: none" for p in (80, 90, 95)]
    assert last.startswith("specdec: the copy would be slower than decoding without a draft model")
    assert "--yes" in last
    assert files(target.parent) == []
    assert run(*command, "--yes").returncode == 0
    assert files(target.parent) == ["copy.gguf"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("key", "code", "n_files"),
    [("y\r", 0, 1), ("\r", 1, 0), ("\x03", 130, 0)],
    ids=["yes", "Enter", "Ctrl-C"],
)
def test_confirmation_on_a_terminal(terminal, measured, wide, target, key, code, n_files):
    arguments = ["quantize", wide, "-o", target, *TINY]
    person = terminal(*arguments, command="draft", specdec=measured(LOSING))
    person.child.expect("Make it anyway.*: ")
    person.type(key)
    assert person.leaves_with() == code
    assert len(files(target.parent)) == n_files


def test_the_expected_speedup(measured, wide, target):
    done = measured({"1": 1.0, "64": 1.1})("draft", "quantize", wide, "-o", target, *TINY)
    assert done.returncode == 0
    assert done.stderr.count(b"times plain decoding at best") == 3


def test_a_copy_for_another_main_model(unmeasured, wide, draft, target):
    """The speed-up is estimated unless both models are measured; each command suggests the other one."""
    run = unmeasured
    command = ["draft", "quantize", draft, "--for", wide, "-o", target, *TINY, "--yes"]
    assert f"run specdec tune {wide} {draft}" in run(*command).stderr.decode()
    tuned = run("tune", wide, draft, *TINY, "--rounds", 1)
    assert tuned.returncode == 0, tuned
    done = run(*command, "--force")
    assert (done.returncode, done.stdout) == (0, f"{target}\n".encode())
    assert done.stderr.count(b"% acceptance: ") == 3
    hint = re.search(
        rb"A Q4_0 copy takes about (\S+), with nearly the same acceptance rate:\s+specdec (.*)", tuned.stdout
    )
    assert 0 < float(hint[1]) < 10
    assert hint[2].decode() == f"draft quantize {draft} --for {wide}"
    assert b"A Q4_0 copy" not in run("tune", wide, target, *TINY, "--rounds", 1).stdout  # it is one already


@pytest.mark.parametrize(
    ("how", "group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)],
    ids=["Ctrl-C", "terminate", "kill"],
)
def test_an_interrupt_leaves_no_files(specdec, wide, target, tmp_path, how, group):
    """group: the signal also goes to the child process, as from a terminal."""
    env = specdec.sabotaged(tmp_path / "site", SLOW)
    arguments = ["draft", "quantize", wide, "-o", target, "--yes"]
    command = specdec.start(*arguments, env=env, start_new_session=True)
    wait_until(lambda: any(p.stat().st_size for p in target.parent.iterdir()))
    assert not target.exists()
    if group:
        os.killpg(command.pid, how)
    else:
        command.send_signal(how)
    out, err = command.communicate(timeout=20)
    assert command.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -how)
    assert out == b""
    assert b"Traceback" not in err
    wait_until(lambda: not files(target.parent))


def test_a_crash_of_the_quantizer_is_one_line(inside, wide, target, tmp_path):
    env = inside.sabotaged(tmp_path / "site", SLOW.replace("time.sleep(60)", "import os; os.abort()"))
    done = inside("draft", "quantize", wide, "-o", target, "--yes", env=env)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("specdec: llama.cpp crashed while quantizing ")
    assert "SIGABRT" in last
    assert files(target.parent) == []


@pytest.mark.parametrize(
    ("model", "more", "code", "what"),
    [
        ("absent.gguf", [], 1, "does not exist"),
        ("wide.gguf", ["--type", "F16"], 1, "and a F16 copy would have"),
        ("wide.gguf", ["--output", "wide.gguf", "--force"], 2, "is the source model itself"),
    ],
    ids=["absent", "nothing gained", "itself"],
)
def test_models_that_cannot_be_quantized(inside, wide, target, model, more, code, what):
    done = inside("draft", "quantize", model, "--output", target, *more, cwd=wide.parent)
    assert what in inside.one_line(done, code)
    assert files(target.parent) == []
