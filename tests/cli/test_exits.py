"""Test commands ended by signals: complete output, no files left behind, the right exit code."""

import json
import signal
import subprocess
import sys
import time

import pexpect
import pytest
import typer

from specdec_cli import exits, render

SIGNALS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
each_signal = pytest.mark.parametrize(("signum", "code"), SIGNALS, ids=["SIGTERM", "SIGHUP", "SIGINT"])
ENDLESS = ["--threads", 1, "--ctx", 1 << 16, "--raw", "--temp", 0]


def started(specdec, *arguments):
    """Start a command; return it in the middle of its answer."""
    process = specdec.start(*arguments, bufsize=0)
    first = b""
    while len(first) < 30:
        more = process.stdout.read(30)
        assert more, process.stderr.read()
        first += more
    return process, first


@each_signal
def test_an_interrupted_answer_is_written_completely(specdec, inside, main, signum, code):
    process, first = started(specdec, "generate", "--main", main, *ENDLESS, "--no-spec", "-v", "words")
    process.send_signal(signum)
    rest, notes = process.communicate(timeout=20)
    assert process.returncode == code
    plain = inside("generate", "--main", main, *ENDLESS, "--no-spec", "-n", 40, "words").stdout
    output = first + rest
    assert output[: len(plain)] == plain[: len(output)]
    assert b"tokens/s" in notes  # the statistics are still printed
    assert b"Traceback" not in notes
    assert b"Exception" not in notes


def test_json_of_an_interrupted_answer_is_complete(specdec, main):
    process = specdec.start("generate", "--main", main, *ENDLESS, "--json", "words", "-vv")
    specdec.wait_for(process, b"n_ctx")  # the context is being created
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    if out:  # not stopped before the answer started
        assert json.loads(out)["stop_type"] == "none"


@pytest.mark.parametrize(("signum", "code"), SIGNALS[1:], ids=["SIGHUP", "SIGINT"])
def test_a_signal_while_loading(specdec, main, signum, code):
    """llama.cpp logs through a Python callback, where an exception would be lost."""
    slow = "from spec_local.llama import runtime\n"
    slow += "log = runtime._on_log\n"
    slow += "import sys, time\n"
    slow += "def slow(*a):\n print('loading', flush=True, file=sys.stderr); time.sleep(0.003); log(*a)\n"
    slow += "runtime._on_log = slow\n"
    slow += "sys.argv[0] = 'specdec'\nfrom specdec_cli.__main__ import main\nmain()\n"
    arguments = [sys.executable, "-c", slow, "generate", "--main", main, *ENDLESS, "words"]
    process = subprocess.Popen(
        list(map(str, arguments)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
        cwd=specdec.folder,
    )
    assert process.stderr.readline() == b"loading\n"
    process.send_signal(signum)
    out, notes = process.communicate(timeout=30)
    assert process.returncode == code, notes
    assert out == b""
    assert set(notes.splitlines()) <= {b"loading"}


@pytest.fixture
def handlers():
    """The signal handlers of this process, restored after the test."""
    before = {signum: signal.getsignal(signum) for signum, _ in SIGNALS}
    yield before
    for signum, handler in before.items():
        signal.signal(signum, handler)


@each_signal
def test_a_second_signal_is_not_delayed(handlers, signum, code):
    """Except SIGHUP, which both the shell and the terminal send. In this process, without timing."""
    reached = []

    def raise_twice():
        with exits.guarded(), render.interruptible() as cancelled:
            assert not cancelled()
            signal.raise_signal(signum)
            reached.append(cancelled())
            signal.raise_signal(signum)
            reached.append(cancelled())

    with pytest.raises((SystemExit, typer.Exit)) as end:
        raise_twice()
    assert getattr(end.value, "exit_code", None) == code or getattr(end.value, "code", None) == code
    assert reached == ([True, True] if signum == signal.SIGHUP else [True])
    ignored = {signal.SIGHUP: signal.SIG_IGN} if signum == signal.SIGHUP else {}  # until the process ends
    assert {s: signal.getsignal(s) for s in handlers} == handlers | ignored


def test_under_nohup_sighup_is_ignored(specdec, main):
    command = 'trap "" HUP; exec "$@"'
    arguments = [*specdec.command, "generate", "--main", main, *ENDLESS, "words"]
    process = subprocess.Popen(
        ["sh", "-c", command, "sh", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=specdec.environment,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.read(2000)  # it continues
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_measured_costs_are_saved(unmeasured, main):
    """A session saves them when it is closed."""
    process, _ = started(unmeasured, "generate", "--main", main, *ENDLESS, "words")
    assert not list(unmeasured.folder.rglob("costs/*"))
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert list(unmeasured.folder.rglob("costs/*"))
    assert not [p for p in unmeasured.folder.rglob("*") if p.suffix == ".part"]


def test_a_signal_at_the_prompt_of_a_chat(terminal, main):
    person = terminal("--main", main, "--threads", 1, "--ctx", 512, width=100)
    person.prompt()
    time.sleep(0.2)
    person.child.kill(signal.SIGTERM)
    person.child.expect(pexpect.EOF)
    left = person.child.before
    person.child.close()
    assert (person.child.exitstatus, person.child.signalstatus) == (143, None)
    assert "Traceback" not in left
    assert "\x1b[?2004l" in left  # the terminal is restored


def test_a_closed_terminal(specdec, main):
    """Writing fails from then on, but the exit code is that of SIGHUP."""
    arguments = [*specdec.command, "generate", "--main", main, *ENDLESS, "words"]
    first, *rest = map(str, arguments)
    child = pexpect.spawn(first, rest, env=specdec.environment, timeout=20)
    child.expect(rb"\w")
    child.ptyproc.delayafterclose = child.ptyproc.delayafterterminate = 2
    child.close(force=False)
    assert (child.exitstatus, child.signalstatus) == (129, None)
